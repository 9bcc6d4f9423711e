"""Why is nothing happening? A rank that waits too long asks the others, and all get the answer.

Each rank has a thread that sleeps as long as nobody waits for more than a second. Then it writes
into the store what its rank waits for and reads what the others wrote (``wants.py`` decides what
that means). A rank that is computing says nothing, and is never suspected however long it takes.
What ends the run is the **verdict**: the first one written counts, and every rank raises it.

A rank that left is known by its closed connection; one that fails says why before it goes.
"""

from __future__ import annotations

import atexit
import json
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    PrefixStore,
    Store,
    _get_default_store,  # pyright: ignore[reportPrivateUsage]
)

from reshard.engine.failures import EngineError, RankFailed, RanksDisagree
from reshard.engine.wants import Record, Want, circle

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Watch"]

PATIENCE = 1.0
"""Seconds that a rank waits before it says so."""

TICK = 0.25
"""Seconds between two looks of the thread."""

GRACE = 1.0
"""Seconds in which a rank whose connection closed may still say why."""

QUICK_RANKS = 64
"""Up to so many ranks each look reads all records; beyond, looks become rarer in proportion."""

_open: list[Watch] = []
_VERDICT = "verdict"
_RESTART = "start all ranks again from the last checkpoint"


class Watch:
    """The watch over the waits of one group of ranks, usually all of them.

    Made on all ranks of the group together. Transports tell it what they start and wait for.

    Parameters
    ----------
    group
        The ranks that are watched; None for all. Transports may belong to parts of it.
    device
        Where a tensor of the group must lie.
    """

    def __init__(
        self, group: ProcessGroup | None = None, *, device: torch.device | None = None
    ) -> None:
        self._world = dist.group.WORLD
        self.rank = dist.get_rank()
        self.ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        self._store = _store(group, device, self.ranks)
        self._wait: _Wait | None = None
        self._waits = 0
        self._turns: dict[tuple[str, str], int] = {}
        self._orders: dict[str, _Order] = {}
        self._said: str = ""
        self._error: EngineError | None = None
        self._on_stop: list[Callable[[], None]] = []
        self._users: list[Callable[[], None]] = []
        self._devices: list[Callable[[], tuple[Want, float] | None]] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="reshard-watch", daemon=True)
        self._thread.start()
        _open.append(self)
        # Before the interpreter goes: a daemon thread must not run into its end.
        atexit.register(self._at_exit)

    @classmethod
    def over(cls, group: ProcessGroup, device: torch.device | None = None) -> Watch:
        """The open watch that covers a group's ranks, or a new one of this group."""
        ranks = set(dist.get_process_group_ranks(group))
        for watch in list(_open):
            if watch._world is not dist.group.WORLD:
                watch.close()  # of process groups that are no more
            elif ranks <= set(watch.ranks):
                return watch
        return cls(group, device=device)

    def on_stop(self, hook: Callable[[], None]) -> None:
        """Call `hook`, in another thread, when the run ends: it must wake whoever waits."""
        self._on_stop.append(hook)

    def join(
        self,
        close: Callable[[], None],
        oldest: Callable[[], tuple[Want, float] | None] | None = None,
    ) -> None:
        """Note that a transport uses this watch.

        Parameters
        ----------
        close
            Called when the process ends.
        oldest
            What a device has been at for longest, and since when.
        """
        self._users.append(close)
        if oldest is not None:
            self._devices.append(oldest)

    def leave(self, close: Callable[[], None], wake: Callable[[], None]) -> None:
        """Note that a transport has closed, and its hooks go.

        The watch stays open for the next one: were it closed with the last, ranks that drop their
        engines at different times would make it anew on some of them, and wait for the others.
        """
        if close in self._users:
            self._users.remove(close)
        if wake in self._on_stop:
            self._on_stop.remove(wake)

    def check(self) -> None:
        """Raise the verdict if the run has ended."""
        if self._error is not None:
            raise _again(self._error)

    def start(self, group: str, name: str) -> int:
        """Note that this rank starts an operation; return its turn, counted from 1."""
        self.check()
        turn = self._turns.get((group, name), 0) + 1
        self._turns[group, name] = turn
        return turn

    def start_in_order(self, group: str, name: str) -> int:
        """Do as :meth:`start`, counting all operations of the group."""
        self.check()
        log = self._orders.setdefault(group, _Order())
        log.count += 1
        log.names.append(name)
        return log.count

    @contextmanager
    def waiting(self, want: Want) -> Iterator[None]:
        """Note, for the time of a ``with``, that this rank waits."""
        self._waits += 1
        outer, self._wait = self._wait, _Wait(self._waits, want, time.monotonic())
        try:
            yield
        finally:
            self._wait = outer

    def lost(self, rank: int | None, error: Exception) -> NoReturn:
        """A connection to a rank broke: raise the reason, which that rank may have written.

        Parameters
        ----------
        rank
            The rank, if it is known.
        error
            What the backend said.

        Raises
        ------
        EngineError
            Always.
        """
        if self._error is None:
            verdict = self._await_verdict()
            if verdict is None:
                doing = self._doings()
                what = f"a connection of rank {self.rank} broke: {error}"
                if rank is not None:
                    doing[rank] = "left: its connection is closed"
                    what = f"rank {rank} left"
                verdict = self._post("failed", what, doing)
            self._stop(verdict)
        assert self._error is not None
        raise _again(self._error) from error

    def fail(self, error: BaseException) -> None:
        """Tell all ranks that this one fails, and why. The caller raises."""
        self.give_up(f"failed: {type(error).__name__}: {error}")

    def give_up(self, why: str) -> None:
        """Tell all ranks that this one goes no further; `why` follows its number."""
        if self._error is None:
            doing = {**self._doings(), self.rank: why}
            self._stop(self._post("failed", f"rank {self.rank} {why}", doing))

    def close(self) -> None:
        """End the thread. The watch is no longer to be used."""
        atexit.unregister(self._at_exit)
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._on_stop.clear()
        if self in _open:
            _open.remove(self)

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)
        if isinstance(error, BaseException) and not isinstance(error, EngineError):
            self.fail(error)
        for close in list(self._users):
            close()
        self.close()

    def _look_on(self) -> None:
        pause = TICK * max(1.0, len(self.ranks) / QUICK_RANKS)
        while not self._closing.wait(pause):
            if self._error is not None:
                return
            wait = self._wait or self._device_wait()
            if wait is not None and time.monotonic() - wait.since > PATIENCE:
                try:
                    self._judge(wait)
                except RuntimeError as gone:  # the store's errors have no better class
                    self._stop(_store_gone(gone))

    def _device_wait(self) -> _Wait | None:
        """What a device waits for, while this rank's program may go on."""
        for oldest in self._devices:
            found = oldest()
            if found is not None:
                return _Wait(-found[0].turn, *found, blocked=False)
        return None

    def _judge(self, wait: _Wait) -> None:
        verdict = self._verdict()
        if verdict is None:
            records = self._records()
            owes = {
                rank: record.wait
                for rank, record in records.items()
                if record.want.needs(self.rank) and self._lacks(record.want, wait.blocked)
            }
            # Debts count only if this rank waited while they were reckoned.
            if wait.blocked and self._wait is not wait:
                return
            records[self.rank] = Record(wait.number, wait.want, owes)
            text = records[self.rank].text()
            if text != self._said:
                self._store.set(str(self.rank), text)
                self._said = text
            stuck = circle(records, self.rank)
            if stuck is None:
                return
            names = " and ".join(str(rank) for rank in sorted(stuck))
            verdict = self._post(
                "disagree", f"ranks {names} wait for different things", self._doings(records)
            )
        self._stop(verdict)

    def _lacks(self, want: Want, blocked: bool) -> bool:
        """Whether this rank, as long as it waits, can't start what another one wants."""
        if not want.in_order:
            return blocked and self._turns.get((want.group, want.name), 0) < want.turn
        log = self._orders.get(want.group, _Order())
        back = log.count - want.turn
        if back < 0:
            return blocked
        # Something else had that turn: for ever.
        return back < len(log.names) and log.names[-1 - back] != want.name

    def _records(self) -> dict[int, Record]:
        """What the other ranks say."""
        others = [rank for rank in self.ranks if rank != self.rank]
        texts = _read_all(self._store, [str(rank) for rank in others])
        found = {rank: Record.read(text) for rank, text in zip(others, texts, strict=True)}
        return {rank: record for rank, record in found.items() if record is not None}

    def _doings(self, records: dict[int, Record] | None = None) -> dict[int, str]:
        if records is None:
            try:
                records = self._records()
            except RuntimeError:  # the store is gone: say what this rank knows
                records = {}
        wait = self._wait
        doing = dict.fromkeys(self.ranks, "computing, or waits for less than a second")
        doing |= {rank: str(record.want) for rank, record in records.items()}
        if wait is not None:
            doing[self.rank] = str(wait.want)
        return doing

    def _verdict(self) -> EngineError | None:
        if not self._store.check([_VERDICT]):
            return None
        return _error(self._store.get(_VERDICT).decode())

    def _await_verdict(self) -> EngineError | None:
        """The verdict that another rank is just writing, if there is one."""
        end = time.monotonic() + GRACE
        while time.monotonic() < end:
            try:
                verdict = self._verdict()
            except RuntimeError:  # it went with its rank, and nobody can write any more
                return None
            if verdict is not None:
                return verdict
            time.sleep(0.05)
        return None

    def _post(self, kind: str, what: str, doing: dict[int, str]) -> EngineError:
        """Write a verdict; return the one that counts."""
        text = json.dumps({"kind": kind, "what": what, "ranks": doing})
        try:
            return _error(self._store.compare_set(_VERDICT, "", text).decode())
        except RuntimeError:  # the store is gone: the others find out as this rank did
            return _error(text)

    def _stop(self, verdict: EngineError) -> None:
        if self._error is None:
            self._error = verdict
            for hook in self._on_stop:
                hook()


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    """A wait in progress; `blocked` if the program itself waits and can start nothing."""

    number: int
    want: Want
    since: float
    blocked: bool = True


