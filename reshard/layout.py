"""Who holds what?

A **flat space** is an ordered list of (tensor, box) entries laid end to end: one a parameter
group and a pipeline, tensor or expert coordinate. Its **partition** cuts it over the shards. A
**layout** is all flat spaces of a checkpoint with the sizes of its mesh. It is small, O(tensors +
ranks), whatever the world size.

The states of a parameter (``master``, ``exp_avg``, …) share a space: they are cut alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from reshard.box import Box, Shape
from reshard.dtypes import DType
from reshard.partition import Partition
from reshard.ruler import Ints, Ruler, ints

PARAM = "param"
"""State of the weights as the model computes with them (often 16-bit)."""
MASTER = "master"
"""State of the fp32 weights that the optimizer steps."""
BUFFER = "buffer"
"""State of registered buffers: not trained, saved with the model."""
CLIENT = "client"
"""State of tensors found in what the training script stored beside the model."""

AXES = ("pipeline", "tensor", "expert", "shard", "replicate")
"""The axes of a mesh."""

TensorKey = tuple[str, str]
"""A tensor's name and state."""


def key_text(key: TensorKey) -> str:
    """How a tensor is written in messages and files: ``state:name``."""
    return f"{key[1]}:{key[0]}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor, or a box of one, in a flat space.

    Parameters
    ----------
    name
        The tensor's name.
    shape
        The whole tensor's shape.
    box
        The region that lies here; ``None`` for the whole.
    """

    name: str
    shape: Shape
    box: Box | None = None

    def __post_init__(self) -> None:
        assert not self.shape or min(self.shape) >= 0, self
        assert self.box is None or self.box.within(self.shape), self

    @property
    def region(self) -> Box:
        """The box, also where it is the whole tensor."""
        return Box.whole(self.shape) if self.box is None else self.box

    @property
    def local_shape(self) -> Shape:
        """The shape of what lies here."""
        return self.shape if self.box is None else self.box.shape

    @property
    def numel(self) -> int:
        """How many elements lie here."""
        return math.prod(self.local_shape)


@dataclass(frozen=True, slots=True, eq=False)
class FlatSpace:
    """An ordered list of entries, the rule that cuts it, and the states that lie so.

    Parameters
    ----------
    name
        Unique in the layout.
    entries
        In the order in which they lie.
    partition
        How they are cut.
    states
        State to element type.
    coords
        Where on the mesh the space stands: axis to index, for axes other than ``shard``.
    group
        The parameter group that it belongs to, if it belongs to one; a tuple names one for each
        entry.
    shard_start, shard_step
        Shard k of the space is index ``shard_start + k * shard_step`` of the mesh's shard axis
        (expert-parallel groups take every n-th rank).
    """

    name: str
    entries: tuple[Entry, ...]
    partition: Partition
    states: Mapping[str, DType]
    coords: Mapping[str, int] = field(default_factory=dict)
    group: int | tuple[int, ...] | None = None
    shard_start: int = 0
    shard_step: int = 1
    ruler: Ruler = field(init=False, repr=False)

    def __post_init__(self) -> None:
        assert self.states, self.name
        assert set(self.coords) <= set(AXES), self.coords
        assert not isinstance(self.group, tuple) or len(self.group) == len(self.entries), self.name
        shapes = [e.local_shape for e in self.entries]
        numel = ints([math.prod(shape) for shape in shapes])
        rows = ints([shape[0] if shape else 1 for shape in shapes])
        object.__setattr__(self, "ruler", self.partition.ruler(numel, rows))

    @property
    def shards(self) -> int:
        """How many shards are stored."""
        return self.partition.stored_shards

    @property
    def numel(self) -> int:
        """Elements of all entries, without padding."""
        return int(self.ruler.numel.sum())

    def in_groups(self) -> dict[int, tuple[Entry, ...]]:
        """Its entries by parameter group; empty if it belongs to none."""
        if self.group is None:
            return {}
        if isinstance(self.group, int):
            return {self.group: self.entries}
        found: dict[int, list[Entry]] = {}
        for group, entry in zip(self.group, self.entries, strict=True):
            found.setdefault(group, []).append(entry)
        return {group: tuple(entries) for group, entries in found.items()}

    def rank(self, shard: int) -> int:
        """The index on the mesh's shard axis that holds the shard."""
        return self.shard_start + shard * self.shard_step

    def kept(self) -> Ints:
        """Elements that each stored shard holds, without padding."""
        return self.ruler.kept(self.shards)


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """All flat spaces of a checkpoint and the mesh that they stand on.

    Parameters
    ----------
    spaces
        With distinct names.
    mesh
        Axis to size; an axis that isn't named has size 1.
    stage
        The ZeRO stage that the layout was made for, where it was.
    """

    spaces: tuple[FlatSpace, ...]
    mesh: Mapping[str, int]
    stage: int | None = None

    def __post_init__(self) -> None:
        names = [s.name for s in self.spaces]
        assert len(set(names)) == len(names), names
        assert set(self.mesh) <= set(AXES), self.mesh

    @property
    def world(self) -> int:
        """Size of the shard axis: what ``--from`` and ``--to`` speak of."""
        return self.mesh.get("shard", 1)

    @property
    def ranks(self) -> int:
        """All ranks of the mesh (experts live on the shard axis)."""
        return math.prod(n for axis, n in self.mesh.items() if axis != "expert")

    def space(self, name: str) -> FlatSpace:
        """The space of that name."""
        return next(s for s in self.spaces if s.name == name)
