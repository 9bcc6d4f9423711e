"""Where does a partition cut each entry of a flat space, in numbers?

Every partition is four integers an entry, a **ruler** laid on the entry's row-major elements:

``size``
    the distance between cuts;
``phase``
    how far the entry's first element stands behind a cut;
``first``
    the shard that owns piece 0;
``base``
    where the entry's pieces begin inside each shard.

Piece ``k`` of an entry of ``n`` elements is ``[k*size - phase, (k+1)*size - phase)`` cut to
``[0, n)``; it lives on shard ``first + k``, and element ``x`` of it lies at
``base + phase + x - k*size`` there. A contiguous cut has the same ``size`` and the entry's offset
as ``phase``; a cut of each tensor has ``phase`` 0; an entry with one owner has ``size`` at least
``n``. Two questions are answered for whole columns at once: which pieces does a shard hold, and
which shards hold a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
T = TypeVar("T", bound=np.generic)


def ints(values: object) -> Ints:
    """A column of 64-bit integers."""
    return np.asarray(values, dtype=np.int64)


Rows = Ints | slice
"""Which rows of columns: their indices, or :data:`ALL` of them as they are."""

ALL = slice(None)


def pick(column: NDArray[T], rows: Rows) -> NDArray[T]:
    """Rows of a column; nothing is copied where these are all."""
    if isinstance(rows, slice):
        return column[rows]
    return column.take(rows, mode="clip")  # faster than column[rows], which checks each index


def pick_again(rows: Rows, again: Rows) -> Rows:
    """The rows of a column that ``again`` takes of those that ``rows`` takes."""
    if isinstance(rows, slice):
        assert rows == ALL
        return again
    return pick(rows, again)


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Pieces of intervals; columns of the same length, in order.

    Parameters
    ----------
    query
        The interval that each piece is of.
    multiple, within
        It begins ``within`` after the ``multiple``-th cut.
    moved, count
        Where in its interval it begins, and its length.
    """

    query: Rows
    multiple: Ints
    within: Ints
    moved: Ints
    count: Ints


def cut_at(start: Ints, count: Ints, size: Ints | int) -> Cut:
    """Cut intervals at the multiples of a number.

    Parameters
    ----------
    start, count
        The intervals, none of them empty.
    size
        The number, or one an interval.
    """
    low = start // size
    edge = low * size
    within = start - edge
    beyond = within + count - size
    long = np.flatnonzero(beyond > 0)
    if not len(long):
        return Cut(ALL, low, within, np.zeros_like(start), count)
    many = np.ones(len(start), np.int64)
    many[long] -= -beyond[long] // (size if isinstance(size, int) else size[long])
    query = np.repeat(np.arange(len(start), dtype=np.int64), many)
    # the pieces of an interval stand at successive multiples
    multiple = pick(low + many - np.cumsum(many), query)
    multiple += np.arange(len(query), dtype=np.int64)
    sizes = size if isinstance(size, int) else pick(size, query)
    edge = multiple * sizes
    first = pick(start, query)
    begin = np.maximum(first, edge)
    within = begin - edge
    edge += sizes
    end = np.minimum(pick(start + count, query), edge, out=edge)
    end -= begin
    return Cut(query, multiple, within, begin - first, end)


