"""What is a parameter that isn't there?

A released parameter keeps its identity, shape and type, but its storage has no bytes; a kernel
that reads it would crash. While it is released its class is :class:`Released`: questions that the
shape answers are answered, and everything else gathers its unit first. A gathered parameter is a
plain ``Parameter`` again and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from reshard.engine.inner import as_plain


class Home(Protocol):
    """What brings a parameter back."""

    def fetch(self) -> None:
        """Gather the parameter now."""
        ...

    def fetched(self) -> None:
        """What it was gathered for is done."""
        ...


def _getters(*names: str) -> set[Any]:
    """Not every release of torch has all of them."""
    return {getattr(Tensor, name).__get__ for name in names if hasattr(Tensor, name)}


_WITHOUT_VALUES: frozenset[Any] = frozenset(
    {
        *_getters("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "names"),
        *_getters("is_leaf", "requires_grad", "grad", "grad_fn", "_version", "output_nr"),
        *_getters("is_cpu", "is_cuda", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized"),
        *_getters("is_mps", "is_xpu", "is_mkldnn", "is_nested", "retains_grad", "_backward_hooks"),
        *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad", "_backward_hooks")),
        *(
            Tensor.untyped_storage,
            Tensor.size,
            Tensor.dim,
            Tensor.ndimension,
            Tensor.numel,
            Tensor.nelement,
        ),
        *(Tensor.stride, Tensor.storage_offset, Tensor.element_size, Tensor.is_contiguous),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed, Tensor.get_device),
        *(Tensor.requires_grad_, Tensor.retain_grad, Tensor.register_hook, Tensor.__hash__),
        *(Tensor.register_post_accumulate_grad_hook, Tensor.__len__, Tensor.is_shared),
        *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor),
        *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like),
        *(torch.rand_like, torch.randn_like),
    }
)
"""Functions of shape, type and gradient alone."""


class Released(Parameter):
    """A parameter whose unit isn't gathered."""

    home: Home

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Gather what is read, then go on as if it had always been there."""
        kwargs = kwargs or {}
        if func in _WITHOUT_VALUES:
            with as_plain():
                return func(*args, **kwargs)
        homes = {id(p.home): p.home for p in released([*args, *kwargs.values()])}
        for home in homes.values():
            home.fetch()
        try:
            with as_plain():
                return func(*args, **kwargs)
        finally:
            for home in homes.values():
                home.fetched()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """What is known without a gather, so that one rank alone may print it."""
        return (
            f"Released parameter: {tuple(self.shape)} {self.dtype}, "
            f"requires_grad={self.requires_grad}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        """A plain parameter with the values."""
        if id(self) not in memo:
            memo[id(self)] = self._copy()
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as a plain parameter with the values."""
        plain: Any = self._copy()
        return plain.__reduce_ex__(protocol)

    def _copy(self) -> Parameter:
        with torch.no_grad():
            return Parameter(self.clone(), self.requires_grad)


def released(values: Iterable[Any]) -> Iterator[Released]:
    """The released parameters among arguments, at any depth."""
    for value in values:
        if isinstance(value, Released):
            yield value
        elif isinstance(value, list | tuple):
            yield from released(value)
        elif isinstance(value, dict):
            yield from released(value.values())
