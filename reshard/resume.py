"""What of an earlier run, which was killed, still counts?

Its journal (:mod:`reshard.record`) counts if it is of the same conversion of the same bytes
(:mod:`reshard.identity`). A file that it calls complete is taken as it is if it has the size, inode
and time of change that were written down. What can't be told so, because the file was being
written when the process was killed, is read again: its bytes must add up to the sums that were
written down. Whatever fails this is made anew.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np

from reshard import journal, record
from reshard.copies import PROOF, Batch, nbytes_of
from reshard.delta import Delta, Rows
from reshard.digest import CRC64NVME, Sums
from reshard.errors import TargetError
from reshard.execute import Options, in_threads
from reshard.journal import Line
from reshard.plan import Plan
from reshard.record import Kept, Part
from reshard.ruler import ints
from reshard.source import Read, SourceFiles
from reshard.tally import Tally
from reshard.work import shares


@dataclass(frozen=True, slots=True, eq=False)
class Earlier:
    """What an earlier run left.

    Parameters
    ----------
    kept
        What needn't be done any more.
    lines
        The lines of its journal that say so.
    why_not
        Why nothing counts, where something was there.
    """

    kept: Kept
    lines: tuple[Line, ...] = ()
    why_not: str | None = None


def earlier(
    plan: Plan,
    folder: Path,
    path: Path,
    identity: Mapping[str, str],
    options: Options,
) -> Earlier:
    """Find out what an earlier run has completed.

    Parameters
    ----------
    plan
        What is to be carried out.
    folder
        Where the target's files are made.
    path
        The journal.
    identity
        What the conversion depends on.
    options
        How to read, and whether checksums of the source are summed.

    Raises
    ------
    TargetError
        If the folder holds another conversion that isn't finished.
    """
    lines = list(journal.read(path))
    nothing = Earlier(Kept(Tally(plan, verify=options.verify)))
    if len(lines) < 2:
        return nothing
    why_not = _difference(lines[0].head, identity, path)
    if why_not is not None:
        return replace(nothing, why_not=why_not)
    return _Search(plan, folder, options).run(lines[1:])


def _difference(head: Mapping[str, object], identity: Mapping[str, str], path: Path) -> str | None:
    """Why a journal isn't of this conversion, where that makes it void."""
    differing = [name for name, value in identity.items() if head.get(name) != value]
    if not differing:
        return None
    if "release" in differing:
        return f"as another release ({head.get('release')}) did it"
    if "root" not in differing and not {"source", "files"}.isdisjoint(differing):
        return "as the source has changed since"
    raise TargetError(
        "holds a conversion that isn't finished, of "
        + ("another source" if "root" in differing else "this source with other options"),
        where=path.parent,
        hint="give the command that began it, to go on with it, or --fresh to begin anew",
    )


