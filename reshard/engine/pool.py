"""Where do received parts lie until they are summed? In buffers that are kept and capped.

Fresh memory costs more than the sum itself: every page is cleared by the kernel on first use.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["BUFFER", "Pool"]

BUFFER = 2 << 20
"""Bytes of a buffer, and of the messages that are received into one."""


class Pool:
    """Sets of buffers, one buffer for each rank that sends.

    A set is lent even when the limit is reached if its taker would have none.

    Parameters
    ----------
    limit
        Bytes that may be lent at a time.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit // BUFFER
        self._free: list[Tensor] = []
        self._lent = 0
        self._lock = threading.Lock()

    def take(self, count: int, most: int) -> list[list[Tensor]]:
        """Lend 1 to `most` sets of `count` buffers, each uint8 of shape [BUFFER]."""
        with self._lock:
            sets = max(1, min(most, (self._limit - self._lent) // count))
            self._lent += sets * count
            old = [self._free.pop() for _ in range(min(sets * count, len(self._free)))]
        new = sets * count - len(old)
        old += [torch.empty(BUFFER, dtype=torch.uint8) for _ in range(new)]
        return [old[k * count : (k + 1) * count] for k in range(sets)]

    def give(self, buffers: list[Tensor]) -> None:
        """Take a set back."""
        with self._lock:
            self._lent -= len(buffers)
            self._free += buffers[: max(0, self._limit - len(self._free))]

    def clear(self) -> None:
        """Let go of what isn't lent."""
        with self._lock:
            self._free.clear()
