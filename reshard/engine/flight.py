"""What is in flight over gloo, and what happens when it has landed?"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reshard.engine.mover import Job, Mover
from reshard.engine.pool import BUFFER, Pool
from reshard.engine.ranksum import RankSum
from reshard.engine.wants import Want
from reshard.engine.watch import Watch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Flight", "Inbox", "Line"]


AHEAD = 2
"""Rounds of a sum that are received before the first of them is summed."""


class Line:
    """The messages of a gloo group, watched: a broken connection is told by its reason.

    Parameters
    ----------
    group
        The gloo group.
    members
        Its ranks, by their number among all ranks.
    watch
        Who knows the reasons.
    """

    def __init__(self, group: ProcessGroup, members: tuple[int, ...], watch: Watch) -> None:
        self._group = group
        self._members = members
        self.watch = watch
        self.flying: dict[int, Flight] = {}

    def send(self, part: Tensor, peer: int, tag: int) -> Any:
        """Start a message; `part` must stay as it is until it is waited for."""
        try:
            return self._group.send([part], peer, tag)
        except RuntimeError as error:  # gloo has no better class
            self.watch.lost(self._members[peer], error)

    def receive(self, part: Tensor, peer: int, tag: int) -> Any:
        """Start to receive a message into `part`."""
        try:
            return self._group.recv([part], peer, tag)
        except RuntimeError as error:
            self.watch.lost(self._members[peer], error)

    def land(self, work: Any, peer: int) -> None:
        """Wait for a message. Only once: gloo would wait for another one."""
        try:
            work.wait()
        except RuntimeError as error:
            self.watch.lost(self._members[peer], error)


class Flight:
    """The messages of one operation.

    Parameters
    ----------
    line
        What they travel on.
    want
        What a wait for them waits for.
    tag
        Their number. A flight begins when the one that had the same number has landed.
    """

    def __init__(self, line: Line, want: Want, tag: int) -> None:
        self.line = line
        self.tag = tag
        self._want = want
        self._works: list[tuple[int, Any]] = []
        self._job: Job | None = None
        before = line.flying.get(tag)
        if before is not None:
            before.wait()
        line.flying[tag] = self

    def receive(self, parts: Mapping[int, Tensor]) -> None:
        """Receive a message into each part that isn't empty, from the rank it is listed for."""
        for peer, part in parts.items():
            if part.numel():
                self._works.append((peer, self.line.receive(part, peer, self.tag)))

    def send(self, parts: Mapping[int, Tensor]) -> None:
        """Send each part that isn't empty to the rank it is listed for."""
        for peer, part in parts.items():
            if part.numel():
                self._works.append((peer, self.line.send(part, peer, self.tag)))

    def send_in_rounds(self, parts: Mapping[int, Tensor], step: int) -> None:
        """Send each part in messages of `step` elements, as an :class:`Inbox` receives it."""
        for start in range(0, max(part.numel() for part in parts.values()), step):
            self.send({peer: part[start : start + step] for peer, part in parts.items()})

    def do(self, mover: Mover, inbox: Inbox) -> None:
        """Let the mover empty an inbox; a wait for this flight waits for that too."""
        self._job = mover.do(inbox.empty)

    def wait(self) -> None:
        """Return when all have landed; at once if that was seen before."""
        self.line.watch.check()
        if self.line.flying.get(self.tag) is self:
            with self.line.watch.waiting(self._want):
                job, works = self._job, self._works
                self._job, self._works = None, []
                if job is not None:
                    job.wait()
                for peer, work in works:
                    self.line.land(work, peer)
            del self.line.flying[self.tag]


class Inbox:
    """Receives every rank's part in rounds of one buffer a rank, and sums each round.

    Parameters
    ----------
    line, tag
        Where the parts come from.
    rank
        This rank's number in the group.
    peers
        The other ranks, in the order in which they are received.
    own
        This rank's own part, of shape [n].
    out
        Where the sum goes, of shape [n].
    """

    def __init__(
        self, line: Line, tag: int, rank: int, peers: Sequence[int], own: Tensor, out: Tensor
    ) -> None:
        self._line = line
        self._tag = tag
        self._rank = rank
        self._peers = peers
        self._own = own
        self._out = out
        self.step = BUFFER // own.element_size()
        self._rounds = -(-own.numel() // self.step)
        self._open: deque[tuple[int, list[Tensor], list[Any]]] = deque()

    def open(self, pool: Pool, sums: RankSum) -> None:
        """Start to receive as many rounds as the pool has buffers for."""
        self._pool, self._sums = pool, sums
        if self._rounds:
            count = len(self._peers)
            sets = pool.take(count, min(self._rounds, AHEAD))
            for number, buffers in enumerate(sets):
                self._receive(number, buffers)

    def empty(self) -> None:
        """Wait for each round, sum it, and receive a later one into its buffers."""
        while self._open:
            number, buffers, works = self._open.popleft()
            for peer, work in zip(self._peers, works, strict=True):
                self._line.land(work, peer)
            self._sum(number, buffers)
            later = number + len(self._open) + 1
            if later < self._rounds:
                self._receive(later, buffers)
            else:
                self._pool.give(buffers)

    def _receive(self, number: int, buffers: list[Tensor]) -> None:
        works = [
            self._line.receive(part, peer, self._tag)
            for peer, part in zip(self._peers, self._parts(number, buffers), strict=True)
        ]
        self._open.append((number, buffers, works))

    def _parts(self, number: int, buffers: list[Tensor]) -> list[Tensor]:
        length = min(self.step, self._own.numel() - number * self.step)
        return [buffer.view(self._own.dtype)[:length] for buffer in buffers]

    @torch.no_grad()
    def _sum(self, number: int, buffers: list[Tensor]) -> None:
        run = slice(number * self.step, (number + 1) * self.step)
        parts = [self._own[run]] * (len(self._peers) + 1)
        for peer, part in zip(self._peers, self._parts(number, buffers), strict=True):
            parts[peer] = part
        self._sums.into(self._out[run], parts)