class _Search:
    """Goes through the lines of a journal."""

    def __init__(self, plan: Plan, folder: Path, options: Options) -> None:
        self._plan = plan
        self._folder = folder
        self._options = options
        self._boot = record.boot()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._kept = Kept(Tally(plan, verify=options.verify))
        self._lines: list[Line] = []
        self._files = SourceFiles(replace(plan.target, root=folder))

    def run(self, lines: Iterable[Line]) -> Earlier:
        groups: dict[range, Line] = {}
        parts: dict[int, dict[int, Line]] = {}
        for line in filter(self._on_disk, lines):
            if "files" in line.head:
                groups[range(*line.head["files"])] = line
            else:
                file, number = line.head["part"]
                parts.setdefault(file, {})[number] = line
        doubtful: list[Callable[[], None]] = []
        for group, line in groups.items():
            cut = record.in_parts(self._plan, group.start)
            some = parts.get(group.start, {})
            if len(some) == line.head["parts"] and self._as_it_was(group, line):
                parts.pop(group.start, None)
                self._keep([*some.values(), line], files=group)
            elif not cut:
                doubtful.append(partial(self._read_group, group, line))
        doubtful += [partial(self._read_parts, file, some) for file, some in parts.items()]
        waiting = deque(doubtful)
        workers = min(self._options.workers, len(doubtful))
        in_threads([partial(self._work, waiting)] * workers, self._stop)
        return Earlier(self._kept, tuple(self._lines))

    def _work(self, waiting: deque[Callable[[], None]]) -> None:
        while waiting and not self._stop.is_set():
            try:
                task = waiting.popleft()
            except IndexError:  # another thread was faster
                return
            task()

    def _on_disk(self, line: Line) -> bool:
        """Whether what a line speaks of can't have been lost by a start of the machine."""
        where = line.head["boot"]
        return where is None or (where == self._boot and where != "")

    def _as_it_was(self, files: range, line: Line) -> bool:
        """Whether files bear the stamps that were written down."""
        return all(
            record.stamp(self._place(file)) == stamp
            for file, stamp in zip(files, line.head["stamps"], strict=True)
        )

    def _place(self, file: int) -> Path:
        return record.place(self._folder, self._plan, file)

    def _whole(self, file: int) -> bool:
        """Whether a file is there at its full size."""
        found = record.stamp(self._place(file))
        return found is not None and found[0] == self._plan.target.files[file].nbytes

    def _keep(
        self, lines: Sequence[Line], files: Iterable[int] = (), part: Part | None = None
    ) -> None:
        deltas = [Delta.from_bytes(data) for line in lines if (data := line.payload())]
        with self._lock:
            for delta in deltas:
                self._kept.tally.add_delta(delta)
                self._kept.nbytes += record.moved_bytes(self._plan, delta)
            self._lines += lines
            self._kept.files.update(files)
            if part is not None:
                self._kept.parts.add(part)

    # -- what is read again -------------------------------------------------------------------

    def _read_group(self, group: range, line: Line) -> None:
        if not all(map(self._whole, group)):
            return
        reading = _Reading(self._plan, self._files, self._options.step)
        for file in group:
            for batch in shares(self._plan, file):
                reading.add(batch)
        if reading.adds_up_to(line):
            self._keep([line], files=group)

    def _read_parts(self, file: int, lines: Mapping[int, Line]) -> None:
        if file != PROOF and not self._whole(file):
            return
        batches = record.parts(shares(self._plan, file))
        for number, some in groupby(batches, key=itemgetter(0)):
            line = lines.get(number)
            if line is not None:
                self._read_part((file, number), line, (batch for _, batch in some))
            if number >= max(lines) or self._stop.is_set():
                return

    def _read_part(self, part: Part, line: Line, batches: Iterable[Batch]) -> None:
        reading = _Reading(self._plan, self._files, self._options.step)
        signature = 0
        for batch in batches:
            signature = record.sign(batch, signature)
            if part[0] != PROOF:  # of proofs nothing was written; the sums are of the source
                reading.add(batch)
        same = CRC64NVME.hex(signature) == line.head["signature"]
        if same and (part[0] == PROOF or reading.adds_up_to(line)):
            self._keep([line], part=part)


class _Reading:
    """Sums what copies have written, out of the target's files."""

    def __init__(self, plan: Plan, files: SourceFiles, step: int) -> None:
        self._plan = plan
        self._fetcher = Read(files, step)
        self._step = step
        self._sums = Sums(CRC64NVME, ints([m.nbytes for m in plan.messages]))
        self._readable = True

    def add(self, batch: Batch) -> None:
        """Read what a batch has written."""
        # what was gathered out of strides is copied again instead
        self._readable = self._readable and not batch.blocks
        runs = batch.runs
        if self._readable and len(runs):
            nbytes = nbytes_of(batch.target_dtype, runs.count)
            rows = zip(runs.target.tolist(), nbytes.tolist(), strict=True)
            crcs = [self._crc(batch.target_file, at, size) for at, size in rows]
            self._sums.add(runs.message, runs.at, nbytes, np.array(crcs, np.uint64))

    def _crc(self, file: int, offset: int, nbytes: int) -> int:
        crc = 0
        for at in range(offset, offset + nbytes, self._step):
            view = self._fetcher.fetch(file, at, min(self._step, offset + nbytes - at))
            crc = CRC64NVME.of(view, crc)
            self._fetcher.reset()
        return crc

    def adds_up_to(self, line: Line) -> bool:
        """Whether it is what was written down when the copies had been made."""
        rows = Delta.from_bytes(line.payload()).messages
        written = [self._plan.messages[m].written for m in rows.index.tolist()]
        return self._readable and Rows.of(self._sums).same(rows.take(np.array(written, bool)))
