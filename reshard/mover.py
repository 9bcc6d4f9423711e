"""How does one worker move the bytes of a batch?

Long runs are read into a buffer that is used again and stays in the processor's cache; they are
summed and written from there. Short runs are gathered: slices of the mapped source, many to one
``pwritev``. Casts, strided blocks and sources on network file systems pass through small buffers
too. Checksums are taken while the bytes are in the cache (:mod:`reshard.tally`).

CRC-32 is taken before CRC-64. isal's routine leaves the upper halves of the vector registers in
use, and with them casts, which are compiled for SSE, take three times as long; awscrt's routine
clears them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.copies import PROOF, Batch, Block, Runs
from reshard.digest import CRC32, CRC64NVME
from reshard.dtypes import DType
from reshard.errors import RequestError
from reshard.layout import key_text
from reshard.plan import Plan
from reshard.ruler import Ints, ints
from reshard.source import Fetcher, Mapped, Read, SourceFiles
from reshard.tally import Digested, Tally
from reshard.targets import Target, TargetFiles

LONG = 128 << 10
"""Bytes from which a run is long: reading it then costs less than mapping its pages."""

PARTS = 512
"""Pieces of memory that are written by one call; Linux takes 1024."""


class Mover:
    """Moves batches, one after the other, and tallies them.

    Parameters
    ----------
    plan
        What they are of.
    targets, files
        The files of both sides.
    fetcher
        How to read the source; no other thread uses it.
    step
        Bytes that are moved at once.
    verify
        Whether the source's checksums are summed.
    """

    def __init__(
        self,
        plan: Plan,
        targets: TargetFiles,
        files: SourceFiles,
        fetcher: Fetcher,
        *,
        step: int,
        verify: bool,
    ) -> None:
        self.tally = Tally(plan, verify=verify)
        self._plan = plan
        self._targets = targets
        self._fetcher = fetcher
        # strided elements are scattered: only mapped memory finds them without reading all
        self._mapped = Mapped(files)
        # two threads that map and unmap the same memory hold each other up: long runs are read
        self._reader = fetcher if isinstance(fetcher, Read) else Read(files, step)
        self._step = step
        self._twin = ints([m.twin for m in plan.messages])
        self._kinds, self._kind = _kinds(plan)
        self._scratch: NDArray[np.uint8] | None = None
        self._target: Target | None = None

    def move(self, batch: Batch) -> None:
        """Copy all of a batch."""
        file = batch.target_file
        self._target = None if file == PROOF else self._targets.opened(file)
        self._move(batch)
        self._target = None

    def _move(self, batch: Batch) -> None:
        if batch.source_dtype != batch.target_dtype:
            self._convert(batch, batch.runs)
        else:
            for kind, runs in self._by_twin(batch.runs):
                self._copy(batch, runs, kind)
        for block in batch.blocks:
            self._block(batch, block)
        if len(batch.gaps[0]):
            self.tally.add_gaps(batch.target_file, *batch.gaps)

    def _by_twin(self, runs: Runs) -> Iterator[tuple[DType | None, Runs]]:
        """Runs by the type to which they are cast for a proof, ``None`` for no such."""
        if not len(runs):
            return
        kinds = self._kind[runs.message]
        if (kinds == kinds[0]).all():
            yield self._kinds[kinds[0]], runs
            return
        for kind in sorted(set(kinds.tolist())):
            yield self._kinds[kind], runs.take(np.flatnonzero(kinds == kind))

    def _write(self, parts: list[memoryview], offset: int) -> None:
        if self._target is not None:
            self._target.write(parts, offset)

    # -- the same bytes -----------------------------------------------------------------------

    def _copy(self, batch: Batch, runs: Runs, kind: DType | None) -> None:
        """Copy runs; those with a twin are also cast to its type, to be compared, not written."""
        nbytes = runs.count * batch.source_dtype.bits // 8
        need32, fetch, step = self.tally.need32, self._fetcher.fetch, self._step
        crc64, crc32 = CRC64NVME.function(), CRC32.function()
        first: list[int] = []
        second: list[int] = []
        twins: list[int] = []
        gather = _Gather(self._write, self._fetcher, step)
        longest = min(LONG, step)
        columns = (runs.file, runs.source, runs.target, nbytes, runs.message)
        for file, source, target, size, message in zip(*(c.tolist() for c in columns), strict=True):
            if size > longest or kind is not None:
                gather.flush()
                crcs = self._copy_long(batch, kind, (file, source, target, size, message))
                first.append(crcs[0])
                second.append(crcs[1])
                twins.append(crcs[2])
                continue
            gather.make_room(target, size)
            view = fetch(file, source, size)
            if need32:
                second.append(crc32(view))
            first.append(crc64(view))
            gather.add(view, size)
        gather.flush()
        found = Digested(nbytes, np.array(first, np.uint64), np.array(second, np.uint64))
        twin = None
        if kind is not None:
            unused = np.zeros(0, np.uint64)
            twin = Digested(runs.count * kind.itemsize, np.array(twins, np.uint64), unused)
        self.tally.add(batch.target_file, runs, found, found, twin)
        short = np.flatnonzero(nbytes <= longest)
        if kind is None and len(short):
            self._release(runs.take(short), nbytes[short])

    def _copy_long(
        self, batch: Batch, kind: DType | None, run: tuple[int, int, int, int, int]
    ) -> tuple[int, int, int]:
        """Copy a run by steps: its CRC-64, its CRC-32, and the CRC-64 of its cast."""
        file, source, target, size, message = run
        first = second = twin = 0
        step, reader = self._step, self._reader
        if kind is not None:  # both of what is read and of what it is cast to: at most a step
            width = batch.source_dtype.itemsize
            step = step // max(width, kind.itemsize) * width
        crc64, crc32 = CRC64NVME.function(), CRC32.function()
        need32, write = self.tally.need32, self._write
        for at in range(0, size, step):
            view = reader.fetch(file, source + at, min(step, size - at))
            if need32:
                second = crc32(view, second)
            first = crc64(view, first)
            if kind is not None:
                twin = crc64(self._cast(batch, view, kind, message), twin)
            write([view], target + at)
            reader.reset()
        return first, second, twin

    def _release(self, runs: Runs, nbytes: Ints) -> None:
        if self._fetcher is self._reader or not len(runs):
            return  # nothing of what it reads is mapped
        order = np.argsort(runs.file, kind="stable")
        files = runs.file[order]
        starts = np.flatnonzero(np.append(True, files[1:] != files[:-1]))
        low = np.minimum.reduceat(runs.source[order], starts)
        high = np.maximum.reduceat((runs.source + nbytes)[order], starts)
        for row in zip(files[starts].tolist(), low.tolist(), high.tolist(), strict=True):
            self._fetcher.release(*row)

    # -- bytes that change --------------------------------------------------------------------

    def _convert(self, batch: Batch, runs: Runs) -> None:
        """Copy runs that are cast."""
        source, target = batch.source_dtype, batch.target_dtype
        most = self._step // max(source.itemsize, target.itemsize)
        sums = np.zeros((4, len(runs)), np.uint64)
        columns = (runs.file, runs.source, runs.target, runs.count, runs.message)
        rows = zip(*(c.tolist() for c in columns), strict=True)
        for row, (file, start, place, count, message) in enumerate(rows):
            found = (0, 0, 0, 0)
            for at in range(0, count, most):
                part = min(most, count - at)
                size = source.itemsize
                view = self._fetcher.fetch(file, start + at * size, part * size)
                cast = self._cast(batch, view, target, message)
                found = self._both(view, cast, found)
                self._write([cast], place + at * target.itemsize)
                self._fetcher.reset()
            sums[:, row] = found
        read = Digested(runs.count * source.itemsize, sums[0], sums[1])
        made = Digested(runs.count * target.itemsize, sums[2], sums[3])
        self.tally.add(batch.target_file, runs, read, made, read)
        self._release(runs, read.nbytes)

    def _both(
        self, read: memoryview, made: memoryview, found: tuple[int, int, int, int]
    ) -> tuple[int, int, int, int]:
        """Checksums so far, continued: CRC-64 and CRC-32 of what was read and what was made."""
        read32 = made32 = 0
        if self.tally.need32:
            read32, made32 = CRC32.of(read, found[1]), CRC32.of(made, found[3])
        read64, made64 = CRC64NVME.of(read, found[0]), CRC64NVME.of(made, found[2])
        return read64, read32, made64, made32

    def _cast(self, batch: Batch, view: memoryview, kind: DType, message: int) -> memoryview:
        """Elements in another type, valid until the next call."""
        if self._scratch is None:
            self._scratch = np.empty(self._step, np.uint8)
        source = batch.source_dtype
        old = np.frombuffer(view, source.numpy)
        new = self._scratch[: len(old) * kind.itemsize].view(kind.numpy)
        with np.errstate(over="ignore", invalid="ignore"):
            np.copyto(new, old, casting="unsafe")
        wider = kind.bits > source.bits and kind.name != "float16"
        if batch.target_dtype == kind and not wider:
            lost = np.isfinite(old) & ~np.isfinite(new)
            if lost.any():
                raise RequestError(
                    f"{key_text(self._plan.messages[message].key)} holds "
                    f"{float(old[int(lost.argmax())])}, which is too large for {kind}",
                    where=self._plan.source.root,
                    hint="keep the tensor's own type (--keep-fp32) or choose bf16",
                )
        return new.view(np.uint8).data

    # -- strided blocks -----------------------------------------------------------------------

    def _block(self, batch: Batch, block: Block) -> None:
        """A strided region, gathered some of its rows at a time."""
        source, target = batch.source_dtype, batch.target_dtype
        twin = int(self._twin[block.message])
        kind = target if twin < 0 or source != target else self._plan.messages[twin].dtype
        most = max(1, self._step // max(source.itemsize, kind.itemsize))
        for part in block.cut(target, most):
            read = self._gathered(part, source)
            cast = read if twin < 0 else self._cast(batch, read, kind, part.message)
            written = read if source == target else cast
            self._write([written], part.target)
            self.tally.add_block(batch.target_file, part, written, source.itemsize)
            at = _rows(part, target)
            self._add_rows(part.message, at, written)
            if twin >= 0:
                other = cast if source == target else read
                self._add_rows(twin, at * len(other) // len(written), other)

    def _gathered(self, block: Block, dtype: DType) -> memoryview:
        """The elements of a block, one after the other."""
        view = self._mapped.fetch(block.file, block.source, block.reach + dtype.itemsize)
        strided: NDArray[Any] = np.ndarray(block.shape, dtype.numpy, view, 0, block.strides)
        return np.ascontiguousarray(strided).reshape(-1).view(np.uint8).data

    def _add_rows(self, message: int, at: Ints, packed: memoryview) -> None:
        run, crc64 = len(packed) // len(at), CRC64NVME.function()
        crcs = [crc64(packed[i : i + run]) for i in range(0, len(packed), run)]
        self.tally.add_rows(message, at, run, np.array(crcs, np.uint64))


def _kinds(plan: Plan) -> tuple[list[DType | None], Ints]:
    """The types of twins, and for each message which of them its twin has: ``None`` without one."""
    twins = [None if m.twin < 0 else plan.messages[m.twin].dtype for m in plan.messages]
    kinds = list(dict.fromkeys(twins))
    place = {kind: at for at, kind in enumerate(kinds)}
    return kinds, ints([place[kind] for kind in twins])


def _rows(block: Block, dtype: DType) -> Ints:
    """Where in its message each row of a block begins: rows are what is contiguous there."""
    inner, run = len(block.shape), dtype.itemsize
    while inner and block.steps[inner - 1] == run:
        inner -= 1
        run *= block.shape[inner]
    starts = ints([block.at])
    for size, step in zip(block.shape[:inner], block.steps[:inner], strict=True):
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * step).ravel()
    return starts


class _Gather:
    """Collects neighbouring bytes of a target and writes them with one call.

    Parameters
    ----------
    write
        Writes pieces of memory at a byte of the target.
    fetcher
        Where the pieces come from.
    most
        Bytes that are written by one call.
    """

    def __init__(
        self,
        write: Callable[[list[memoryview], int], None],
        fetcher: Fetcher,
        most: int,
    ) -> None:
        self._write = write
        self._fetcher = fetcher
        self._most = most
        self._parts: list[memoryview] = []
        self._start = self._end = 0

    def make_room(self, target: int, nbytes: int) -> None:
        """Write what is there if the next bytes don't continue it, or would be too many."""
        if self._parts and (
            target != self._end
            or len(self._parts) == PARTS
            or self._fetcher.full()
            or self._end - self._start + nbytes > self._most
        ):
            self.flush()
        if not self._parts:
            self._start = self._end = target

    def add(self, view: memoryview, nbytes: int) -> None:
        """Add the bytes that room was made for."""
        self._parts.append(view)
        self._end += nbytes

    def flush(self) -> None:
        """Write what is there."""
        if self._parts:
            self._write(self._parts, self._start)
            self._parts = []
        self._fetcher.reset()
