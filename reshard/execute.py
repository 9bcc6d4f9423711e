"""How is a plan carried out, on several threads and inside a memory budget?

Workers take batches off a queue (:mod:`reshard.work`), move their bytes (:mod:`reshard.mover`)
and tally checksums on the way (:mod:`reshard.tally`). When all bytes are there the sums are
compared with what the source says of itself (:mod:`reshard.verdict`): an execution that returns
has proved its copies.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from reshard.errors import RequestError
from reshard.layout import TensorKey
from reshard.mover import Mover
from reshard.plan import Plan
from reshard.record import Recorder
from reshard.source import OPEN_FILES, Fetcher, Mapped, Read, SourceFiles, way_to_read
from reshard.tally import Tally
from reshard.targets import TargetFiles
from reshard.verdict import check_region, digests, to_read_again
from reshard.work import Queue, Work

MIB = 1 << 20

STEP = MIB
"""Bytes moved at once, at most: half of a common second-level cache."""

LEAST_MEMORY = 16 * MIB
"""What the columns of a plan, digests and buffers need at least."""

Progress = Callable[[int], None]
"""Called with the number of bytes that were moved since the last call, from any thread."""

Notice = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """How to move bytes.

    Parameters
    ----------
    workers
        Threads; by default one a processor, at most 16.
    max_memory
        Bytes that buffers may take together.
    read
        ``"map"``, ``"read"``, or ``None`` to choose by the source's file system.
    sync
        Whether files are on the disk, not only in the page cache, when the call returns.
    verify
        Whether the source's checksums are checked.
    progress
        Told of bytes as they are moved.
    resume
        Whether a conversion that was killed is gone on with.
    notice
        Told, in a sentence, what becomes of what an earlier run has left.
    """

    workers: int = field(default_factory=lambda: min(16, len(os.sched_getaffinity(0))))
    max_memory: int = 64 * MIB
    read: Literal["map", "read"] | None = None
    sync: bool = True
    verify: bool = True
    progress: Progress | None = None
    resume: bool = True
    notice: Notice | None = None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise RequestError(f"{self.workers} workers; at least 1 is needed")
        if self.max_memory < LEAST_MEMORY:
            raise RequestError(
                f"a memory limit of {self.max_memory} bytes is too small",
                hint=f"give at least {LEAST_MEMORY} bytes",
            )

    @property
    def step(self) -> int:
        """Bytes that are moved at once: what fits a processor's second-level cache."""
        each = (self.max_memory - LEAST_MEMORY // 2) // (4 * self.workers)
        return max(4096, min(STEP, each - each % 4096))


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """What an execution found out.

    Parameters
    ----------
    digests
        CRC-64/NVME of every tensor that was written.
    regions
        Checksum of each of the target's regions, in their order.
    nbytes
        Bytes that were moved.
    regions_checked
        How many of the source's checksums were compared.
    """

    digests: Mapping[TensorKey, int]
    regions: NDArray[np.uint64]
    nbytes: int
    regions_checked: int


def execute(
    plan: Plan,
    folder: Path,
    options: Options | None = None,
    recorder: Recorder | None = None,
) -> Result:
    """Move the bytes of a plan into the files of a folder.

    Parameters
    ----------
    plan
        What to copy.
    folder
        Where the target's files are made; it must exist. Files get their final size; bytes that
        no copy fills (headers, padding) are zero.
    options
        How.
    recorder
        Writes down what is complete, and knows what has been before.

    Raises
    ------
    CorruptError
        If a checksum of the source, or a digest that it gives, doesn't fit its bytes.
    InconsistentError
        If replicas differ, or 16-bit weights aren't the rounding of their masters.
    TargetError
        If the target can't be written.
    RequestError
        If a cast overflows.
    """
    options = options or Options()
    execution = _Execution(plan, folder, options, recorder)
    try:
        return execution.run()
    finally:
        execution.targets.close()


class _Execution:
    def __init__(
        self, plan: Plan, folder: Path, options: Options, recorder: Recorder | None
    ) -> None:
        self._plan = plan
        self._options = options
        memory = options.max_memory // 4  # of the limit: decoded files; the rest is as before
        self._files = SourceFiles(plan.source, memory=memory, scratch=_scratch(plan, folder))
        self._read = options.read or way_to_read(plan.source.root)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._nbytes = 0
        self._recorder = recorder
        kept = () if recorder is None else {file for file, _ in recorder.kept.parts}
        self.targets = TargetFiles(folder, plan.target.files, sync=options.sync, kept=kept)

    def run(self) -> Result:
        """Move everything and judge it."""
        tally = self._move()
        again = to_read_again(self._plan, tally)
        self._check(again)
        found = digests(self._plan, tally)
        checked = int(tally.touched.sum())
        return Result(found, tally.target.values(), self._nbytes, checked)

    def _fetcher(self) -> Fetcher:
        if self._read == "map":
            return Mapped(self._files, max(1, 2 * OPEN_FILES // self._options.workers))
        return Read(self._files, self._options.step)

    def _move(self) -> Tally:
        queue = Queue(self._plan, self._finish, self._recorder)
        options = self._options
        movers = [
            Mover(
                self._plan,
                self.targets,
                self._files,
                self._fetcher(),
                step=options.step,
                verify=options.verify,
            )
            for _ in range(options.workers)
        ]
        in_threads([partial(self._work, queue, mover) for mover in movers], self._stop)
        if self._recorder is not None:
            return self._recorder.tally
        tally = movers[0].tally
        for mover in movers[1:]:
            tally.merge(mover.tally)
        tally.settle()
        return tally

    def _work(self, queue: Queue, mover: Mover) -> None:
        work: Work | None = None
        while not self._stop.is_set():
            found = queue.next(work)
            if found is None:
                return
            work, batch = found
            if self._recorder is not None:
                mover.tally = self._recorder.tally_of(batch)
            mover.move(batch)
            if self._recorder is not None:
                self._recorder.moved(batch)
            queue.done(work)
            with self._lock:
                self._nbytes += batch.nbytes
            if self._options.progress is not None and batch.nbytes:
                self._options.progress(batch.nbytes)

    def _finish(self, file: int) -> None:
        if self._recorder is None:
            self.targets.finish(file)
        elif file not in self._recorder.kept.files:
            self.targets.finish(file)
            self._recorder.finished(file)

    def _check(self, regions: list[int]) -> None:
        waiting = deque(regions)
        workers = min(self._options.workers, len(regions))
        in_threads([partial(self._check_some, waiting) for _ in range(workers)], self._stop)

    def _check_some(self, waiting: deque[int]) -> None:
        fetcher = self._fetcher()
        while waiting and not self._stop.is_set():
            try:
                region = waiting.popleft()
            except IndexError:  # another thread was faster
                return
            check_region(self._plan, region, fetcher, self._options.step)


def _scratch(plan: Plan, folder: Path) -> Path | None:
    """Where decoded files lie that are too large for memory: on the target's disk, if any."""
    if not plan.target.files:
        return None
    return folder if folder.is_dir() else folder.parent


def in_threads(tasks: Sequence[Callable[[], None]], stop: threading.Event) -> None:
    """Call all tasks, each in a thread of its own, and wait for them.

    Parameters
    ----------
    tasks
        What to call; one alone is called in this thread.
    stop
        Set as soon as one fails, or the wait is interrupted: the others return early then.

    Raises
    ------
    BaseException
        The first that a task raised.
    """
    if len(tasks) <= 1:
        for task in tasks:
            task()
        return
    errors: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=guarded, args=(t,), name="zreshard") for t in tasks]
    finished = False
    try:
        try:
            for thread in threads:
                thread.start()
            _wait(threads)
            finished = True
        finally:
            if not finished:
                stop.set()
                _wait(threads)
    finally:
        if not finished:
            stop.set()  # a second interrupt may have come before the first one's did
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # else the error and this frame would keep each other, and open files


def _wait(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        while thread.is_alive():  # look up now and then: not every signal ends a wait
            thread.join(0.2)
