"""How do a rank's slices become files, and their checksums on the way?

A rank writes the chunks of its own shard and nothing else. Each piece of a parameter is summed
once, while it is in cache; the sums of pieces make the chunk's checksum here, and the tensor's
digest at rank 0, by the combine rule (:mod:`reshard.digest`). Writing, summing and syncing release
the GIL.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reshard.digest import CRC64NVME
from reshard.errors import TargetError
from reshard.layout import FlatSpace
from reshard.manifest import Manifest
from reshard.ruler import Pieces
from reshard.store import ShardStore
from reshard.targets import make_file, target_error

STEP = 1 << 20
"""Bytes that are summed and written at once."""

_ZEROS = memoryview(bytes(STEP))


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """The bytes of one state of a slice.

    Parameters
    ----------
    space, state
        Index of the space, and the state.
    parts
        (first element in the slice, bytes), in order; between them are zeros.
    """

    space: int
    state: str
    parts: Sequence[tuple[int, NDArray[np.uint8]]]


@dataclass(frozen=True, slots=True)
class Wrote:
    """What a rank wrote.

    Parameters
    ----------
    chunks
        Pairs of a file's index and its checksum.
    pieces
        For each piece its space, state, entry, first byte in the tensor, bytes and checksum.
    """

    chunks: Sequence[tuple[int, int]]
    pieces: Sequence[tuple[int, str, int, int, int, int]]


class SliceWriter:
    """Writes one rank's shards.

    Parameters
    ----------
    folder
        Where the checkpoint is made.
    manifest
        Of it.
    shard
        Whose.
    sync
        Whether files are brought to disk.
    """

    def __init__(self, folder: Path, manifest: Manifest, shard: int, *, sync: bool) -> None:
        self._folder, self._manifest, self._shard, self._sync = folder, manifest, shard, sync
        self._chunks: list[tuple[int, int]] = []
        self._pieces: list[tuple[int, str, int, int, int, int]] = []

    def write(self, sources: Sequence[Source]) -> Wrote:
        """Write all sources.

        Raises
        ------
        TargetError
            If the folder can't be written.
        """
        if not self._folder.is_dir():
            raise TargetError(
                "the folder that rank 0 made isn't there on this rank",
                where=self._folder,
                hint="choose a path on a file system that all ranks share",
            )
        for source in sources:
            space = self._manifest.space(source.space)
            store = self._manifest.stores[space.name, source.state]
            assert isinstance(store, ShardStore)
            each = store.chunks_per_shard
            for chunk in range(self._shard * each, (self._shard + 1) * each):
                self._chunk(space, store, source, chunk)
        return Wrote(self._chunks, self._pieces)

    def _chunk(self, space: FlatSpace, store: ShardStore, source: Source, chunk: int) -> None:
        width = space.states[source.state].itemsize
        low = (chunk - self._shard * store.chunks_per_shard) * store.chunk
        file = int(store.files[chunk])
        path = self._folder / self._manifest.files[file].path
        fd = make_file(path, store.chunk * width)
        try:
            crc, at = 0, 0
            for entry, start, begin, count in _rows(space, self._shard, low, low + store.chunk):
                gap = (begin - low) * width - at
                crc = CRC64NVME.combine(crc, CRC64NVME.zeros(gap), gap)  # the file has zeros
                own = self._piece(fd, at + gap, source, begin, count, width)
                nbytes = count * width
                crc, at = CRC64NVME.combine(crc, own, nbytes), at + gap + nbytes
                row = (source.space, source.state, entry, start * width, nbytes, own)
                self._pieces.append(row)
            rest = store.chunk * width - at
            self._chunks.append((file, CRC64NVME.combine(crc, CRC64NVME.zeros(rest), rest)))
            if self._sync:
                os.fsync(fd)
        except OSError as error:
            raise target_error(error, path) from error
        finally:
            os.close(fd)

    def _piece(
        self, fd: int, offset: int, source: Source, begin: int, count: int, width: int
    ) -> int:
        """Write one piece and return its checksum."""
        crc_of, crc = CRC64NVME.of, 0
        for view in views(source.parts, begin, begin + count, width):
            crc = crc_of(view, crc)
            done = 0
            while done < len(view):
                done += os.pwrite(fd, view[done:], offset + done)
            offset += len(view)
        return crc


def _rows(space: FlatSpace, shard: int, low: int, high: int) -> Iterator[tuple[int, int, int, int]]:
    """The pieces at local elements ``[low, high)``: entry, its element, local element, count."""
    pieces: Pieces = space.ruler.shard(shard)
    columns = (pieces.entry, pieces.start, pieces.local, pieces.count)
    for entry, start, local, count in zip(*(c.tolist() for c in columns), strict=True):
        first, last = max(local, low), min(local + count, high)
        if first < last:
            yield entry, start + first - local, first, last - first


def views(
    parts: Sequence[tuple[int, NDArray[np.uint8]]], begin: int, end: int, width: int
) -> Iterator[memoryview]:
    """The bytes of elements ``[begin, end)`` of a slice, :data:`STEP` at a time."""
    at, stop = begin * width, end * width
    for first, data in parts:
        low, high = first * width, first * width + data.nbytes
        if high <= at:
            continue
        if low >= stop:
            break
        yield from _steps(None, low - at)
        at = max(at, low)
        last = min(high, stop)
        yield from _steps(data.data[at - low : last - low], last - at)
        at = last
    yield from _steps(None, stop - at)


def _steps(view: memoryview | None, nbytes: int) -> Iterator[memoryview]:
    for low in range(0, nbytes, STEP):
        high = min(low + STEP, nbytes)
        yield _ZEROS[: high - low] if view is None else view[low:high]
