"""How are many small things read when each may have to be waited for?

One after the other as long as the disk answers at once: reading metadata is work for the
interpreter, in which threads only get into each other's way. What they can share is waiting, so as
soon as there was some, the rest is done by several threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Row = TypeVar("Row")
Made = TypeVar("Made")

PATIENCE = 0.02
"""Seconds waited after which threads are used."""

THREADS = 16


def side_by_side(
    make: Callable[[Row], Made], rows: Sequence[Row], *, portion: int = 1
) -> list[Made]:
    """``[make(row) for row in rows]``, by several threads if it is mostly waiting.

    Parameters
    ----------
    make
        Called for each row, from any thread.
    rows
        What is to be done.
    portion
        How many rows are measured, and given to a thread, together.
    """

    def some(part: Sequence[Row]) -> list[Made]:
        return [make(row) for row in part]

    parts = [rows[at : at + portion] for at in range(0, len(rows), portion)]
    found: list[list[Made]] = []
    waited = 0.0
    while len(found) < len(parts) and waited < PATIENCE:
        began, worked = time.perf_counter(), time.thread_time()
        found.append(some(parts[len(found)]))
        waited += time.perf_counter() - began - (time.thread_time() - worked)
    rest = parts[len(found) :]
    if rest:
        with ThreadPoolExecutor(THREADS, "zreshard-open") as pool:
            found += pool.map(some, rest)
    return [one for part in found for one in part]
