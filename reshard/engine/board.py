"""What do ranks tell each other while a checkpoint is written?

Small messages in the store that all ranks share, so that a thread can send them while training uses
the process groups. As long as a rank's save is under way, a thread of it gives a sign every second:
however long a disk takes, a rank that lives is waited for, and one that was killed is not.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from reshard.errors import ReshardError

if TYPE_CHECKING:
    from reshard.engine.state import Stateful

PULSE = 1.0
"""Seconds between two signs."""

PATIENCE = 30.0
"""Seconds without a sign from a rank after which a save is given up."""


class Board:
    """The messages of one save.

    Parameters
    ----------
    engine
        Whose.
    name
        Of the save; no other one has had it.
    """

    def __init__(self, engine: Stateful, name: str) -> None:
        self._store = engine.store
        self._rank, self._size = engine.rank, engine.size
        self._at = f"save/{name}"

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Give signs for the time of a ``with``."""
        ended = threading.Event()
        sign = f"{self._at}/{self._rank}/sign"

        def beat() -> None:
            count = 0
            while not ended.is_set():
                count += 1
                try:
                    self._store.set(sign, str(count))
                except RuntimeError:  # the store is gone: the save meets that itself
                    return
                ended.wait(PULSE)

        thread = threading.Thread(target=beat, name="reshard-alive", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def tell(self, what: Mapping[str, Any]) -> None:
        """Tell rank 0 how this rank's writing ended."""
        self._put(f"{self._at}/{self._rank}", what)

    def announce(self, error: Mapping[str, Any] | None) -> None:
        """Rank 0: tell all how the save ended."""
        self._put(f"{self._at}/outcome", error)

    def told(self) -> Iterator[Any]:
        """Rank 0: what each rank told, in rank order."""
        for rank in range(self._size):
            yield self._get(f"{self._at}/{rank}", rank)

    def outcome(self) -> Any:
        """How the save ended."""
        return self._get(f"{self._at}/outcome", 0)

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _get(self, key: str, rank: int) -> Any:
        pause, sign = 0.001, b""
        until = time.monotonic() + PATIENCE
        while not self._store.check([key]):
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
            if pause == 0.1 and self._store.check([f"{self._at}/{rank}/sign"]):
                new = self._store.get(f"{self._at}/{rank}/sign")
                if new != sign:
                    sign, until = new, time.monotonic() + PATIENCE
            if time.monotonic() > until:
                raise ReshardError(
                    f"no sign of rank {rank} for {PATIENCE:g} s while a checkpoint was written",
                    hint="see what became of that rank; the checkpoint doesn't exist",
                )
        return json.loads(self._store.get(key))
