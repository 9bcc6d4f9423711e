"""How do the boxes of a target lie in a source?

Where the source has an entry with the very same box, a **frame** says which entry that is, and
how the box's elements lie in its tensor. Most states of a space lie alike, and share their frames.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from reshard.box import Box, Shape
from reshard.dtypes import DType
from reshard.manifest import Place, Tensor
from reshard.ruler import Ints
from reshard.store import EntryStore, ShardStore, Store

ENDLESS = 1 << 62
"""The length of a row that never ends."""

Part = tuple[int, str]
"""Index of a space and one of its states."""

Frame = tuple[int, int, int]
"""``first``, ``row`` and ``pitch``; see :class:`Frames`."""

WHOLE: Frame = (0, ENDLESS, 0)
"""The frame of a whole tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class Cover:
    """One replica of a source tensor; one object for each.

    Parameters
    ----------
    tensor
        The tensor.
    places
        Where it lies: one place, or the places of boxes that make it up.
    """

    tensor: Tensor
    places: tuple[Place, ...]


NO_COVER = Cover(Tensor("", "", (), DType("uint8", 8, None, None), ()), ())
"""Stands where a cover is yet to be found."""


@dataclass(frozen=True, slots=True, eq=False)
class Frames:
    """How boxes lie in the source, whatever their state; columns with one row a box.

    States of a space that lie alike in the source share one of these, so that what is computed
    of it is computed once for all of them.

    Parameters
    ----------
    group
        Which of ``stores`` holds the same box; -1 where boxes must be searched.
    entry
        The entry of that store's space.
    first, row, pitch
        Element x of the box is element ``first + x // row * pitch + x % row`` of the message;
        of use only where ``group`` isn't -1.
    density
        About how many copies an element of the box costs.
    spaces, stores
        For each group the index of its source space, and the store of one of its states: those
        of the others are cut in the same places.
    """

    group: Ints
    entry: Ints
    first: Ints
    row: Ints
    pitch: Ints
    density: NDArray[np.float64]
    spaces: tuple[int, ...]
    stores: tuple[Store, ...]
    groups: tuple[int, ...] = field(init=False)
    """The different values of ``group``."""
    even: bool = field(init=False)
    """Whether ``row`` is endless everywhere."""

    def __post_init__(self) -> None:
        lacking = (-1,) if len(self.group) and int(self.group.min()) < 0 else ()
        object.__setattr__(self, "groups", (*lacking, *range(len(self.stores))))
        object.__setattr__(self, "even", not (self.row < ENDLESS).any())

    def same(self, other: Frames) -> bool:
        """Whether the boxes of two states lie alike."""
        return (
            self.spaces == other.spaces
            and all(map(_cut_alike, self.stores, other.stores))
            and np.array_equal(self.group, other.group)
            and np.array_equal(self.entry, other.entry)
            and np.array_equal(self.first, other.first)
            and np.array_equal(self.row, other.row)
            and np.array_equal(self.pitch, other.pitch)
        )


def _cut_alike(a: Store, b: Store) -> bool:
    """Whether two stores of a space are cut in the same places."""
    if isinstance(a, ShardStore) and isinstance(b, ShardStore):
        return (a.part, a.chunk) == (b.part, b.chunk)
    return isinstance(a, EntryStore) and isinstance(b, EntryStore)


@dataclass(frozen=True, slots=True, eq=False)
class Sources:
    """Where the boxes of one state come from; columns with one row a box.

    Parameters
    ----------
    boxes
        The boxes.
    covers
        The cover that each box comes from.
    message
        The message of its tensor.
    frames
        How the boxes lie in the source.
    stores
        What each group of ``frames`` is stored as.
    """

    boxes: list[Box | None]
    covers: list[Cover]
    message: Ints
    frames: Frames
    stores: tuple[Part, ...]


def frame_of(box: Box | None, shape: Shape) -> Frame | None:
    """How a box's elements lie in its tensor; ``None`` if its rows don't stand at one distance."""
    if box is None:
        return WHOLE
    first, sizes = box.offset_in(shape), box.shape
    if box.contiguous_in(shape):
        return first, ENDLESS, 0
    cut = max(d for d in range(len(shape)) if sizes[d] != shape[d])
    row, pitch = max(1, math.prod(sizes[cut:])), math.prod(shape[cut:])
    outer = Box(box.start[:cut], box.stop[:cut])
    return (first, row, pitch) if outer.contiguous_in(shape[:cut]) else None
