"""Which bytes of the source hold a run of a box, where the source is cut in other boxes?

The run is cut into boxes, these are intersected with the source's boxes, and each row of what
they share is a copy (a block, where the source has strides). Where the source has an entry with
the very same box, :mod:`reshard.crossing` has a shorter way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from reshard.box import Box, Shape, strides_of
from reshard.copies import Block, Runs
from reshard.crossing import copies_of_entries
from reshard.dtypes import DType
from reshard.frames import Cover
from reshard.manifest import Manifest, Place
from reshard.ruler import Ints, ints
from reshard.store import EntryStore, Store

ROWS = 32768
"""About how many copies are made at a time: a few megabytes of columns."""

FEW_PLACES = 8
"""Up to so many boxes are intersected one by one, without looking for near ones first."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A run of a target's box, and where it goes.

    Parameters
    ----------
    box
        The box.
    start, count
        The run of its row-major elements.
    target
        The byte in the target file.
    dtype
        The target's element type.
    message
        The message of the tensor.
    """

    box: Box
    start: int
    count: int
    target: int
    dtype: DType
    message: int

    def part(self, start: int, count: int) -> Wanted:
        """The same for a part of the run."""
        target = self.target + self.dtype.nbytes(start - self.start)
        return replace(self, start=start, count=count, target=target)


@dataclass(frozen=True, slots=True)
class _Common:
    """What a part of a target's run has in common with a box of the source.

    Parameters
    ----------
    box
        The shared elements.
    frame, target
        The part of the target's run that they are in, as a box, and the byte where that begins.
    place
        The source's box.
    """

    box: Box
    frame: Box
    target: int
    place: Place


class Overlap:
    """Finds bytes of a source.

    Parameters
    ----------
    source
        Its manifest.
    """

    def __init__(self, source: Manifest) -> None:
        self.source = source
        self._corners: dict[tuple[str, Place], tuple[Ints, Ints]] = {}

    def searched(self, cover: Cover, wanted: Wanted) -> Iterator[Runs | Block]:
        """Copies of a run of a box out of a cover whose boxes are other ones."""
        found = list(self._commons(cover, wanted))
        rows = sum(self._rows(cover, c) for c in found)
        if rows > ROWS and wanted.count > 1:
            half = wanted.count // 2
            yield from self.searched(cover, wanted.part(wanted.start, half))
            yield from self.searched(cover, wanted.part(wanted.start + half, wanted.count - half))
            return
        for common in found:
            strides = self._strides(cover, common.place)
            if strides is None:
                yield self._runs(cover, common, wanted)
            else:
                yield from self._blocks(cover, common, wanted, strides)

    def _commons(self, cover: Cover, wanted: Wanted) -> Iterator[_Common]:
        for at, box in wanted.box.split(wanted.start, wanted.start + wanted.count):
            target = wanted.target + wanted.dtype.nbytes(at - wanted.start)
            for place in self._near(cover, box):
                common = box.intersect(self._region(place))
                if common is not None:
                    yield _Common(common, box, target, place)

    def _near(self, cover: Cover, box: Box) -> Iterator[Place]:
        """The places of a cover whose boxes share elements with a box, and perhaps some others."""
        if len(cover.places) <= FEW_PLACES:
            yield from cover.places
            return
        key = (cover.tensor.state, cover.places[0])
        if key not in self._corners:
            boxes = [self._region(p) for p in cover.places]
            self._corners[key] = (ints([b.start for b in boxes]), ints([b.stop for b in boxes]))
        start, stop = self._corners[key]
        near = ((start < ints(box.stop)) & (ints(box.start) < stop)).all(axis=1)
        for index in np.flatnonzero(near).tolist():
            yield cover.places[index]

    def _region(self, place: Place) -> Box:
        return self.source.space(place[0]).entries[place[1]].region

    def _strides(self, cover: Cover, place: Place) -> Shape | None:
        store = self._store(cover, place)
        return store.strides_of(place[1]) if isinstance(store, EntryStore) else None

    def _store(self, cover: Cover, place: Place) -> Store:
        return self.source.stores[self.source.space(place[0]).name, cover.tensor.state]

    def _inner(self, cover: Cover, common: _Common) -> int:
        """The first dim from which on a shared box is contiguous wherever it lies."""
        shapes = [common.frame.shape]
        if self._strides(cover, common.place) is None:
            shapes += [self._region(common.place).shape, cover.tensor.shape]
        return _inner(shapes, common.box.shape)

    def _rows(self, cover: Cover, common: _Common) -> int:
        return math.prod(common.box.shape[: self._inner(cover, common)])

    def _runs(self, cover: Cover, common: _Common, wanted: Wanted) -> Runs:
        inner, (space, entry) = self._inner(cover, common), common.place
        frames = (self._region(common.place), common.frame, Box.whole(cover.tensor.shape))
        source, target, at = (
            _row_starts(common.box, inner, f.start, strides_of(f.shape)) for f in frames
        )
        count = np.full_like(source, math.prod(common.box.shape[inner:]))
        return copies_of_entries(
            self.source.space(space),
            cover.tensor.state,
            self._store(cover, common.place),
            (np.full_like(source, entry), source, count),
            (wanted.dtype, common.target, target),
            np.full_like(source, wanted.message),
            at,
        )

    def _blocks(
        self, cover: Cover, common: _Common, wanted: Wanted, strides: Shape
    ) -> Iterator[Block]:
        """A block for each contiguous stretch of the target."""
        inner, tensor = self._inner(cover, common), cover.tensor
        store = self._store(cover, common.place)
        assert isinstance(store, EntryStore)
        file = int(store.files[common.place[1]])
        begin = int(store.offsets[common.place[1]])
        steps = strides_of(tensor.shape)
        frames = (
            (self._region(common.place).start, strides),
            (common.frame.start, strides_of(common.frame.shape)),
            ((0,) * len(tensor.shape), steps),
        )
        starts = [_row_starts(common.box, inner, origin, s).tolist() for origin, s in frames]
        for source, target, at in zip(*starts, strict=True):
            yield Block(
                file=file,
                source=begin + tensor.dtype.nbytes(source),
                shape=common.box.shape[inner:],
                strides=tuple(tensor.dtype.nbytes(s) for s in strides[inner:]),
                target=common.target + wanted.dtype.nbytes(target),
                message=wanted.message,
                at=wanted.dtype.nbytes(at),
                steps=tuple(wanted.dtype.nbytes(s) for s in steps[inner:]),
            )


def _inner(frames: list[Shape], common: Shape) -> int:
    """The first dim from which on a common box is contiguous in every frame."""
    inner = len(common)
    while inner and all(common[d] == f[d] for f in frames for d in range(inner, len(common))):
        inner -= 1
    return inner


def _row_starts(common: Box, inner: int, origin: Shape, strides: Shape) -> Ints:
    """Element index, in a frame at ``origin``, of every row (the dims below ``inner``)."""
    first = sum((a - o) * s for a, o, s in zip(common.start, origin, strides, strict=True))
    starts = ints([first])
    for size, stride in zip(common.shape[:inner], strides[:inner], strict=True):
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).ravel()
    return starts
