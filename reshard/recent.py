"""How is something that several callers need soon after each other made once?

:class:`Recent` keeps the last few things that were made. Threads that ask for one that is being
made wait for it, instead of making it again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Recent:
    """The last things that were made or asked for.

    Parameters
    ----------
    most
        How many are kept.
    """

    def __init__(self, most: int) -> None:
        assert most >= 1, most
        self._most = most
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """What was made under a key; if it isn't kept it is made now.

        Parameters
        ----------
        key
            Whatever decides what is made.
        make
            Makes it, without asking this object for another thing.
        """
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            else:
                self._kept[key] = make()
                if len(self._kept) > self._most:
                    self._kept.popitem(last=False)
            found: T = self._kept[key]
            return found
