"""How far is it, how fast, and how long will it take?

On a terminal one line is written over again; elsewhere, where it was asked for, a plain line
appears every few seconds, which suits the log of a batch job.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from reshard.cli.output import duration, rate, size

TERMINAL_PAUSE = 0.1
"""Seconds between two updates on a terminal."""
PLAIN_PAUSE = 5.0
"""Seconds between two plain lines."""
WINDOW = 10.0
"""Seconds over which the speed is taken."""


class Progress:
    """Counts bytes and tells of them; may be called from any thread.

    Parameters
    ----------
    shown
        Whether anything is written; ``None`` for: on a terminal.
    stream
        Where.
    """

    def __init__(self, shown: bool | None, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._shown = self._terminal if shown is None else shown
        self._lock = threading.Lock()
        self._begin("", 0)

    def _begin(self, title: str, total: int) -> None:
        now = time.monotonic()
        self._title, self._total, self._done = title, total, 0
        self._told = now
        self._running = self._rebase = False
        self._points: deque[tuple[float, int]] = deque([(now, 0)])

    @contextmanager
    def running(self, title: str, total: int) -> Iterator[None]:
        """A stretch of work of ``total`` bytes."""
        with self._lock:
            self._begin(title, total)
            self._running = True
        try:
            yield
        finally:
            with self._lock:
                self._running = False
                self._clear()

    def add(self, nbytes: int) -> None:
        """Say that bytes have been moved."""
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if self._rebase:
                self._rebase = False
                self._points = deque([(now, self._done)])
            pause = TERMINAL_PAUSE if self._terminal else PLAIN_PAUSE
            if self._running and self._shown and now - self._told >= pause:
                self._told = now
                self._write(self.text(now))

    def rebase(self) -> None:
        """Say that the next bytes were moved long ago: the speed is that of those after them."""
        with self._lock:
            self._rebase = True

    def text(self, now: float) -> str:
        """What is to be said at a moment: ``convert  1.2 GB of 4 GB, 30%, 1.9 GB/s, 2 s left``."""
        self._points.append((now, self._done))
        while len(self._points) > 2 and self._points[0][0] < now - WINDOW:
            self._points.popleft()
        then, before = self._points[0]
        elapsed = now - then
        parts = [f"{size(self._done)} of {size(self._total)}"]
        if self._total:
            parts.append(f"{min(100, 100 * self._done // self._total)}%")
        if elapsed > 0 and self._done > before:
            speed = (self._done - before) / elapsed
            parts.append(rate(self._done - before, elapsed))
            parts.append(f"{duration(max(0, self._total - self._done) / speed)} left")
        return f"{self._title}  {', '.join(parts)}"

    def _write(self, text: str) -> None:
        line = f"\r\x1b[K{text}" if self._terminal else f"{text}\n"
        self._stream.write(line)
        self._stream.flush()

    def _clear(self) -> None:
        if self._terminal and self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
