"""Which bytes of the source hold a run of a box?

Where the source has an entry with the same box, runs are cut by its shards and chunks, whole
columns at once (:meth:`Overlap.direct`). Otherwise the run is cut into boxes, these are
intersected with the source's boxes, and each row of what they share is a copy
(:meth:`Overlap.searched`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from reshard.box import Box, Shape, strides_of
from reshard.copies import Block, Runs, nbytes_of
from reshard.dtypes import DType
from reshard.join import Cover, Join, Place, Sources
from reshard.manifest import Manifest
from reshard.ruler import ALL, Ints, Pieces, Rows, cut_at, ints, pick, pick_again
from reshard.store import EntryStore

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


@dataclass(frozen=True, slots=True, eq=False)
class _Located:
    """Where runs of source entries lie, in pieces that are contiguous in a file.

    Parameters
    ----------
    dtype
        The source's element type.
    query
        The run that each piece is of.
    start, count
        Its first element in the entry, and its length.
    file, byte
        Where it lies.
    """

    dtype: DType
    query: Rows
    start: Ints
    count: Ints
    file: Ints
    byte: Ints


class Overlap:
    """Finds bytes of a source manifest.

    Parameters
    ----------
    join
        What comes from where.
    """

    def __init__(self, join: Join) -> None:
        self.source: Manifest = join.source
        self.stores = join.stores
        self._corners: dict[tuple[str, Place], tuple[Ints, Ints]] = {}

    # -- the same boxes on both sides ---------------------------------------------------------

    def direct(
        self, store: int, sources: Sources, dtype: DType, pieces: Pieces, target: Ints
    ) -> Runs:
        """Copies of pieces of boxes which the source has, too.

        Parameters
        ----------
        store
            Index of the source's store, the same for all pieces.
        sources
            Where the boxes come from.
        dtype
            The target's element type.
        pieces
            Pieces of those boxes.
        target
            The byte in the target file at which each piece begins.
        """
        found = self._located(
            *self.stores[store], pick(sources.entry, pieces.entry), pieces.start, pieces.count
        )
        query, start = found.query, found.start
        entry = pick(pieces.entry, query)
        runs = Runs(
            file=found.file,
            source=found.byte,
            target=pick(target, query) + nbytes_of(dtype, start - pick(pieces.start, query)),
            count=found.count,
            message=pick(sources.message, entry),
            at=pick(sources.first, entry) + start,
        )
        if sources.even:
            return replace(runs, at=nbytes_of(dtype, runs.at))
        return _cut_rows(runs, start, sources, entry, found.dtype, dtype)

    def _located(self, index: int, state: str, entry: Ints, start: Ints, count: Ints) -> _Located:
        """Where runs of source entries lie."""
        space = self.source.space(index)
        store = self.source.stores[space.name, state]
        dtype = space.states[state]
        if isinstance(store, EntryStore):
            byte = pick(store.offsets, entry) + nbytes_of(dtype, start)
            return _Located(dtype, ALL, start, count, pick(store.files, entry), byte)
        query, pieces = space.ruler.locate(entry, start, count)
        cut = store.split(pieces)
        return _Located(
            dtype,
            query=pick_again(query, cut.query),
            start=pick(pieces.start, cut.query) + cut.moved,
            count=cut.count,
            file=pick(store.files, cut.multiple),
            byte=pick(store.offsets, cut.multiple) + nbytes_of(dtype, cut.within),
        )

    # -- boxes that are cut in another way ----------------------------------------------------

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

    def _store(self, cover: Cover, place: Place) -> object:
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
        count = np.full(len(source), math.prod(common.box.shape[inner:]), np.int64)
        entries = np.full_like(source, entry)
        found = self._located(space, cover.tensor.state, entries, source, count)
        query, moved = found.query, found.start - pick(source, found.query)
        return Runs(
            file=found.file,
            source=found.byte,
            target=common.target + nbytes_of(wanted.dtype, pick(target, query) + moved),
            count=found.count,
            message=np.full_like(found.file, wanted.message),
            at=nbytes_of(wanted.dtype, pick(at, query) + moved),
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


def _cut_rows(
    runs: Runs, start: Ints, sources: Sources, entry: Ints, source: DType, target: DType
) -> Runs:
    """Cut runs of boxes where the boxes' rows end; ``at`` and ``start`` count elements."""
    cut = cut_at(start, runs.count, pick(sources.row, entry))
    runs, entry = runs.take(cut.query), pick(entry, cut.query)
    gap = pick(sources.pitch - sources.row, entry)
    return replace(
        runs,
        source=runs.source + nbytes_of(source, cut.moved),
        target=runs.target + nbytes_of(target, cut.moved),
        count=cut.count,
        at=nbytes_of(target, runs.at + cut.moved + cut.multiple * gap),
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
