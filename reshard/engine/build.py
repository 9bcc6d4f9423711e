"""How is an engine put together?

Arguments are checked; ranks prove that they made the same model; buffers and parameters become
those of rank 0; flats, reductions, residency and the optimizer are made, in this order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from reshard.engine.assembly import (
    assemble,
    check_parameter,
    check_same,
    compare,
    share,
    tied_names,
)
from reshard.engine.core import Core
from reshard.engine.intake import Intake, Usage
from reshard.engine.optimizer import Groups, Pieces, resolve_groups
from reshard.engine.precision import Precision
from reshard.engine.ranks import ranks
from reshard.engine.reduction import Reducer
from reshard.engine.residency import Residency, Resident
from reshard.engine.units import UnitRule, units
from reshard.errors import RequestError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from reshard.engine.topology import Groups as RankGroups


def _check(model: Any, stage: Any, prefetch: Any, clip_norm: float | None) -> None:
    if not isinstance(model, Module):
        raise RequestError(f"the model is a {type(model).__name__}, not a torch.nn.Module")
    if stage not in (0, 1, 2, 3):
        raise RequestError(f"stage={stage!r}; there are stages 0, 1, 2 and 3")
    if not isinstance(prefetch, int) or prefetch < 0:
        raise RequestError(f"prefetch={prefetch!r}; it is a number of units, at least 0")
    if clip_norm is not None and not clip_norm > 0:
        raise RequestError(f"clip_norm={clip_norm!r}; a limit is positive, None means no limit")
    if any("_reshard" in vars(p) for p in model.parameters()):
        raise RequestError("the model already belongs to an engine")
    for name, parameter in model.named_parameters():
        check_parameter(name, parameter)


def build(
    model: Module,
    optimizer: Callable[[list[dict[str, Any]]], Any],
    groups: Groups,
    stage: int,
    rule: UnitRule,
    mesh: DeviceMesh | RankGroups | None,
    prefetch: int,
    precision: Precision,
    clip_norm: float | None,
) -> Core:
    """Put an engine together; see :class:`reshard.engine.engine.ZeroEngine`."""
    _check(model, stage, prefetch, clip_norm)
    first = next(model.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    where = ranks(mesh, device)
    settings, group_of = resolve_groups(model, groups)
    found = units(model, rule)
    names = [unit.label for unit in found]
    if where.parts > 1:
        own = [f"{stage=}", f"{clip_norm=}", f"{precision=}", f"{len(settings)} groups"]
        compare(where.all, own, "settings", "give the same settings on every stage of the pipeline")
    check_same(
        where.world,
        model,
        [f"{stage=}", f"{prefetch=}", f"{clip_norm=}", f"{precision=}", f"units={names}",
         f"groups={[group_of.get(p) for p in model.parameters()]}"],
    )  # fmt: skip
    for name, buffer in model.named_buffers():
        share(where.world, buffer, f"buffer {name}")
    aliases = tied_names(model)
    residents = assemble(found, group_of, precision, where, stage)
    for parameter in model.parameters():
        vars(parameter)["_reshard"] = True
    trained = [(r, h) for r in residents for h in r.holdings if h.flat.trained]
    usages = {id(r): Usage(_is_tied(r, aliases)) for r in residents}
    if not trained:
        raise RequestError("no parameter of the model is trained")
    intakes = [
        Intake(h, usages[id(r)], precision.sum_type(h.dtype), whole=stage <= 1)
        for r, h in reversed(trained)
    ]
    divided = stage == 3 and where.shard.size > 1  # a rank that owns everything releases nothing
    residency = Residency(residents, where.shard, prefetch) if divided else None
    return Core(
        module=model,
        stage=stage,
        ranks=where,
        residents=tuple(residents),
        residency=residency,
        reducer=Reducer(intakes, where.shard, where.combine if where.replicate else None),
        pieces=Pieces(optimizer, settings, [h for _, h in trained]),
        precision=precision,
        scale=precision.scale({h.dtype for _, h in trained}),
        clip_norm=clip_norm,
        aliases=aliases,
    )


def _is_tied(resident: Resident, aliases: Any) -> bool:
    tied = set(aliases.values())
    return any(name in tied for name, _ in resident.unit.parameters)
