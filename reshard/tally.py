"""What do the checksums of copied bytes add up to?

While a run of bytes is in the processor's cache its checksum is taken, once. By the combine rule
(:mod:`reshard.digest`) that one number counts for the message of the tensor, for the region of
the target that it is written to, and for the region of the source that it was read from. Each
worker has a tally of its own; they are merged at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reshard.copies import PROOF, Block, Runs
from reshard.delta import Delta, Rows
from reshard.digest import CRC32, CRC64NVME, Algorithm, Sums
from reshard.plan import Plan
from reshard.ruler import Ints, ints
from reshard.store import Regions

ALGORITHMS: Mapping[str, Algorithm] = {a.name: a for a in (CRC64NVME, CRC32)}

WAITING = 1 << 14
"""Copies whose sums are added together: a call of numpy costs as much as thousands of rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Digested:
    """Lengths and checksums of some runs of bytes, in columns.

    Parameters
    ----------
    nbytes
        Length of each.
    crc64, crc32
        CRC-64/NVME and CRC-32 of each (the latter may be empty where no region needs it).
    """

    nbytes: Ints
    crc64: NDArray[np.uint64]
    crc32: NDArray[np.uint64]

    def by(self, regions: Regions) -> NDArray[np.uint64]:
        """The checksums that these regions speak of."""
        return self.crc32 if regions.algorithm == CRC32.name else self.crc64

    @classmethod
    def joined(cls, parts: Sequence[Digested]) -> Digested:
        """All of them, one after the other."""
        return cls(
            np.concatenate([p.nbytes for p in parts]),
            np.concatenate([p.crc64 for p in parts]),
            np.concatenate([p.crc32 for p in parts]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Copied:
    """Runs that went to one file (a column of it), and the checksums that were taken."""

    file: Ints
    runs: Runs
    read: Digested
    made: Digested
    twin: Digested | None


class Tally:
    """The sums over some of a plan's copies, complete after :meth:`settle`.

    Parameters
    ----------
    plan
        The plan.
    verify
        Whether the source's regions are summed.

    Attributes
    ----------
    messages, target, source
        Sums of the messages and of the regions of both sides.
    touched
        Which of the source's regions were read from, bool [regions].
    need32
        Whether any region needs a CRC-32.
    """

    def __init__(self, plan: Plan, *, verify: bool) -> None:
        self._from = plan.source.regions
        self._to = plan.target.regions
        self._verify = verify and len(self._from) > 0 and self._from.values is not None
        self._counts = np.array([m.counts for m in plan.messages], bool)
        self._twin = ints([m.twin for m in plan.messages])
        self._bits = ints([m.dtype.bits for m in plan.messages])
        self._waiting: list[_Copied] = []
        self._rows = 0
        self.messages = Sums(CRC64NVME, ints([m.nbytes for m in plan.messages]))
        self.target = Sums(ALGORITHMS[self._to.algorithm], self._to.sizes)
        self.source = Sums(ALGORITHMS[self._from.algorithm], self._from.sizes)
        self.touched = np.zeros(len(self._from), bool)
        self.need32 = CRC32.name in (
            self._to.algorithm if len(self._to) else "",
            self._from.algorithm if self._verify else "",
        )

    def anew(self) -> Tally:
        """Another tally of the same plan, with nothing in it."""
        other = copy(self)
        other._waiting, other._rows = [], 0
        other.messages = self.messages.anew()
        other.target = self.target.anew()
        other.source = self.source.anew()
        other.touched = np.zeros(self.touched.shape, bool)
        return other

    def delta(self) -> Delta:
        """All that was added, in few rows."""
        self.settle()
        touched = np.flatnonzero(self.touched)
        return Delta(Rows.of(self.messages), Rows.of(self.target), Rows.of(self.source), touched)

    def add_delta(self, delta: Delta) -> None:
        """Add what another tally of the same plan had."""
        delta.messages.add_to(self.messages)
        delta.target.add_to(self.target)
        delta.source.add_to(self.source)
        self.touched[delta.touched] = True

    def merge(self, other: Tally) -> None:
        """Add all that another tally of the same plan has."""
        self.settle()
        other.settle()
        self.messages.merge(other.messages)
        self.target.merge(other.target)
        self.source.merge(other.source)
        self.touched |= other.touched

    def add(
        self,
        file: int,
        runs: Runs,
        read: Digested,
        made: Digested,
        twin: Digested | None = None,
    ) -> None:
        """Add copied runs.

        Parameters
        ----------
        file
            The target file, or :data:`PROOF`.
        runs
            The copies.
        read, made
            Their bytes as they were read, and as they go into the target.
        twin
            Their bytes as the twins of their messages have them.
        """
        files = np.full(len(runs), file, np.int64)
        self._waiting.append(_Copied(files, runs, read, made, twin))
        self._rows += len(runs)
        if self._rows >= WAITING:
            self.settle()

    def settle(self) -> None:
        """Add what still waits to be added to the sums."""
        waiting, self._waiting, self._rows = self._waiting, [], 0
        for paired in (False, True):
            some = [c for c in waiting if (c.twin is not None) == paired]
            if some:
                self._add(_joined(some))

    def _add(self, copied: _Copied) -> None:
        runs, read, made, twin = copied.runs, copied.read, copied.made, copied.twin
        self.messages.add(runs.message, runs.at, made.nbytes, made.crc64)
        if twin is not None:
            other = self._twin[runs.message]
            at = runs.at * self._bits[other] // self._bits[runs.message]
            self.messages.add(other, at, twin.nbytes, twin.crc64)
        self._add_read(runs, read)
        if len(self._to):
            some = np.flatnonzero(copied.file != PROOF)
            crcs = made.by(self._to)[some]
            self._add_written(copied.file[some], runs.target[some], made.nbytes[some], crcs)

    def add_rows(self, message: int, at: Ints, nbytes: int, crc64: NDArray[np.uint64]) -> None:
        """Add rows of a message, all of the same length, which came from blocks."""
        self.messages.add(
            np.full(len(at), message, np.int64), at, np.full(len(at), nbytes, np.int64), crc64
        )

    def add_block(self, file: int, block: Block, packed: memoryview, width: int) -> None:
        """Add the regions of a block: ``packed`` is what goes into the target.

        Parameters
        ----------
        width
            Bytes of an element in the source.
        """
        if self._verify:
            self._touch(block.file, block.source, block.reach + width)
        if file != PROOF and len(self._to):
            crc = ALGORITHMS[self._to.algorithm].of(packed)
            where, nbytes = ints([block.target]), ints([packed.nbytes])
            self._add_written(ints([file]), where, nbytes, np.array([crc], np.uint64))

    def add_gaps(self, file: int, offsets: Ints, nbytes: Ints) -> None:
        """Add zeros of the target."""
        found = self._to.find(np.full(len(offsets), file, np.int64), offsets)
        some = np.flatnonzero(found >= 0)
        region = found[some]
        self.target.add_zeros(region, offsets[some] - self._to.offsets[region], nbytes[some])

    def _add_written(
        self, files: Ints, offsets: Ints, nbytes: Ints, crcs: NDArray[np.uint64]
    ) -> None:
        if len(self._to):
            found = self._to.find(files, offsets)
            some = np.flatnonzero(found >= 0)
            region = found[some]
            at = offsets[some] - self._to.offsets[region]
            self.target.add(region, at, nbytes[some], crcs[some])

    def _add_read(self, runs: Runs, read: Digested) -> None:
        if not self._verify:
            return
        found = self._from.find(runs.file, runs.source)
        ends = self._from.offsets[found] + self._from.sizes[found]
        inside = (found >= 0) & (runs.source + read.nbytes <= ends)
        for row in np.flatnonzero(~inside).tolist():
            self._touch(int(runs.file[row]), int(runs.source[row]), int(read.nbytes[row]))
        self.touched[found[inside]] = True
        some = np.flatnonzero(inside & self._counts[runs.message])
        region = found[some]
        at = runs.source[some] - self._from.offsets[region]
        self.source.add(region, at, read.nbytes[some], read.by(self._from)[some])

    def _touch(self, file: int, offset: int, nbytes: int) -> None:
        """Bytes that can't be added to one region: those that they are in are read again."""
        near = self._from.overlapping(file, offset, offset + nbytes)
        self.touched[near.start : near.stop] = True


def _joined(parts: Sequence[_Copied]) -> _Copied:
    if len(parts) == 1:
        return parts[0]
    twins = [p.twin for p in parts if p.twin is not None]
    return _Copied(
        np.concatenate([p.file for p in parts]),
        Runs.chained([p.runs for p in parts]),
        Digested.joined([p.read for p in parts]),
        Digested.joined([p.made for p in parts]),
        Digested.joined(twins) if twins else None,
    )
