"""How do ranks meet again after a restart? In a part of the store that only this round uses.

torchrun keeps its store when it restarts the workers: what the last attempt wrote there is found by
the next, whose ranks then look for the dead. Counts of restarts are no way out, as agents count
differently once one of them was lost, and the number of ranks may have changed.

So the ranks agree on a round that nobody can have heard of before. Each writes a number that it
draws itself; rank 0 draws the round's and writes it beside the numbers that it read. A rank that
finds its own number there says yes to that round; when all have, rank 0 opens it. What an earlier
attempt left is a number that nobody says yes to: rank 0 reads again and draws another round.
"""

from __future__ import annotations

import json
import secrets
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from reshard.engine.failures import RankFailed

__all__ = ["join", "start"]

_PAUSE = 0.05
_TIMEOUT = timedelta(minutes=5)


def start(
    backend: str | None = None,
    *,
    timeout: timedelta | None = None,
    meeting: timedelta = _TIMEOUT,
) -> None:
    """Initialize ``torch.distributed`` as torchrun's environment says, safely at any attempt.

    Parameters
    ----------
    backend
        As in ``init_process_group``.
    timeout
        How long an operation may take, as in ``init_process_group``.
    meeting
        How long to wait for all ranks to come.

    Raises
    ------
    RankFailed
        If not all ranks came.
    """
    store, rank, world = next(iter(rendezvous("env://", timeout=meeting)))
    own = join(store, rank, world, timeout=meeting)
    dist.init_process_group(backend, store=own, rank=rank, world_size=world, timeout=timeout)


def join(store: Store, rank: int, world: int, *, timeout: timedelta = _TIMEOUT) -> Store:
    """Agree with the other ranks on a round; return the part of the store that is its own.

    Parameters
    ----------
    store
        A store that all ranks reach, whatever earlier attempts left in it.
    rank, world
        This rank's number, and how many there are in this attempt.
    timeout
        How long to wait for all ranks to come.

    Raises
    ------
    RankFailed
        If not all ranks came.
    """
    meeting = PrefixStore("reshard/meeting", store)
    number = secrets.token_hex(8)
    meeting.set(f"here/{rank}", number)
    end = time.monotonic() + timeout.total_seconds()
    name = _lead(meeting, number, world, end) if rank == 0 else _follow(meeting, rank, number, end)
    return PrefixStore(f"reshard/round/{name}", store)


def _lead(store: Store, number: str, world: int, end: float) -> str:
    others = list(range(1, world))
    numbers: dict[int, str] = {}
    name = ""
    while True:
        found = {rank: text for rank in others if (text := _get(store, f"here/{rank}"))}
        if found != numbers or not name:
            numbers, name = found, secrets.token_hex(8)
            told = {str(rank): text for rank, text in {0: number, **numbers}.items()}
            store.set("round", json.dumps({"name": name, "numbers": told}))
        missing = [rank for rank in others if _get(store, f"yes/{name}/{rank}") is None]
        if not missing:
            store.set(f"open/{name}", "")
            return name
        _pause(end, f"{'rank' if len(missing) == 1 else 'ranks'} {missing} didn't come")


def _follow(store: Store, rank: int, number: str, end: float) -> str:
    name = ""
    while True:
        text = _get(store, "round")
        said: dict[str, Any] = json.loads(text) if text else {"name": "", "numbers": {}}
        if said["name"] != name and said["numbers"].get(str(rank)) == number:
            name = said["name"]
            store.set(f"yes/{name}/{rank}", "")
        if name and _get(store, f"open/{name}") is not None:
            return name
        _pause(end, "some rank didn't come" if name else "rank 0 didn't come")


def _get(store: Store, key: str) -> str | None:
    """What a key says; a plain ``get`` would wait for it."""
    return store.get(key).decode() if store.check([key]) else None


def _pause(end: float, problem: str) -> None:
    if time.monotonic() > end:
        raise RankFailed(problem, hint="look at what those ranks say; all must start together")
    time.sleep(_PAUSE)
