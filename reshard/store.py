"""Where do the bytes of one state of a flat space lie?

Either shard by shard (:class:`ShardStore`: the shards' address spaces laid end to end and cut in
chunks, each an extent of a file) or entry by entry (:class:`EntryStore`: each box an extent of
its own, perhaps with strides). **Regions** are byte ranges with a checksum of their own: the
members of a zip, the chunks of an array.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from reshard.box import Shape
from reshard.decoded import Decoder
from reshard.ruler import ALL, Cut, Ints, Pieces, cut_at, ints


@dataclass(frozen=True, slots=True)
class File:
    """A file of a checkpoint.

    Parameters
    ----------
    path
        Relative to the checkpoint's root, with ``/``; never absolute, never with ``..``. Of an
        encoded file only messages use it: several may have the same one.
    nbytes
        Its size; of an encoded file, when it is decoded.
    decoder
        What makes the bytes of an encoded file; ``None`` for bytes that lie there as they are.
    """

    path: str
    nbytes: int
    decoder: Decoder | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ShardStore:
    """Shards laid end to end, cut in chunks.

    Parameters
    ----------
    part
        Elements from one shard's beginning to the next one's, a multiple of ``chunk``.
    chunk
        Elements of a chunk: chunk c holds elements ``[c*chunk, (c+1)*chunk)``.
    files, offsets
        For each chunk, the index of its file and the byte at which it begins there.
    """

    part: int
    chunk: int
    files: Ints
    offsets: Ints

    def __post_init__(self) -> None:
        assert self.chunk >= 1, self.chunk
        assert self.part % self.chunk == 0, (self.part, self.chunk)
        assert self.files.shape == self.offsets.shape

    @classmethod
    def per_shard(cls, part: int, files: object, offsets: object) -> ShardStore:
        """One chunk a shard."""
        return cls(part, part, ints(files), ints(offsets))

    @property
    def chunks_per_shard(self) -> int:
        """How many chunks a shard is cut in."""
        return self.part // self.chunk

    def split(self, pieces: Pieces) -> Cut:
        """Cut pieces where chunks end: ``multiple`` is the chunk, ``within`` an element of it."""
        if self.chunk == self.part:  # no piece reaches over the end of its shard
            return Cut(ALL, pieces.shard, pieces.local, np.zeros_like(pieces.local), pieces.count)
        return cut_at(pieces.shard * self.part + pieces.local, pieces.count, self.chunk)


@dataclass(frozen=True, slots=True, eq=False)
class EntryStore:
    """Each entry an extent of its own.

    Parameters
    ----------
    files, offsets
        For each entry, the index of its file and the byte of its first element.
    strides
        For each entry its strides in elements, ``None`` where it is row-major without holes.
    """

    files: Ints
    offsets: Ints
    strides: tuple[Shape | None, ...] | None = None

    def __post_init__(self) -> None:
        assert self.files.shape == self.offsets.shape
        assert self.strides is None or len(self.strides) == len(self.files)

    @classmethod
    def of(cls, places: Iterable[tuple[int, int, Shape | None]]) -> EntryStore:
        """Extents from (file, byte, strides) of each entry, in order."""
        rows = tuple(places)
        strides = tuple(found for _, _, found in rows)
        return cls(
            ints([file for file, _, _ in rows]),
            ints([offset for _, offset, _ in rows]),
            strides if any(found is not None for found in strides) else None,
        )

    def strides_of(self, entry: int) -> Shape | None:
        """Strides of one entry, in elements; ``None`` for row-major."""
        return None if self.strides is None else self.strides[entry]


Store = ShardStore | EntryStore


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """Byte ranges of files with a checksum each, sorted by file and offset, without overlap.

    Parameters
    ----------
    algorithm
        Name of the checksum (``"crc64nvme"``, ``"crc32"``).
    files, offsets, sizes
        Index of the file, first byte, bytes.
    values
        The checksums, where they are known.
    labels
        What each region is called in messages.
    """

    algorithm: str
    files: Ints
    offsets: Ints
    sizes: Ints
    values: NDArray[np.uint64] | None
    labels: tuple[str, ...]
    _line: Ints = field(init=False, repr=False)  # where each file begins, all laid end to end
    _begin: Ints = field(init=False, repr=False)  # where each region begins on that line

    def __post_init__(self) -> None:
        assert self.files.shape == self.offsets.shape == self.sizes.shape
        assert len(self.labels) == len(self.files)
        reach = np.zeros(int(self.files.max(initial=-1)) + 1, np.int64)
        np.maximum.at(reach, self.files, self.offsets + self.sizes + 1)
        line = np.append(0, np.cumsum(reach))
        begin = line[self.files] + self.offsets
        assert (begin[1:] >= (begin + self.sizes)[:-1]).all(), "not sorted, or overlapping"
        object.__setattr__(self, "_line", line)
        object.__setattr__(self, "_begin", begin)

    def __len__(self) -> int:
        return len(self.files)

    @classmethod
    def of(cls, algorithm: str, rows: list[tuple[int, int, int, int | None, str]]) -> Regions:
        """Make regions of rows ``(file, offset, nbytes, value, label)``, in any order."""
        rows = sorted(rows, key=lambda r: r[:3])  # one without bytes before others at its place
        known = all(r[3] is not None for r in rows)
        return cls(
            algorithm,
            ints([r[0] for r in rows]),
            ints([r[1] for r in rows]),
            ints([r[2] for r in rows]),
            np.array([r[3] for r in rows], np.uint64) if known else None,
            tuple(r[4] for r in rows),
        )

    def find(self, files: Ints, offsets: Ints) -> Ints:
        """The region of each byte, -1 where it is in none."""
        found = self._last_before(files, offsets)
        some = np.flatnonzero(found >= 0)
        region = found[some]
        inside = self.files[region] == files[some]
        inside &= offsets[some] < self.offsets[region] + self.sizes[region]
        found[some[~inside]] = -1
        return found

    def overlapping(self, file: int, low: int, high: int) -> range:
        """The regions that share bytes ``[low, high)`` of a file."""
        files = ints([file, file])
        first, last = self._last_before(files, ints([low, high - 1])).tolist()
        begins_inside = int(self.find(files[:1], ints([low]))[0]) >= 0
        return range(first if begins_inside else first + 1, last + 1)

    def _last_before(self, files: Ints, offsets: Ints) -> Ints:
        """The last region on the line that begins at each byte or before it."""
        known = np.minimum(files, len(self._line) - 1)
        ends = np.append(self._line[1:], self._line[-1] + 1)
        at = np.minimum(self._line[known] + offsets, ends[known] - 1)
        return ints(np.searchsorted(self._begin, at, side="right")) - 1
