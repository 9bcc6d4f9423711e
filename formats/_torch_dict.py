"""Which part of a ``torch.save`` file is a model's state dict, and which an optimizer's?

torch prescribes nothing: a file holds what the script gave. Known are a state dict alone (names to
tensors), and a dict with a state dict under one of :data:`MODEL_KEYS` and an optimizer's
(``Optimizer.state_dict()``: ``state`` and ``param_groups``) under one of :data:`OPTIMIZER_KEYS`.
All else is the script's own state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reshard.errors import RequestError, UnsupportedError
from reshard.pickle_stubs import Opaque
from reshard.stored import StoredTensor, brief

MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module", "model_state", "net")
"""What scripts call the model's state dict."""

OPTIMIZER_KEYS = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict", "opt")
"""What scripts call the optimizer's."""

MODEL = "pytorch_model.bin"
"""What transformers calls a model's file."""

OBJECTS = "torch"
"""The key of a manifest's objects for what is neither a tensor with a name nor the script's own."""

LIST_KEYS = ("optimizer_states",)
"""What Lightning calls a list of the optimizers' (read where there is one)."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a file holds.

    Parameters
    ----------
    model
        Names to tensors (and to other values, where a module has extra state).
    model_key
        Where it stands; ``None`` if it is the whole file.
    optimizer
        ``state`` and ``param_groups``, if there is an optimizer.
    optimizer_key
        Where it stands.
    others
        All other keys of the file.
    """

    model: Mapping[str, Any]
    model_key: str | None = None
    optimizer: Mapping[str, Any] | None = None
    optimizer_key: str | None = None
    others: Mapping[Any, Any] = field(default_factory=dict[Any, Any])


def parts_of(value: object, path: Path) -> Parts:
    """Tell the parts of a file's value.

    Parameters
    ----------
    value
        What the file holds.
    path
        The file, for messages.

    Raises
    ------
    RequestError
        If several keys could be the model or the optimizer.
    UnsupportedError
        If there is no state dict in it.
    """
    if not isinstance(value, Mapping):
        what = "a tensor" if isinstance(value, StoredTensor) else brief(value)
        raise UnsupportedError(f"holds {what}, not a state dict", where=path)
    if _is_state_dict(value):
        return Parts(value)
    if _is_optimizer(value):
        return Parts({}, None, value, "")
    models = [k for k in MODEL_KEYS if isinstance(value.get(k), Mapping)]
    if len(models) > 1:
        raise RequestError(f"has several models: {', '.join(models)}", where=path)
    lists = {k: value[k][0] for k in LIST_KEYS if _only_one(value.get(k))}
    found = {k: value[k] for k in OPTIMIZER_KEYS if _is_optimizer(value.get(k))} | lists
    if len(found) > 1:
        raise RequestError(f"has several optimizers: {', '.join(found)}", where=path)
    if not models and not found:
        keys = ", ".join(brief(k) for k in list(value)[:8])
        raise UnsupportedError(
            f"holds no state dict that is known as one; its keys are {keys}",
            where=path,
            hint=f"a model is looked for under {', '.join(MODEL_KEYS)}, or as the whole file",
        )
    key = models[0] if models else None
    model = value[key] if key is not None else {}
    name, optimizer = next(iter(found.items()), (None, None))
    others = {k: v for k, v in value.items() if k not in (key, name)}
    return Parts(model, key if models else "", optimizer, name, others)


def _is_state_dict(value: Mapping[Any, Any]) -> bool:
    """Whether keys are names and values tensors, but for extra state that modules add."""
    if not all(isinstance(name, str) for name in value):
        return False
    tensors = [isinstance(v, (StoredTensor, Opaque)) for v in value.values()]
    extra = [name.endswith("_extra_state") for name in value]
    return any(tensors) and all(a or b for a, b in zip(tensors, extra, strict=True))


def _is_optimizer(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), (list, tuple))
    )


def _only_one(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 1 and _is_optimizer(value[0])
