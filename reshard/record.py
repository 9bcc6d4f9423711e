"""How is it written down, while bytes are moved, what is complete?

In units of about :data:`UNIT` bytes: some small files together, or a **part** of a large file or of
the proofs. The copies of a unit have a tally of their own. When all of them have been made, and
their bytes are on the disk, a line of the journal says so and holds what they add to the sums
(:mod:`reshard.delta`): whoever finds that line needn't make these copies again
(:mod:`reshard.resume`).

A thread of its own brings parts to disk and writes the lines, so that no worker waits for either.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from reshard.commit import sync_path
from reshard.copies import PROOF, Batch
from reshard.delta import Delta
from reshard.digest import CRC64NVME
from reshard.journal import Journal
from reshard.plan import Plan
from reshard.store import File
from reshard.tally import Tally
from reshard.targets import target_error

UNIT = 512 << 20
"""Bytes after which a line is written: what a kill costs is a few times as much."""

Part = tuple[int, int]
"""A part of a file: the file (or :data:`~reshard.copies.PROOF`) and the part's number."""


def groups(files: Sequence[File]) -> list[range]:
    """Files that are recorded together: neighbours, of about :data:`UNIT` bytes."""
    found, begin, nbytes = [], 0, 0
    for index, file in enumerate(files):
        if index > begin and nbytes + file.nbytes > UNIT:
            found.append(range(begin, index))
            begin, nbytes = index, 0
        nbytes += file.nbytes
    return [*found, range(begin, len(files))] if begin < len(files) else found


def in_parts(plan: Plan, file: int) -> bool:
    """Whether a file of a plan's target is recorded part by part; the proofs are."""
    return file == PROOF or plan.target.files[file].nbytes > UNIT


def place(folder: Path, plan: Plan, file: int) -> Path:
    """Where a file of a plan's target is made."""
    name = plan.target.files[file].path
    return folder / name if name else folder


def parts(batches: Iterable[Batch]) -> Iterator[tuple[int, Batch]]:
    """The copies of a file, each with the number of the part that it belongs to."""
    number, nbytes = 0, 0
    for batch in batches:
        yield number, batch
        nbytes += batch.nbytes
        if nbytes >= UNIT:
            number, nbytes = number + 1, 0


def sign(batch: Batch, before: int) -> int:
    """A checksum of what is copied where, continued: parts are the same if theirs are."""
    text = repr((batch.source_dtype.name, batch.target_dtype.name, batch.blocks))
    found = CRC64NVME.of(text.encode(), before)
    runs = batch.runs
    columns = (runs.file, runs.source, runs.target, runs.count, runs.message, runs.at, *batch.gaps)
    for column in columns:
        found = CRC64NVME.of(np.ascontiguousarray(column), found)
    return found


def boot() -> str:
    """Which start of which machine this is; empty if the system doesn't say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def stamp(path: Path) -> list[int] | None:
    """What tells that a file is as it was when it was completed: bytes, inode, last change.

    ``None`` if there is none.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return [status.st_size, status.st_ino, status.st_mtime_ns]


def moved_bytes(plan: Plan, delta: Delta) -> int:
    """How many bytes were moved, or read as proofs, by the copies that a delta is of."""
    index, proofs = delta.messages.index, plan.join.read_only.message
    written = np.array([plan.messages[i].written for i in index.tolist()], bool)
    return int(delta.messages.nbytes[written | np.isin(index, proofs)].sum())


@dataclass(eq=False)
class Kept:
    """What an earlier run has completed.

    Parameters
    ----------
    tally
        What it adds up to.
    files
        Files with nothing left to do.
    parts
        Parts that are complete, of files that aren't.
    nbytes
        How many bytes were moved for it.
    """

    tally: Tally
    files: set[int] = field(default_factory=set[int])
    parts: set[Part] = field(default_factory=set[Part])
    nbytes: int = 0

    def begun(self) -> set[int]:
        """Files of which some parts are complete."""
        return {file for file, _ in self.parts if file != PROOF}


@dataclass(eq=False)
class _Unit:
    """What is recorded at once and isn't complete yet.

    Parameters
    ----------
    files, part
        Which files, and which part of one if it is a part.
    waiting
        How many of its files, or of the batches that were handed out, aren't done.
    ended
        Whether no more batches will come.
    signature
        See :func:`sign`.
    tallies
        Of its copies, by the thread that makes them.
    """

    files: range
    part: Part | None
    waiting: int = 0
    ended: bool = False
    signature: int = 0
    tallies: dict[int, Tally] = field(default_factory=dict[int, Tally])


