"""What is an engine made of?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn import Module

from reshard.engine.flat import Flat
from reshard.engine.holding import Holding
from reshard.engine.optimizer import Pieces
from reshard.engine.precision import LossScale, Precision
from reshard.engine.reduction import Reducer
from reshard.engine.residency import Residency, Resident

if TYPE_CHECKING:
    from reshard.engine.counting import Counting
    from reshard.engine.ranks import Ranks


@dataclass(slots=True, eq=False)
class Core:
    """The parts of an engine, for the modules that carry it out.

    Parameters
    ----------
    module
        The model.
    stage
        0 to 3.
    ranks
        The groups of ranks.
    residents
        The units, the root first.
    residency
        Which of them are gathered; ``None`` where all are always (stages 0 to 2).
    reducer
        The gradients.
    pieces
        The optimizer.
    precision, scale
        Element types and the loss scale.
    clip_norm
        The longest gradient that isn't shortened.
    aliases
        Tied names to the names in the flats.
    steps, micro_batches
        Counters: steps taken, backwards since the last one.
    """

    module: Module
    stage: int
    ranks: Ranks
    residents: tuple[Resident, ...]
    residency: Residency | None
    reducer: Reducer
    pieces: Pieces
    precision: Precision
    scale: LossScale
    clip_norm: float | None
    aliases: Mapping[str, str]
    steps: int = 0
    micro_batches: int = 0

    @property
    def world(self) -> Counting:
        """All ranks that train this part of the model."""
        return self.ranks.world

    @property
    def shard(self) -> Counting:
        """The ranks that share one copy of the model's state."""
        return self.ranks.shard

    @property
    def holdings(self) -> list[Holding]:
        """All flats on this rank."""
        return [holding for resident in self.residents for holding in resident.holdings]

    @property
    def trained(self) -> list[Holding]:
        """The flats with gradients."""
        return [holding for holding in self.holdings if holding.flat.trained]

    def holding(self, flat: Flat) -> Holding:
        """The tensors of a flat on this rank."""
        return next(holding for holding in self.holdings if holding.flat is flat)

    @property
    def busy(self) -> str | None:
        """What is under way."""
        if self.reducer.inside:
            return "a backward is under way"
        if self.residency is not None and self.residency.inside:
            return "a forward is under way"
        return None
