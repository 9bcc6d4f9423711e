"""Who waits for whom, and can that ever end?

A rank that waits says what it wants: the n-th operation about something, in a group. A rank that
waits itself, and hasn't started an operation that another rank wants, **owes** it. Nobody who
waits can start anything, so that a circle of waiting ranks, each owing the next, is for ever; and
where there is no circle someone is still computing, and nobody has to be told.

Each debt names the wait it belongs to. Around a circle the newest of them was written while its
author waited, and by then none of the others could have gone on: what was read at different
moments proves nevertheless that all wait at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Record", "Want", "circle"]


@dataclass(frozen=True, slots=True)
class Want:
    """An operation that a rank waits for: the `turn`-th of its name in a group.

    `spared` are members who neither give nor get anything in it. With `in_order`, `turn` counts all
    operations of the group, which match by it alone.
    """

    group: str
    members: tuple[int, ...]
    name: str
    turn: int
    spared: frozenset[int] = frozenset()
    in_order: bool = False

    def __str__(self) -> str:
        return f"waits for {self.name}, number {self.turn} in group {self.group}"

    def needs(self, rank: int) -> bool:
        """Whether that rank must have started it too."""
        return rank in self.members and rank not in self.spared


@dataclass(frozen=True, slots=True)
class Record:
    """What a waiting rank says in the store: its `wait`-th wait, what for, and whom it owes.

    `owes` maps a rank to the number of that rank's wait.
    """

    wait: int
    want: Want
    owes: Mapping[int, int] = field(default_factory=dict[int, int])

    def text(self) -> str:
        """The record as it is stored."""
        want = self.want
        return json.dumps(
            {
                "wait": self.wait,
                "group": want.group,
                "members": want.members,
                "name": want.name,
                "turn": want.turn,
                "spared": sorted(want.spared),
                "in_order": want.in_order,
                "owes": {str(rank): wait for rank, wait in self.owes.items()},
            }
        )

    @classmethod
    def read(cls, text: str) -> Record | None:
        """Read a stored record; None for a rank that said nothing."""
        if not text:
            return None
        said: dict[str, Any] = json.loads(text)
        want = Want(
            said["group"],
            tuple(said["members"]),
            said["name"],
            said["turn"],
            frozenset(said["spared"]),
            said["in_order"],
        )
        return cls(said["wait"], want, {int(rank): wait for rank, wait in said["owes"].items()})


def circle(records: Mapping[int, Record], start: int) -> list[int] | None:
    """Find a circle of ranks that wait for each other, from where `start` is stuck.

    Returns
    -------
    list of int
        The ranks of the circle, each waiting for the next; None if somebody can still go on.
    """
    waits_for: dict[int, list[int]] = {rank: [] for rank in records}
    for debtor, record in records.items():
        for rank, wait in record.owes.items():
            if rank in records and records[rank].wait == wait:
                waits_for[rank].append(debtor)
    done: set[int] = set()
    path = [start]
    todo = [sorted(waits_for.get(start, []), reverse=True)]
    while path:
        if not todo[-1]:
            done.add(path.pop())
            todo.pop()
            continue
        rank = todo[-1].pop()
        if rank in path:
            return path[path.index(rank) :]
        if rank not in done:
            path.append(rank)
            todo.append(sorted(waits_for[rank], reverse=True))
    return None
