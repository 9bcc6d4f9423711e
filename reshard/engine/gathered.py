"""How are whole parameters read and written?

For a while, inside ``with engine.gathered(...)``; or once, as a state dict that plain torch loads.
Both are asked for on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from reshard.engine.assembly import share
from reshard.engine.residency import Resident
from reshard.errors import RequestError

if TYPE_CHECKING:
    from reshard.engine.core import Core
    from reshard.engine.holding import Holding

Write = Literal["rank0", "all"] | None
What = Module | Parameter | str | Sequence[Module | Parameter | str] | None


def select(core: Core, what: What) -> list[Resident]:
    """The units that hold what is named: modules, parameters or their names; ``None``: all."""
    if what is None:
        return list(core.residents)
    wanted: set[Parameter] = set()
    for one in [what] if isinstance(what, Module | Tensor | str) else what:
        if isinstance(one, Module):
            wanted.update(one.parameters())
        elif isinstance(one, str):
            wanted.update(_named(core.module, one))
        else:
            wanted.add(one)
    found = [r for r in core.residents if not wanted.isdisjoint(p for _, p in r.unit.parameters)]
    if strange := wanted - {p for r in found for _, p in r.unit.parameters}:
        raise RequestError(f"{len(strange)} of the parameters aren't the engine's")
    return found


def _named(model: Module, name: str) -> list[Parameter]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if name in parameters:
        return [parameters[name]]
    modules = dict(model.named_modules(remove_duplicate=False))
    if name in modules:
        return list(modules[name].parameters())
    raise RequestError(f"the model has no parameter or module {name!r}")


@contextmanager
def gathered(core: Core, what: What, write: Write) -> Iterator[None]:
    """See :meth:`reshard.engine.engine.ZeroEngine.gathered`."""
    if write not in (None, "rank0", "all"):
        raise RequestError(f"write={write!r}", hint='give "rank0", "all" or None')
    if core.busy:
        raise RequestError(f"gathered() was called while {core.busy}")
    residents = select(core, what)
    for resident in residents:
        if core.residency is not None:
            core.residency.enter(resident)
    done = False
    try:
        yield
        done = True
    finally:
        holdings = [holding for resident in residents for holding in resident.holdings]
        try:
            if write and done:
                take_back(core, holdings, write)
            elif done:
                for holding in holdings:
                    holding.check_unwritten()
        finally:
            for holding in holdings:
                holding.accept()
            if core.residency is not None:
                for resident in residents:
                    resident.outside &= not (write and done)
                    core.residency.leave(resident)


def take_back(core: Core, holdings: Sequence[Holding], write: Write) -> None:
    """Take what was written into slices and masters; whole parameters become the same again."""
    for holding in holdings:
        if write == "rank0":
            share(core.world, holding.whole, f"written {holding.flat.name}")
        holding.take_back()
    if core.residency is None and core.stage and write == "all":
        for holding in holdings:
            label = f"written {holding.flat.name}"
            core.shard.gather(holding.whole, holding.bounds, label).wait()


def full_state_dict(core: Core, *, masters: bool, rank0: bool) -> dict[str, Any]:
    """See :meth:`reshard.engine.engine.ZeroEngine.full_state_dict`."""
    if core.busy:
        raise RequestError(f"full_state_dict() was called while {core.busy}")
    wanted = not rank0 or core.world.rank == 0
    copies: dict[Parameter, Tensor] = {}
    for holding in core.holdings:
        whole = _whole(core, holding, masters)
        if wanted:
            views = holding.views(whole)
            for parameter, view in zip(holding.parameters, views, strict=True):
                copies[parameter] = view.clone()
    if not wanted:
        return {}
    state = core.module.state_dict(keep_vars=True)
    for name, value in state.items():
        if isinstance(value, Parameter):
            state[name] = copies[value]
        elif isinstance(value, Tensor):
            state[name] = value.detach().clone()
    return state


def _whole(core: Core, holding: Holding, masters: bool) -> Tensor:
    """All elements of a flat, in a buffer of their own where they aren't whole anyway."""
    own = holding.own
    if own.numel() == holding.bounds[-1] and (masters or own.dtype == holding.dtype):
        return own
    if core.residency is None and not (masters and own.dtype != holding.dtype):
        return holding.whole
    dtype = own.dtype if masters else holding.dtype
    whole = torch.empty(holding.bounds[-1], dtype=dtype, device=own.device)
    whole[holding.low : holding.high].copy_(own)
    core.shard.gather(whole, holding.bounds, f"state of {holding.flat.name}").wait()
    return whole
