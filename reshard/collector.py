"""How are a million objects made without a search for garbage among them again and again?

Python's collector looks through all containers whenever their number has grown by a quarter. What
a header becomes holds no cycles and is kept: there is nothing to find, and the search takes longer
than reading the header.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Generator[None]:
    """A context, or a function as its decorator, in which cycles aren't looked for.

    What has no cycles is freed as ever. Threads may come and go here in any order: the first that
    leaves of those that found the collector running sets it going again.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()