class Recorder:
    """Writes down what is complete; called by several threads. Use it in a ``with``.

    Parameters
    ----------
    plan
        What is carried out.
    folder
        Where the target's files are made.
    journal
        Where to write.
    kept
        What needn't be done any more.
    sync
        Whether bytes are brought to disk before it is written down that they are there. If not,
        the lines count only until the machine is started anew.

    Attributes
    ----------
    tally
        What all that is complete adds up to.
    nbytes
        Bytes of what is complete, by this run or an earlier one.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        journal: Journal,
        kept: Kept,
        *,
        sync: bool,
    ) -> None:
        self.kept = kept
        self.tally = kept.tally
        self.nbytes = kept.nbytes
        self._plan = plan
        self._folder = folder
        self._journal = journal
        self._sync = sync
        self._boot = None if sync else boot()
        self._lock = threading.Lock()
        self._group_of = {file: group for group in groups(plan.target.files) for file in group}
        self._groups: dict[range, _Unit] = {}
        self._counts: dict[int, int] = {}  # parts of each file
        self._units: dict[int, _Unit] = {}  # of each batch that is being moved, by its id
        self._writer = ThreadPoolExecutor(1, "zreshard-journal")
        self._error: BaseException | None = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until all is written down, or after an error only for what is being written."""
        self._writer.shutdown(cancel_futures=kind is not None)
        self._journal.close()
        if kind is None and self._error is not None:
            raise self._error

    def shares(self, file: int, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The copies of a file, or the proofs, that are yet to be made.

        :meth:`moved` must be called with each of them, and :meth:`finished` with the file.
        """
        if file in self.kept.files:
            return
        if in_parts(self._plan, file):
            yield from self._parts(file, batches)
            return
        unit = self._group(self._group_of[file])
        for batch in batches:
            self._units[id(batch)] = unit
            yield batch

    def tally_of(self, batch: Batch) -> Tally:
        """The tally in which this thread is to count the copies of a batch."""
        unit, thread = self._units[id(batch)], threading.get_ident()
        found = unit.tallies.get(thread)
        if found is None:
            found = unit.tallies[thread] = self.tally.anew()
        return found

    def moved(self, batch: Batch) -> None:
        """Say that a batch has been worked off."""
        unit = self._units.pop(id(batch))
        if unit.part is not None:
            with self._lock:
                unit.waiting -= 1
                complete = unit.ended and not unit.waiting
            if complete:
                self._complete(unit)

    def finished(self, file: int) -> None:
        """Say that all of a file has been written, and brought to disk if that is wanted."""
        if in_parts(self._plan, file):
            self._submit(partial(self._write_files, range(file, file + 1), b""))
            return
        group = self._group_of[file]
        unit = self._group(group)
        with self._lock:
            unit.waiting -= 1
            complete = not unit.waiting
        if complete:
            del self._groups[group]
            self._complete(unit)

    # -- units --------------------------------------------------------------------------------

    def _group(self, group: range) -> _Unit:
        with self._lock:
            unit = self._groups.get(group)
            if unit is None:
                unit = self._groups[group] = _Unit(group, None, len(group))
            return unit

    def _parts(self, file: int, batches: Iterable[Batch]) -> Iterator[Batch]:
        unit: _Unit | None = None
        for number, batch in parts(batches):
            self._counts[file] = number + 1
            if unit is not None and unit.part != (file, number):
                self._end(unit)
                unit = None
            if (file, number) in self.kept.parts:
                continue
            if unit is None:
                unit = _Unit(range(file, file + 1), (file, number))
            unit.signature = sign(batch, unit.signature)
            with self._lock:
                unit.waiting += 1
            self._units[id(batch)] = unit
            yield batch
        if unit is not None:
            self._end(unit)

    def _end(self, unit: _Unit) -> None:
        with self._lock:
            unit.ended = True
            complete = not unit.waiting
        if complete:
            self._complete(unit)

    def _complete(self, unit: _Unit) -> None:
        first, *others = unit.tallies.values() or (self.tally.anew(),)
        for other in others:
            first.merge(other)
        delta = first.delta()
        with self._lock:
            self.tally.add_delta(delta)
            self.nbytes += moved_bytes(self._plan, delta)
        if unit.part is None:
            task = partial(self._write_files, unit.files, delta.to_bytes())
        else:
            task = partial(self._write_part, unit.part, unit.signature, delta.to_bytes())
        self._submit(task)

    # -- the writer ---------------------------------------------------------------------------

    def _submit(self, task: Callable[[], None]) -> None:
        if self._error is not None:
            raise self._error
        self._writer.submit(self._guarded, task)

    def _guarded(self, task: Callable[[], None]) -> None:
        try:
            if self._error is None:
                task()
        except BaseException as error:  # noqa: BLE001 - raised in the next thread that comes by
            self._error = error

    def _write_part(self, part: Part, signature: int, delta: bytes) -> None:
        if self._sync and part[0] != PROOF:
            path = place(self._folder, self._plan, part[0])
            try:
                sync_path(path)
            except OSError as error:
                raise target_error(error, path) from error
        head = {"part": part, "signature": CRC64NVME.hex(signature), "boot": self._boot}
        self._journal.append(head, delta)

    def _write_files(self, files: range, delta: bytes) -> None:
        head = {
            "files": [files.start, files.stop],
            "stamps": [stamp(place(self._folder, self._plan, file)) for file in files],
            "parts": self._counts.get(files.start, 0),
            "boot": self._boot,
        }
        self._journal.append(head, delta)
