"""What do some copies add to the sums of a plan, in few bytes?

A :class:`Delta` has a row for each sum that the copies touch, and none for the others. It can be
written down and added again later: by the combine rule (:mod:`reshard.digest`) it counts as if the
copies had been made just now.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reshard.digest import Sums
from reshard.ruler import Ints


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What was added to some sums; columns of the same length.

    Parameters
    ----------
    index
        Which sum, each once.
    nbytes
        Bytes that were added to it.
    partial
        What they add to its checksum.
    """

    index: Ints
    nbytes: Ints
    partial: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.index)

    @classmethod
    def of(cls, sums: Sums) -> Rows:
        """All that was added to some sums."""
        return cls(*sums.rows())

    def add_to(self, sums: Sums) -> None:
        """Add it to other sums over the same messages."""
        sums.add_rows(self.index, self.nbytes, self.partial)

    def take(self, rows: NDArray[np.bool_]) -> Rows:
        """Some of the rows."""
        return Rows(self.index[rows], self.nbytes[rows], self.partial[rows])

    def same(self, other: Rows) -> bool:
        """Whether the same was added to the same sums."""
        return (
            np.array_equal(self.index, other.index)
            and np.array_equal(self.nbytes, other.nbytes)
            and np.array_equal(self.partial, other.partial)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """What some copies add to a :class:`~reshard.tally.Tally`.

    Parameters
    ----------
    messages, target, source
        To the sums of the messages and of the regions of both sides.
    touched
        The source's regions that were read from.
    """

    messages: Rows
    target: Rows
    source: Rows
    touched: Ints

    def to_bytes(self) -> bytes:
        """The columns one after the other, little-endian, with their lengths before them."""
        parts = (self.messages, self.target, self.source)
        lengths = np.array([*map(len, parts), len(self.touched)], "<i8")
        columns = [c for p in parts for c in (p.index, p.nbytes, p.partial)]
        wide = [c.astype("<u8" if c.dtype == np.uint64 else "<i8") for c in columns]
        return b"".join(c.tobytes() for c in (lengths, *wide, self.touched.astype("<i8")))

    @classmethod
    def from_bytes(cls, data: bytes) -> Delta:
        """What :meth:`to_bytes` made."""
        words = np.frombuffer(data, "<i8").astype(np.int64)
        lengths, at = words[:4].tolist(), 4
        assert len(words) == 4 + 3 * sum(lengths[:3]) + lengths[3], "not a delta"
        parts: list[Rows] = []
        for length in lengths[:3]:
            index, nbytes, partial = words[at : at + 3 * length].reshape(3, length)
            parts.append(Rows(index, nbytes, partial.view(np.uint64)))
            at += 3 * length
        messages, target, source = parts
        return cls(messages, target, source, words[at:])
