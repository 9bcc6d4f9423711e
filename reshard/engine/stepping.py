"""What happens in a step, in which order?

The ranks agree on what they have (backwards, late gradients, parameters without any gradient), sum
what is left, measure and clip; the optimizer steps what this rank owns; and where the parameters
are whole, they are gathered anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from reshard.engine import clip
from reshard.engine.failures import RanksDisagree
from reshard.engine.holding import Holding
from reshard.engine.intake import Intake
from reshard.engine.loose import Loose

if TYPE_CHECKING:
    from reshard.engine.core import Core


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What a step has to say.

    Parameters
    ----------
    step
        How many steps were taken, this one included.
    norm
        Length of the whole gradient before clipping; ``None`` where nobody asked for it.
    skipped
        Whether gradients overflowed, so that nothing was changed.
    loss_scale
        The factor that the next loss will be scaled by.
    sent
        Bytes that this rank sent since the last step.
    peak
        The most elements that were gathered at a time since the last step (stage 3; else those
        of all parameters).
    """

    step: int
    norm: float | None
    skipped: bool
    loss_scale: float
    sent: int
    peak: int


@dataclass(frozen=True, slots=True, eq=False)
class _Gradient:
    intake: Intake
    run: Tensor | Loose
    seen: bytes


def step(core: Core) -> tuple[float | None, bool]:
    """Take a step; return the gradient's norm (or ``None``) and whether it was skipped."""
    for holding in core.holdings:
        holding.check_unwritten()
    seen = _agree(core)
    backwards = core.world.size * core.micro_batches
    scale = 1.0 / (backwards * core.scale.value)
    gradients = [_sum(i, s, scale) for i, s in zip(core.reducer.intakes, seen, strict=True)]
    norm = _norm(core, gradients)
    skipped = core.scale.checked and norm is not None and not math.isfinite(norm)
    if not skipped:
        if norm is not None and (factor := clip.factor(norm, core.clip_norm)) < 1:
            for gradient in gradients:
                gradient.run.mul_(factor)
        _update(core, gradients)
    core.scale.update(skipped)
    return norm, skipped


def _agree(core: Core) -> list[bytes]:
    """Find out what all ranks have; reduce what is late. Returns what had a gradient anywhere."""
    reducer = core.reducer
    count = float(core.micro_batches)
    misfit = core.residency is not None and not core.residency.routes_fit
    late = [i in reducer.late or reducer.unsynced for i in reducer.intakes]
    had = [flag for intake in reducer.intakes for flag in intake.seen]
    values = torch.tensor([count, count * count, misfit, *late, *had], dtype=torch.float64)
    agreed: list[float] = core.world.agree(values, "sum", "step").tolist()
    total, squares, misfits = agreed[:3]
    if squares * core.world.size != total * total:
        counts = core.world.exchange(core.micro_batches, "backwards of the step")
        raise RanksDisagree(
            "the ranks come to step() after different numbers of backward passes",
            ranks={rank: f"{n} backward passes" for rank, n in enumerate(counts)},
            hint="give every rank the same number of micro-batches in a step",
        )
    flags = agreed[3 : 3 + len(late)]
    reducer.flush([i for i, flag in zip(reducer.intakes, flags, strict=True) if flag])
    if any(flags):  # their parameters have only now been seen
        had = [flag for intake in reducer.intakes for flag in intake.seen]
        values = torch.tensor(had, dtype=torch.float64)
        agreed = [*agreed[: 3 + len(late)], *core.world.agree(values, "sum", "late").tolist()]
    if misfits or core.steps == 0:
        _agree_on_order(core)
    seen: list[bytes] = []
    at = 3 + len(late)
    for intake in reducer.intakes:
        end = at + len(intake.seen)
        seen.append(bytes(map(bool, agreed[at:end])))
        at = end
    return seen


def _agree_on_order(core: Core) -> None:
    """Exchange in which order units were used and gradients finished."""
    reducer, residency = core.reducer, core.residency
    rest = [n for n in _numbers(reducer.order, reducer.intakes) if n not in reducer.finished]
    order = [*reducer.finished, *rest]
    noted = {} if residency is None else residency.noted()
    said = core.world.exchange({"order": order, "uses": noted}, "order of use")
    if core.steps == 0:
        reducer.agree(said[0]["order"])
    if residency is not None:
        residency.agree([one["uses"] for one in said])


def _numbers(order: Sequence[Intake], intakes: Sequence[Intake]) -> list[int]:
    number = {id(intake): n for n, intake in enumerate(intakes)}
    return [number[id(intake)] for intake in order]


def _sum(intake: Intake, seen: bytes, scale: float) -> _Gradient:
    """The step's gradient in this rank's run; inside the whole, where there is one."""
    holding = intake.holding
    run = intake.total()
    if scale != 1.0:
        run.mul_(scale)
    if intake.whole is not None:
        assert not isinstance(run, Loose)
        inside = intake.whole[holding.low : holding.high]
        if inside.data_ptr() != run.data_ptr():
            inside.copy_(run)
        run = inside
    return _Gradient(intake, run, seen)


def _norm(core: Core, gradients: Sequence[_Gradient]) -> float | None:
    if core.clip_norm is None and not core.scale.checked:
        return None
    runs = [g.run.tensors if isinstance(g.run, Loose) else [g.run] for g in gradients]
    squares = clip.square_sum(tensor for tensors in runs for tensor in tensors)
    total = core.shard.agree(torch.tensor([squares], dtype=torch.float64), "sum", "norm")
    if core.ranks.parts > 1:  # of the whole model: each stage of the pipeline counts once
        if core.world.rank:
            total.zero_()
        total = core.ranks.all.agree(total, "sum", "norm of all stages")
    return math.sqrt(float(total)) if not math.isnan(float(total)) else math.nan


def _update(core: Core, gradients: Sequence[_Gradient]) -> None:
    """Step the optimizer, and make the parameters those of its masters."""
    pending = []
    for gradient in gradients:
        whole, holding = gradient.intake.whole, gradient.intake.holding
        if whole is not None:
            label = f"gradients of {holding.flat.name}"
            pending.append(core.shard.gather(whole, holding.bounds, label))
    if core.stage == 0:
        for one in pending:
            one.wait()
    given: dict[str, tuple[Tensor | Loose, bytes]] = {}
    for gradient in gradients:
        holding = gradient.intake.holding
        owned = gradient.run
        if core.stage == 0 and gradient.intake.whole is not None:
            owned = gradient.intake.whole
        if isinstance(owned, Tensor):
            owned = owned.to(holding.own.dtype)
        given[holding.flat.name] = (owned, gradient.seen)
    core.pieces.step(given)
    for one in pending:
        one.wait()
    if core.residency is None:
        refill(core, core.trained)


def refill(core: Core, holdings: Sequence[Holding]) -> None:
    """Make whole parameters those of the masters (stages 0 to 2)."""
    pending = []
    for holding in holdings:
        holding.fill()
        if core.stage > 0:
            name = holding.flat.name
            pending.append(core.shard.gather(holding.whole, holding.bounds, name))
    for one in pending:
        one.wait()
