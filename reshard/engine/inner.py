"""On which parts of torch that it doesn't promise do we rely?

All of them are here, so that a new release is checked in one place; the tests of the engine fail
where one is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]


def identity(storage: Any) -> int:
    """What tells a storage from every other one that lives."""
    return int(storage._cdata)


def storage_identity(tensor: Tensor) -> int:
    """The identity of a tensor's storage."""
    return identity(tensor.untyped_storage())


def uses(storage: Any) -> int:
    """How many tensors (and other owners) hold a storage."""
    return int(_C._storage_Use_Count(storage._cdata))


def backward_number() -> int:
    """The number of the backward that runs in this thread; -1 outside. Nested ones have others."""
    return int(_C._current_graph_task_id())


def reaches(parameter: Tensor) -> bool:
    """Whether the backward that runs in this thread computes a parameter's gradient."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    return bool(_C._will_engine_execute_node(node))


def after_backward(call: Callable[[], None]) -> None:
    """Call something when the backward that runs in this thread is through."""
    variable: Any = torch.autograd.Variable
    variable._execution_engine.queue_callback(call)


def as_plain() -> AbstractContextManager[Any]:
    """Inside, subclasses of tensors are treated as plain tensors."""
    return _C.DisableTorchFunctionSubclass()  # type: ignore[no-any-return]


def default_store() -> Any:
    """The store that the default process group was made with; one of our own without a group."""
    from torch.distributed import distributed_c10d

    module: Any = distributed_c10d
    if module.is_initialized():
        return module._get_default_store()
    return _C._distributed_c10d.HashStore()


def is_lazy(parameter: Any) -> bool:
    """Whether a parameter has no shape yet."""
    module: Any = torch.nn.parameter
    return isinstance(parameter, module.UninitializedTensorMixin)
