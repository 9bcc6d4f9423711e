"""Where do pieces of a target lie in the source, where the source cuts its tensors in slabs?

A **slab** is a box whose elements stand one after the other in the tensor: some of its rows (FSDP2,
DCP), or the whole. Laid end to end, the tensors are one line; on it slabs and the pieces that are
wanted are intervals, and whole columns of pieces are cut by two searches. What isn't a slab is left
to :mod:`reshard.overlap`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from reshard.frames import Cover, Part, Sources
from reshard.manifest import Manifest, Place
from reshard.ruler import Ints, Pieces, ints, pick, slices
from reshard.store import EntryStore

APART = -1
"""Stands for the line's element where a box isn't on it."""


@dataclass(frozen=True, slots=True, eq=False)
class Portion:
    """Pieces of a target that lie in slabs of one store; columns of the same length.

    Parameters
    ----------
    part
        The space of the source and the state.
    entry, start, count
        The run of that space's entry.
    piece
        Which of the target's pieces it is of.
    moved
        The element of that piece at which it begins.
    at
        The element of the tensor.
    """

    part: Part
    entry: Ints
    start: Ints
    count: Ints
    piece: Ints
    moved: Ints
    at: Ints


class Slabs:
    """The slabs that the boxes of one state of a target come from.

    Parameters
    ----------
    source
        The source.
    sources
        Where each box comes from.

    Attributes
    ----------
    line
        The element of the line at which each box begins; :data:`APART` where it, or what it comes
        from, isn't made of slabs.
    """

    def __init__(self, source: Manifest, sources: Sources) -> None:
        self._source = source
        self.line = np.full(len(sources.boxes), APART, np.int64)
        self._tensor = np.zeros(len(sources.boxes), np.int64)  # where each box's tensor begins
        self._parts: dict[Part, int] = {}
        begin: list[int] = []
        rows: list[tuple[int, int]] = []  # the part and the entry of each slab
        known: dict[Cover, int] = {}
        end = 0
        for row in np.flatnonzero(sources.frames.group < 0).tolist():
            cover, box = sources.covers[row], sources.boxes[row]
            shape = cover.tensor.shape
            if not (box is None or box.contiguous_in(shape)):
                continue
            if cover not in known:
                found = self._slabs(cover)
                known[cover] = APART if found is None else end
                if found is not None:
                    begin += [end + offset for offset, _ in found]
                    rows += [self._row(cover, place) for _, place in found]
                    end += cover.tensor.numel
            if known[cover] != APART:
                self._tensor[row] = known[cover]
                self.line[row] = known[cover] + (0 if box is None else box.offset_in(shape))
        self._begin = ints(begin)
        self._end = np.append(self._begin[1:], end)
        self._part, self._entry = ints(rows).reshape(-1, 2).T.copy()

    def _row(self, cover: Cover, place: Place) -> tuple[int, int]:
        part = (place[0], cover.tensor.state)
        return self._parts.setdefault(part, len(self._parts)), place[1]

    def _slabs(self, cover: Cover) -> list[tuple[int, Place]] | None:
        """First element and place of a tensor's slabs, in order; ``None`` if there are others."""
        found = []
        for place in cover.places:
            space = self._source.space(place[0])
            box = space.entries[place[1]].region
            if not box.numel:
                continue
            store = self._source.stores[space.name, cover.tensor.state]
            strided = isinstance(store, EntryStore) and store.strides_of(place[1]) is not None
            if strided or not box.contiguous_in(cover.tensor.shape):
                return None
            found.append((box.offset_in(cover.tensor.shape), place))
        return sorted(found)

    def cut(self, pieces: Pieces, most: int) -> Iterator[Portion]:
        """Cut pieces of boxes that are on the line where slabs end.

        Parameters
        ----------
        pieces
            None of them empty.
        most
            About how many pieces are made at a time.
        """
        start = pick(self.line, pieces.entry) + pieces.start
        end = start + pieces.count
        first = np.searchsorted(self._begin, start, side="right") - 1
        many = np.searchsorted(self._begin, end, side="left") - first
        for some in slices(np.cumsum(many), most):
            rows = np.arange(some.start, some.stop, dtype=np.int64)
            piece = np.repeat(rows, many[some])
            before = np.cumsum(many[some]) - many[some]
            slab = np.arange(len(piece), dtype=np.int64) + np.repeat(
                first[some] - before, many[some]
            )
            begin = np.maximum(start[piece], self._begin[slab])
            count = np.minimum(end[piece], self._end[slab]) - begin
            yield from self._portions(pieces, start, piece, slab, begin, count)

    def _portions(
        self, pieces: Pieces, start: Ints, piece: Ints, slab: Ints, begin: Ints, count: Ints
    ) -> Iterator[Portion]:
        part = self._part[slab]
        at = begin - self._tensor[pieces.entry[piece]]
        for key, number in self._parts.items():
            rows = np.flatnonzero(part == number)
            if len(rows):
                yield Portion(
                    part=key,
                    entry=self._entry[slab[rows]],
                    start=begin[rows] - self._begin[slab[rows]],
                    count=count[rows],
                    piece=piece[rows],
                    moved=begin[rows] - start[piece[rows]],
                    at=at[rows],
                )
