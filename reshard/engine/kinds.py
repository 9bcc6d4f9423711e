"""What does an optimizer keep of a parameter?

It isn't asked, since it makes its state when it first steps: a copy of it steps a parameter of
five elements, and what it has then is looked at. The engine's optimizer isn't touched.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

PROBE = 5
"""Elements of the parameter that is stepped."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What is kept of each parameter of a group.

    Parameters
    ----------
    states
        States with an element for each of the parameter, and their types.
    scalars
        The other states, with a value as an example.
    """

    states: Mapping[str, torch.dtype]
    scalars: Mapping[str, Any]


def kinds(optimizer: Optimizer, dtype: torch.dtype, device: torch.device) -> list[Kind]:
    """What an optimizer keeps, group by group.

    Parameters
    ----------
    optimizer
        Any; it stays as it is.
    dtype, device
        Of its parameters.
    """
    return [_kind(optimizer, group, dtype, device) for group in optimizer.param_groups]


def _kind(
    optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> Kind:
    import torch

    parameter = torch.nn.Parameter(torch.zeros(PROBE, dtype=dtype, device=device))
    parameter.grad = torch.zeros_like(parameter)
    probe = copy.copy(optimizer)
    probe.param_groups = [{**copy.deepcopy(_settings(group)), "params": [parameter]}]
    probe.state = defaultdict(dict)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(probe, hooks, OrderedDict())
    # the class's own: a scheduler may have wrapped the instance's
    type(optimizer).step(probe)
    state = probe.state[parameter]
    elements = {k: v for k, v in state.items() if getattr(v, "shape", None) == parameter.shape}
    scalars = {k: v for k, v in state.items() if k not in elements and v is not None}
    return Kind({k: v.dtype for k, v in elements.items()}, scalars)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k != "params"}


def like(example: Any, value: Any) -> Any:
    """A value in the form in which the optimizer keeps it."""
    import torch

    plain = np.asarray(value).reshape(()).item()
    if isinstance(example, torch.Tensor):
        return torch.full_like(example, plain)
    return type(example)(plain)
