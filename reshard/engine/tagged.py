"""How do ranks of a gloo group exchange elements? By numbered messages and ordered local sums.

gloo's own reduce-scatter moves as many bytes as an all-reduce, and its all-gather copies. Here
every rank sends each other rank just what it needs, in place where it can: N(P-1)/P elements for a
gather and as many for a reduce. A message carries a number made from what it is about (kind, label,
length, cuts, type), so that ranks that want different things wait for each other rather than mix
bytes; the watch then tells them.

Messages move in gloo's threads while this rank computes, and a thread sums what has come.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from reshard.engine.flight import Flight, Inbox, Line
from reshard.engine.mover import Mover
from reshard.engine.pool import Pool
from reshard.engine.ranksum import RankSum
from reshard.engine.small import agree, exchange
from reshard.engine.transport import Op, Pending
from reshard.engine.wants import Want
from reshard.engine.watch import Watch
from reshard.errors import RequestError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Tagged"]

_NEVER_SENT = 0x7FFFFFFF
_TURNS = 16
"""So many operations of one name have numbers of their own."""


class Tagged:
    """A transport of numbered messages over a gloo group.

    Parameters
    ----------
    group
        The process group; one thread at a time may use it.
    watch
        Watches the waits; it must cover the ranks of the group.
    name
        What the group is called in messages.
    pooled
        Bytes of receive buffers for the sums. A larger flat is received in turns.
    """

    def __init__(
        self, group: ProcessGroup, watch: Watch, *, name: str = "all", pooled: int = 64 << 20
    ) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.watch = watch
        self._group = group
        self._name = f"{name} ({group.group_name})"
        self._members = tuple(dist.get_process_group_ranks(group))
        self._peers = [(self.rank + k) % self.size for k in range(1, self.size)]
        self._line = Line(group, self._members, watch)
        self._pool = Pool(pooled)
        self._sums = RankSum(self.size)
        self._mover = Mover("reshard-sums")
        self._closed = False
        watch.on_stop(self._wake)
        watch.join(self.close)

    def gather(self, flat: Tensor, bounds: Sequence[int], label: str) -> Pending:
        """Send the own slice to every rank, receive theirs in place."""
        flight = Flight(self._line, *self._start("gather", flat, bounds, label))
        raw = flat.detach().view(torch.uint8)
        width = flat.element_size()
        parts = [raw[a * width : b * width] for a, b in _runs(bounds)]
        flight.receive({peer: parts[peer] for peer in self._peers})
        flight.send(dict.fromkeys(self._peers, parts[self.rank]))
        return flight

    def reduce(self, flat: Tensor, bounds: Sequence[int], out: Tensor, label: str) -> Pending:
        """Send every rank its run of the flat, receive theirs of the own run, and sum."""
        want, tag = self._start("reduce", flat, bounds, label)
        runs = _runs(bounds)
        start, end = runs[self.rank]
        assert out.shape == (end - start,) and out.is_contiguous()
        parts = [flat.detach()[a:b] for a, b in runs]
        flight = Flight(self._line, want, tag)
        inbox = Inbox(self._line, tag, self.rank, self._peers, parts[self.rank], out.detach())
        inbox.open(self._pool, self._sums)
        flight.send_in_rounds({peer: parts[peer] for peer in self._peers}, inbox.step)
        flight.do(self._mover, inbox)
        return flight

    def agree(self, values: Tensor, op: Op, label: str) -> Tensor:
        """Gather everyone's values, then combine them in rank order."""
        return agree(self, values, op, label)

    def exchange(self, data: Any, label: str) -> list[Any]:
        """Gather the lengths, then the JSON texts."""
        return exchange(self, data, label)

    def fail(self, error: BaseException) -> None:
        """Write it where all ranks look, and break the connections that they wait for."""
        self.watch.fail(error)

    def rest(self) -> None:
        """Let go of the receive buffers that aren't lent."""
        self._pool.clear()

    def close(self) -> None:
        """End the thread, let go of the buffers; what is still in flight is given up."""
        if self._line.flying:
            self.watch.give_up("closed its engine while something was in flight")
        self._mover.close()
        self._pool.clear()
        self.watch.leave(self.close, self._wake)
        self._closed = True

    def retire(self) -> None:
        """Do as :meth:`close` without waiting; what is in flight keeps all that it needs."""
        if not self._line.flying:
            self._mover.close(wait=False)
            self._pool.clear()
            self.watch.leave(self.close, self._wake)

    def _start(
        self, kind: str, flat: Tensor, bounds: Sequence[int], label: str
    ) -> tuple[Want, int]:
        if self._closed:
            raise RequestError(f"the {kind} of {label}: the engine was closed")
        assert flat.dim() == 1 and flat.is_contiguous()
        cuts = tuple(bounds)
        assert len(cuts) == self.size + 1 and cuts[0] == 0 and cuts[-1] == flat.numel()
        name, number = _about(kind, label, flat.dtype, cuts)
        spared: frozenset[int] = frozenset()
        runs = _runs(cuts)
        if runs[self.rank][0] == runs[self.rank][1]:
            empty = [self._members[r] for r, (a, b) in enumerate(runs) if a == b]
            spared = frozenset(empty)
        turn = self.watch.start(self._name, name)
        want = Want(self._name, self._members, name, turn, spared)
        return want, number + turn % _TURNS

    def _wake(self) -> None:
        """Make every wait for this group fail: a receive that runs out of time closes its pairs."""
        try:
            work = self._group.recv([torch.empty(1)], self._peers[0], _NEVER_SENT)
            work.wait(timedelta(milliseconds=1))
        except RuntimeError:  # that it fails is the point
            return


def _runs(bounds: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(bounds))


@lru_cache(maxsize=4096)
def _about(kind: str, label: str, dtype: torch.dtype, cuts: tuple[int, ...]) -> tuple[str, int]:
    """What an operation is called, and the number of its messages."""
    n, ranks = cuts[-1], len(cuts) - 1
    name = f"the {kind} of {label} ({n} x {str(dtype).removeprefix('torch.')}"
    if cuts != tuple(rank * n // ranks for rank in range(ranks + 1)):
        name += f", cuts {zlib.crc32(repr(cuts).encode()):08x}"
    name += ")"
    return name, zlib.crc32(name.encode()) % (_NEVER_SENT // _TURNS) * _TURNS