def slices(filled: Ints, size: int) -> Iterator[slice]:
    """Consecutive rows that fill about ``size`` together, where ``filled`` is a running total."""
    heads = np.flatnonzero(np.diff(filled // size, prepend=-1)).tolist()
    for low, high in zip(heads, [*heads[1:], len(filled)], strict=False):
        yield slice(low, high)


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Runs of entries and where they lie; five columns of the same length.

    Parameters
    ----------
    entry
        Index of the entry in its space.
    start, count
        The run's first row-major element in the entry, and its length.
    shard
        The shard that holds it.
    local
        The element of the shard at which it begins.
    """

    entry: Ints
    start: Ints
    count: Ints
    shard: Ints
    local: Ints

    def __len__(self) -> int:
        return len(self.entry)

    def take(self, rows: Rows) -> Pieces:
        """Some of the rows."""
        return Pieces(
            pick(self.entry, rows),
            pick(self.start, rows),
            pick(self.count, rows),
            pick(self.shard, rows),
            pick(self.local, rows),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Ruler:
    """The cuts of one partition over the entries of one space.

    Parameters
    ----------
    numel
        Elements of each entry.
    size, phase, first, base
        See the module.
    part
        Elements from the beginning of one shard to the beginning of the next when shards are
        laid end to end: the length of the longest, padding included.
    """

    numel: Ints
    size: Ints
    phase: Ints
    first: Ints
    base: Ints
    part: int
    line: int | None = field(init=False)
    """The distance between cuts where all entries lie on one line that is cut evenly."""

    def __post_init__(self) -> None:
        for column in (self.size, self.phase, self.first, self.base):
            assert column.shape == self.numel.shape
        assert not len(self.size) or int(self.size.min()) > 0
        size = int(self.size[0]) if len(self.size) else 1
        even = (self.size == size).all() and not self.first.any()
        apart = (self.phase[1:] >= (self.phase + self.numel)[:-1]).all()
        object.__setattr__(self, "line", size if even and apart else None)

    def shard(self, index: int, low: int = 0, high: int | None = None) -> Pieces:
        """What shard ``index`` holds, in the order in which it lies there.

        Parameters
        ----------
        index
            The shard.
        low, high
            Only entries ``[low, high)``.
        """
        high = len(self.numel) if high is None else high
        if self.line is not None and high > low:  # don't look at entries far away
            begin, end = (index * self.line, (index + 1) * self.line)
            begin, end = np.searchsorted(self.phase[low:high], [begin + 1, end])
            low, high = low + max(int(begin) - 1, 0), low + int(end)
        size, phase = self.size[low:high], self.phase[low:high]
        # of an entry whose first piece lies on a later shard, the piece here ends before it begins
        cut = (index - self.first[low:high]) * size - phase
        start = np.maximum(cut, 0)
        stop = np.minimum(cut + size, self.numel[low:high])
        keep = stop > start
        rows: Rows = ALL if keep.all() else np.flatnonzero(keep)
        start, cut = pick(start, rows), pick(cut, rows)
        return Pieces(
            entry=np.arange(low, high, dtype=np.int64)[rows],
            start=start,
            count=pick(stop, rows) - start,
            shard=np.full_like(start, index),
            local=pick(self.base[low:high], rows) + start - cut,
        )

    def kept(self, shards: int) -> Ints:
        """Elements that each of ``shards`` shards holds, without padding."""
        some = np.flatnonzero(self.numel)
        numel, size, phase = self.numel[some], self.size[some], self.phase[some]
        low, high = phase // size, (phase + numel - 1) // size
        steps = np.zeros(shards + 1, np.int64)
        np.add.at(steps, self.first[some] + low, size)
        np.subtract.at(steps, self.first[some] + high + 1, size)
        kept = np.cumsum(steps)[:-1]
        np.subtract.at(kept, self.first[some] + low, phase - low * size)
        np.subtract.at(kept, self.first[some] + high, (high + 1) * size - phase - numel)
        return kept

    def locate(self, entry: Ints, start: Ints, count: Ints) -> tuple[Rows, Pieces]:
        """Which shards hold these runs.

        Parameters
        ----------
        entry, start, count
            The runs, none of them empty.

        Returns
        -------
        query, pieces
            ``query`` says for each piece which run it is of; the pieces of a run are in order.
        """
        # dividing by one number is several times as fast as by a column
        size = pick(self.size, entry) if self.line is None else self.line
        cut = cut_at(start + pick(self.phase, entry), count, size)
        entries = pick(entry, cut.query)
        return cut.query, Pieces(
            entry=entries,
            start=pick(start, cut.query) + cut.moved,
            count=cut.count,
            shard=pick(self.first, entries) + cut.multiple,
            local=pick(self.base, entries) + cut.within,
        )
