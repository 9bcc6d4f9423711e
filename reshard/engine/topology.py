"""Which ranks form which group? Those who talk most sit closest.

Ranks are numbered node by node. From the inside out the axes are ``tensor`` (talks within every
layer), ``shard`` (gathers and reduces whole units: kept inside a node), ``replicate`` (sums slices,
across nodes) and ``pipeline`` (hands over activations). The order is everything: with ``shard``
outside of ``replicate`` each gather would cross the network.

Shard ranks are neighbours, so that a sum over a shard group and then over the copies is the
pairwise sum over all data ranks in their order (``counter.py``), where the shard degree is a power
of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from reshard.errors import RequestError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["AXES", "Groups", "Topology"]

AXES = ("pipeline", "replicate", "shard", "tensor")
"""From the outermost to the innermost."""


@dataclass(frozen=True, slots=True)
class Topology:
    """How the ranks are laid out; made from numbers alone.

    Parameters
    ----------
    world
        The number of ranks.
    node
        The number of ranks of a node.
    pipeline, tensor
        Degrees of pipeline and tensor parallelism.
    shard
        Over how many ranks a copy is divided; 0 for as many as a node has.

    Raises
    ------
    RequestError
        If the numbers don't divide, or a shard group would leave its node.
    """

    world: int
    node: int
    pipeline: int = 1
    tensor: int = 1
    shard: int = 0

    def __post_init__(self) -> None:
        for name in ("world", "node", "pipeline", "tensor"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.shard < 0:
            raise RequestError(f"shard is {self.shard}; it must be 1 or more, or 0 for a node's")
        _divides(self.node, self.world, "ranks of a node", "ranks", "give all nodes as many ranks")
        model = self.pipeline * self.tensor
        _divides(
            model,
            self.world,
            f"pipeline x tensor = {self.pipeline} x {self.tensor}",
            "ranks",
            "choose degrees whose product divides the number of ranks",
        )
        _divides(
            self.tensor,
            self.node,
            "tensor ranks",
            "ranks of a node",
            "a tensor group must stay in its node: choose a degree that divides the node",
        )
        data, most = self.world // model, self.node // self.tensor
        if self.shard == 0:
            object.__setattr__(self, "shard", min(data, most))
        _divides(
            self.shard,
            data,
            "shard ranks",
            f"data ranks ({self.world} / {model})",
            "choose a shard degree that divides them",
        )
        _divides(
            self.shard,
            most,
            "shard ranks",
            f"places of a node ({self.node} / {self.tensor} tensor)",
            "a shard group must stay in its node: choose a smaller degree, or a larger node",
        )

    @property
    def replicate(self) -> int:
        """The number of copies."""
        return self.world // (self.pipeline * self.tensor * self.shard)

    @property
    def degrees(self) -> tuple[int, int, int, int]:
        """The size of each of :data:`AXES`."""
        return self.pipeline, self.replicate, self.shard, self.tensor

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis."""
        assert 0 <= rank < self.world
        place: dict[str, int] = {}
        for axis, degree in reversed(list(zip(AXES, self.degrees, strict=True))):
            rank, place[axis] = divmod(rank, degree)
        return place

    def groups_of(self, *axes: str) -> list[tuple[int, ...]]:
        """The groups whose ranks differ along some axes only.

        Returns
        -------
        list of tuple of int
            Each group's ranks in increasing order; the groups in order of their first rank.
        """
        assert set(axes) <= set(AXES)
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            place = self.coordinate(rank)
            fixed = tuple(place[axis] for axis in AXES if axis not in axes)
            groups.setdefault(fixed, []).append(rank)
        return [tuple(group) for group in groups.values()]

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The group along some axes that a rank belongs to."""
        return next(group for group in self.groups_of(*axes) if rank in group)

    def make(self) -> Groups:
        """Make this rank's process groups; called on all ranks together.

        Raises
        ------
        RequestError
            If ``torch.distributed`` runs with another number of ranks.
        """
        if dist.get_world_size() != self.world:
            raise RequestError(
                f"the topology is for {self.world} ranks, but {dist.get_world_size()} are running"
            )
        return Groups(
            topology=self,
            data=self._mine("replicate", "shard"),
            shard=self._mine("shard"),
            replicate=self._mine("replicate"),
            tensor=self._mine("tensor"),
            pipeline=self._mine("pipeline"),
        )

    def _mine(self, *axes: str) -> ProcessGroup:
        # Every rank makes every group, its own or not, in the same order: torch asks for that.
        rank = dist.get_rank()
        mine: ProcessGroup | None = None
        for ranks in self.groups_of(*axes):
            made: Any = dist.new_group(list(ranks), group_desc=" x ".join(axes))
            if rank in ranks:
                mine = made
        assert mine is not None
        return mine


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """A rank's process groups.

    Parameters
    ----------
    topology
        What they were made from.
    data
        The ranks that train the same part of the model: shards and copies.
    shard, replicate, tensor, pipeline
        The ranks along one axis.
    """

    topology: Topology
    data: ProcessGroup
    shard: ProcessGroup
    replicate: ProcessGroup
    tensor: ProcessGroup
    pipeline: ProcessGroup


def _divides(part: int, whole: int, what: str, of: str, hint: str) -> None:
    if whole % part:
        raise RequestError(f"{part} {what} don't divide {whole} {of}", hint=hint)
