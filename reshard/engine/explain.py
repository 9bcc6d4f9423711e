"""What is where, and what does a step send?

Figures are computed from the flats; optimizer states count once they exist (after the first step).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from reshard.engine.core import Core
    from reshard.engine.holding import Holding
    from reshard.engine.intake import Intake


@dataclass(frozen=True, slots=True)
class UnitLine:
    """A unit.

    Parameters
    ----------
    name
        The module's name, or ``root``.
    parameters
        How many.
    elements
        Of the parameters, padding left out.
    slice
        Elements that this rank owns, padding included.
    """

    name: str
    parameters: int
    elements: int
    slice: int


@dataclass(frozen=True, slots=True)
class Collective:
    """What is sent of one kind.

    Parameters
    ----------
    what
        Which collective.
    when
        How often.
    sent
        Bytes that this rank sends each time.
    """

    what: str
    when: str
    sent: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """What an engine holds and sends, on this rank; ``print`` it.

    Parameters
    ----------
    stage, ranks, copies
        The stage; the ranks that divide a copy; the copies.
    units
        The units, in order.
    at_rest
        Bytes by term between steps.
    before_step
        Bytes by term that a finished backward adds.
    gathered
        Bytes that are gathered at most at a time (stage 3).
    collectives
        What is sent; a forward and a backward are once a micro-batch.
    """

    stage: int
    ranks: int
    copies: int
    units: tuple[UnitLine, ...]
    at_rest: Mapping[str, int]
    before_step: Mapping[str, int]
    gathered: int
    collectives: tuple[Collective, ...]

    def __str__(self) -> str:
        copies = f", {self.copies} copies" if self.copies > 1 else ""
        lines = [f"ZeRO stage {self.stage} over {self.ranks} ranks{copies}"]
        width = max(len(unit.name) for unit in self.units)
        lines += [
            f"  {u.name:<{width}}  {u.elements:>13,} elements in {u.parameters} parameters, "
            f"{u.slice:,} here"
            for u in self.units
        ]
        for title, terms in (("at rest", self.at_rest), ("before the step", self.before_step)):
            lines.append(f"bytes {title}:")
            lines += [f"  {name:<20} {count:>15,}" for name, count in terms.items()]
        if self.gathered:
            lines.append(f"bytes gathered at a time: at most {self.gathered:,}")
        lines.append("bytes sent by this rank:")
        lines += [f"  {c.what:<20} {c.sent:>15,} {c.when}" for c in self.collectives]
        return "\n".join(lines)


def explain(core: Core) -> Explanation:
    """See :meth:`reshard.engine.engine.ZeroEngine.explain`."""
    return Explanation(
        stage=core.stage,
        ranks=core.shard.size,
        copies=core.world.size // core.shard.size,
        units=tuple(
            UnitLine(
                resident.unit.label,
                len(resident.unit.parameters),
                sum(p.numel() for _, p in resident.unit.parameters),
                sum(holding.own.numel() for holding in resident.holdings),
            )
            for resident in core.residents
        ),
        at_rest=_at_rest(core),
        before_step={"gradients": sum(map(_gradient, core.reducer.intakes))},
        gathered=_gathered(core),
        collectives=tuple(_collectives(core)),
    )


def _at_rest(core: Core) -> dict[str, int]:
    """Each byte once: a master that is a view of the parameters is no second copy."""
    whole = 0 if core.residency is not None else sum(_bytes(h.whole) for h in core.holdings)
    own = sum(
        _bytes(h.own)
        for h in core.holdings
        if h.own.untyped_storage().data_ptr() != h.whole.untyped_storage().data_ptr()
    )
    states = sum(
        _bytes(value)
        for state in core.pieces.optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )
    return {"whole parameters": whole, "slices": own, "optimizer state": states}


def _gradient(intake: Intake) -> int:
    holding = intake.holding
    count = holding.bounds[-1] if intake.keep_whole else holding.high - holding.low
    return count * intake.dtype.itemsize


def _gathered(core: Core) -> int:
    if core.residency is None:
        return 0
    widths = [h.dtype.itemsize for h in core.holdings]
    return (core.residency.root.elements + core.residency.budget) * max(widths)


def _collectives(core: Core) -> list[Collective]:
    P = core.shard.size

    def away(holding: Holding, width: int) -> int:
        """What a rank sends when slices meet or part: (P - 1) of them."""
        return (P - 1) * (holding.high - holding.low) * width

    every = sum(away(h, h.dtype.itemsize) for h in core.holdings)
    trained = sum(away(h, h.dtype.itemsize) for h in core.trained)
    sums = sum(away(i.holding, i.dtype.itemsize) for i in core.reducer.intakes)
    reduce = Collective("gradients to slices", "a backward", trained)
    if core.residency is not None:
        return [
            Collective("slices to units", "a forward", every),
            Collective("slices to units", "a backward, less what is still there", every),
            reduce,
        ]
    found = [reduce]
    if core.stage <= 1:
        found.append(Collective("slices to gradients", "a step", sums))
    if core.stage >= 1:
        found.append(Collective("slices to parameters", "a step", trained))
    return found


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
