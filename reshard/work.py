"""Who does which part of a plan?

Each worker takes a target file and works through its batches; a worker without a file of its own
helps with another's. A file is finished, once, when all of its batches have been worked off.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from reshard.copies import PROOF, Batch
from reshard.plan import Plan
from reshard.record import Recorder

SHARE = 8 << 20
"""Bytes of one file that a worker takes at a time."""


class Work:
    """The batches of one target file, shared by whoever works on it."""

    def __init__(self, plan: Plan, file: int, recorder: Recorder | None = None) -> None:
        self.file = file
        self._lock = threading.Lock()
        batches = shares(plan, file)
        self._batches = batches if recorder is None else recorder.shares(file, batches)
        self._open = 0
        self._ended = False
        self._reported = False

    def next(self) -> Batch | None:
        """The next batch; ``None`` when all are handed out."""
        with self._lock:
            batch = None if self._ended else next(self._batches, None)
            if batch is None:
                self._ended = True
            else:
                self._open += 1
            return batch

    def left(self) -> None:
        """Say that a batch has been worked off."""
        with self._lock:
            self._open -= 1

    def complete(self) -> bool:
        """Whether everything is worked off: true once."""
        with self._lock:
            if self._ended and not self._open and not self._reported:
                self._reported = True
                return True
            return False


def shares(plan: Plan, file: int) -> Iterator[Batch]:
    """The copies into a target file (or the proofs), as they are handed out."""
    for batch in plan.proofs() if file == PROOF else plan.batches(file):
        yield from batch.shares(SHARE)


class Queue:
    """Hands out batches: a file to each worker, shares of others' files when none are left.

    Parameters
    ----------
    plan
        What is to be done.
    finish
        Called with each target file when all of it has been written.
    recorder
        Leaves out what needn't be done any more.
    """

    def __init__(
        self, plan: Plan, finish: Callable[[int], None], recorder: Recorder | None = None
    ) -> None:
        self._lock = threading.Lock()
        self._finish_file = finish
        self._waiting = (Work(plan, file, recorder) for file in (*plan.files, PROOF))
        self._active: list[Work] = []

    def next(self, mine: Work | None) -> tuple[Work, Batch] | None:
        """The next batch, best of one's own file; ``None`` when all are handed out."""
        while True:
            work = mine or self._another()
            if work is None:
                return None
            batch = work.next()
            if batch is not None:
                return work, batch
            with self._lock:
                if work in self._active:
                    self._active.remove(work)
            self._finish(work)
            mine = None

    def done(self, work: Work) -> None:
        """Say that a batch has been worked off."""
        work.left()
        self._finish(work)

    def _another(self) -> Work | None:
        with self._lock:
            work = next(self._waiting, None)
            if work is not None:
                self._active.append(work)
                return work
            return self._active[0] if self._active else None

    def _finish(self, work: Work) -> None:
        if work.file != PROOF and work.complete():
            self._finish_file(work.file)
