"""What do ``save`` and ``load`` ask of an engine, and what do they give back?

:class:`Stateful` is all that they know of an engine; :class:`Restored` is all that a checkpoint
becomes. Both speak of slices: nothing here is ever whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from reshard.errors import RequestError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch._C._distributed_c10d import Store

    from reshard.engine.flat import Flat
    from reshard.engine.snapshot import Saving


class NotAtSafePoint(RequestError):  # noqa: N818 - says what is the case
    """Asked for in the middle of a step, when parameters and optimizer don't fit each other."""


class Stateful(Protocol):
    """An engine, as far as saving and loading are concerned.

    All ranks call ``save`` and ``load`` together. Ranks of one stage of a pipeline with the same
    ``shard`` hold the same slices; those of replica 0 write them.
    """

    @property
    def rank(self) -> int:
        """Number of the rank among all ranks."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are in all."""
        ...

    @property
    def pipeline(self) -> tuple[int, int]:
        """Which stage of a pipeline this rank trains, of how many; (0, 1) without one.

        Flats, buffers and aliases are that stage's alone.
        """
        ...

    @property
    def shard(self) -> int:
        """Which slice of every flat this rank owns."""
        ...

    @property
    def shards(self) -> int:
        """Over how many ranks flats are cut: 1 at stage 0, where every rank owns all of them."""
        ...

    @property
    def replica(self) -> int:
        """Which of the groups with all slices this rank belongs to."""
        ...

    @property
    def stage(self) -> int:
        """0, 1, 2 or 3."""
        ...

    @property
    def flats(self) -> Sequence[Flat]:
        """All flats, the same on every rank (of a stage of the pipeline)."""
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer, over pieces."""
        ...

    @property
    def groups(self) -> Sequence[Mapping[str, Any]]:
        """Settings of the parameter groups, without their parameters."""
        ...

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """The buffers that belong to the model's state, by name."""
        ...

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tied names: alias to the name that a flat has."""
        ...

    @property
    def counters(self) -> Mapping[str, Any]:
        """``step``, ``micro_batches``, ``loss_scale`` and the like, as plain data."""
        ...

    @property
    def store(self) -> Store:
        """Small values that all ranks see; used by threads."""
        ...

    @property
    def saving(self) -> Saving:
        """Made once with the engine: what saves keep between them."""
        ...

    def unsafe(self) -> str | None:
        """Why this isn't a safe point, in a few words; ``None`` if it is one."""
        ...

    def exchange(self, data: Any, label: str) -> list[Any]:
        """What each of all ranks said, in rank order; JSON-able and small."""
        ...

    def states(self, flat: Flat) -> Mapping[str, torch.dtype]:
        """States that this rank holds of a flat: ``master`` and the optimizer's, or ``param``."""
        ...

    def parts(self, flat: Flat, state: str) -> Sequence[tuple[int, Tensor]]:
        """What lies in this rank's slice: (first element there, 1-D tensor), in order, no copies.

        A state that the optimizer hasn't made yet for some parameter leaves a gap.
        """
        ...

    def scalars(self, name: str) -> Mapping[str, Any] | None:
        """What the optimizer keeps of a parameter besides tensors of its elements: ``step``.

        ``None`` if this rank has no optimizer state of it at all.
        """
        ...

    def restore(self, restored: Restored) -> None:
        """Take the whole state; what isn't in it is as in a new engine. Must not fail."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Restored:
    """The state of one rank, as a checkpoint gives it.

    Parameters
    ----------
    slices
        Flat's name to state to this rank's slice, 1-D, of the engine's own types. The engine may
        keep these tensors.
    scalars
        Parameter's name to the optimizer's values for it. A parameter that isn't named has no
        optimizer state: it was never stepped.
    groups
        Settings to put into the groups, in the engine's order.
    buffers
        Name to tensor.
    counters
        As :attr:`Stateful.counters` gave them; may be only some.
    """

    slices: Mapping[str, Mapping[str, Tensor]]
    scalars: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    groups: Sequence[Mapping[str, Any]] = ()
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    counters: Mapping[str, Any] = field(default_factory=dict)
