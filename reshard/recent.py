"""How is something that several callers need soon after each other made once?

:class:`Recent` keeps the last few things that were made. Threads that ask for one that is being
made wait for it, instead of making it again; those that ask for others don't.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class _Thing:
    """A thing, made or about to be."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.made: list[Any] = []


class Recent:
    """The last things that were asked for.

    Parameters
    ----------
    most
        How many are kept.
    """

    def __init__(self, most: int) -> None:
        assert most >= 1, most
        self._most = most
        self._lock = threading.Lock()
        self._things: OrderedDict[Hashable, _Thing] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The thing of a key.

        Parameters
        ----------
        key
            Whatever decides what the thing is.
        make
            Makes it, if it isn't kept.
        """
        with self._lock:
            thing = self._things.setdefault(key, _Thing())
            self._things.move_to_end(key)
            if len(self._things) > self._most:
                self._things.popitem(last=False)
        with thing.lock:
            if not thing.made:
                thing.made.append(make())
            found: T = thing.made[0]
            return found