class _Order:
    """The operations that a group has started: how many, and the names of the last ones."""

    def __init__(self) -> None:
        self.count = 0
        self.names: deque[str] = deque(maxlen=256)


def _store(
    group: ProcessGroup | None, device: torch.device | None, ranks: tuple[int, ...]
) -> Store:
    """A part of the group's store that no earlier run has written to."""
    store: Store = _get_default_store()
    clone = getattr(store, "clone", None)
    if clone is not None:
        # A connection of its own: another thread may block in the store for long.
        store = clone()
    number = torch.tensor([secrets.randbits(62)], device=device)
    first = ranks[0] == dist.get_rank()
    if first:
        for rank in ranks:
            store.set(f"reshard/watch/{int(number)}/{rank}", "")
    dist.broadcast(number, src=ranks[0], group=group)
    return PrefixStore(f"reshard/watch/{int(number)}", store)


def _read_all(store: Store, keys: list[str]) -> list[str]:
    extended: Any = store
    if extended.has_extended_api():
        return [value.decode() for value in extended.multi_get(keys)]
    return [store.get(key).decode() for key in keys]


def _error(text: str) -> EngineError:
    said = json.loads(text)
    kind = RanksDisagree if said["kind"] == "disagree" else RankFailed
    ranks = {int(rank): doing for rank, doing in said["ranks"].items()}
    return kind(said["what"], ranks=ranks, hint=_RESTART)


def _store_gone(error: Exception) -> EngineError:
    return RankFailed(f"the process that serves the store left ({error})", hint=_RESTART)


def _again(error: EngineError) -> EngineError:
    """A new exception for each raise: a traceback belongs to one."""
    return type(error)(error.what.split("\n")[0], ranks=error.ranks, hint=error.hint)
