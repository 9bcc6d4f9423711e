"""Who sums what arrives while the rank computes? A thread, one for a transport.

It needs nothing but that the other ranks have started the same operation: it waits for no other
rank's thread, so that ranks may wait for their sums in any order. torch and gloo release the
interpreter while they work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["Job", "Mover"]


class Job:
    """Something that the thread does; `wait` returns when it is done, or raises what it raised."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._done = threading.Lock()
        self._done.acquire()
        self._error: Exception | None = None

    def run(self) -> None:
        """Do it, in the thread."""
        assert self._work is not None
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error
        self._work = None
        self._done.release()

    def wait(self) -> None:
        """Return when it is done. Only once."""
        self._done.acquire()
        if self._error is not None:
            raise self._error


class Mover:
    """The thread; it starts with the first job."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def do(self, work: Callable[[], None]) -> Job:
        """Do `work` after what was given before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        job = Job(work)
        self._jobs.put(job)
        return job

    def close(self, *, wait: bool = True) -> None:
        """End the thread, after what it is doing."""
        if self._thread is not None:
            self._jobs.put(None)
            if wait:
                self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
