"""How do ranks exchange elements where the backend's collectives are right, as with NCCL?

A gather is an all-gather in place where all slices are equal, and a batch of messages, also in
place, where they aren't. A reduce exchanges the runs, which moves as many bytes as a
reduce-scatter, and sums them here in rank order and in the wider type; with ``ordered=False`` the
backend sums, in its own order, where it can.

With a GPU a wait makes the stream wait, not the program. What the GPU hasn't finished for a second
is compared with what is the others' turn: collectives of a group match by their place in its order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from reshard.engine.ranksum import RankSum
from reshard.engine.small import agree, exchange
from reshard.engine.transport import Op, Pending
from reshard.engine.wants import Want
from reshard.engine.watch import Watch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Collective"]


class Collective:
    """A transport of the backend's own collectives.

    All ranks of the group start the same operations in the same order.

    Parameters
    ----------
    group
        The process group.
    watch
        Watches what doesn't end; it must cover the ranks of the group.
    name
        What the group is called in messages.
    device
        Where the elements lie.
    ordered
        Sum in rank order, in the type of the result.
    """

    def __init__(
        self,
        group: ProcessGroup,
        watch: Watch,
        *,
        name: str = "all",
        device: torch.device,
        ordered: bool = True,
    ) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.watch = watch
        self._group = group
        self._name = f"{name} ({group.group_name})"
        self._members = tuple(dist.get_process_group_ranks(group))
        self._device = device
        self._ordered = ordered
        self._sums = RankSum(self.size)
        self._running: deque[_Flight] = deque()
        watch.join(self.close, self._oldest)
        watch.on_stop(self._wake)

    def gather(self, flat: Tensor, bounds: Sequence[int], label: str) -> Pending:
        """All-gather in place, or one broadcast a slice."""
        raw = flat.detach().view(torch.uint8)
        width = flat.element_size()
        cuts = [bound * width for bound in bounds]
        parts = [raw[a:b] for a, b in pairwise(cuts)]
        flight = self._start("gather", flat, label)
        if len({part.numel() for part in parts}) == 1:
            flight.works = [_all_gather(raw, parts[self.rank], group=self._group, async_op=True)]
        else:
            flight.works = self._messages(parts)
        return flight

    def reduce(self, flat: Tensor, bounds: Sequence[int], out: Tensor, label: str) -> Pending:
        """Exchange the runs and sum them here, or let the backend reduce and scatter."""
        flat, out = flat.detach(), out.detach()
        n = out.numel()
        lengths = [b - a for a, b in pairwise(bounds)]
        flight = self._start("reduce", flat, label)
        if not self._ordered and len(set(lengths)) == 1 and out.dtype == flat.dtype:
            flight.works = [_reduce_scatter(out, flat, group=self._group, async_op=True)]
            return flight
        parts = flat.new_empty(self.size * n)
        flight.works = [
            dist.all_to_all_single(
                parts, flat, [n] * self.size, lengths, group=self._group, async_op=True
            )
        ]
        flight.finish = lambda: self._sums.into(out, list(parts.view(self.size, n)))
        return flight

    def agree(self, values: Tensor, op: Op, label: str) -> Tensor:
        """Gather everyone's values, then combine them in rank order."""
        return agree(self, values.to(self._device), op, label).to(values.device)

    def exchange(self, data: Any, label: str) -> list[Any]:
        """Gather the lengths, then the JSON texts."""
        return exchange(self, data, label, device=self._device)

    def fail(self, error: BaseException) -> None:
        """Write it where all ranks look."""
        self.watch.fail(error)

    def rest(self) -> None:
        """Nothing to let go of: torch's allocator keeps the buffers."""

    def close(self) -> None:
        """Leave the watch."""
        self.watch.leave(self.close, self._wake)

    def retire(self) -> None:
        """Leave the watch too: nothing else is held."""
        if not self._running:
            self.close()

    def _start(self, kind: str, flat: Tensor, label: str) -> _Flight:
        assert flat.dim() == 1 and flat.is_contiguous()
        name = f"the {kind} of {label} ({flat.numel()} x {str(flat.dtype).removeprefix('torch.')})"
        number = self.watch.start_in_order(self._name, name)
        want = Want(self._name, self._members, name, number, in_order=True)
        flight = _Flight(self.watch, want)
        if self._device.type != "cpu":
            self._running.append(flight)
        return flight

    def _messages(self, parts: Sequence[Tensor]) -> list[Any]:
        """Send the own part to every rank and receive theirs, as one batch."""
        own = parts[self.rank]
        peers = [(self.rank + k) % self.size for k in range(1, self.size)]
        batch = [
            dist.P2POp(dist.irecv, parts[r], self._members[r], self._group)
            for r in peers
            if parts[r].numel()
        ]
        if own.numel():
            batch += [dist.P2POp(dist.isend, own, self._members[r], self._group) for r in peers]
        return dist.batch_isend_irecv(batch) if batch else []

    def _oldest(self) -> tuple[Want, float] | None:
        """What the device has been at for longest; called by the watch's thread."""
        while self._running and self._running[0].landed():
            self._running.popleft()
        return (self._running[0].want, self._running[0].since) if self._running else None

    def _wake(self) -> None:
        """End what the device waits for: the backend gives up its connections."""
        abort = getattr(self._group._get_backend(self._device), "abort", None)
        if abort is not None:
            abort()


class _Flight:
    """A collective in flight, and what is to be done when it has landed."""

    def __init__(self, watch: Watch, want: Want) -> None:
        self.want = want
        self.since = time.monotonic()
        self.works: list[Any] = []
        self.finish: Callable[[], None] | None = None
        self._watch = watch
        self._waited = False

    def landed(self) -> bool:
        """Whether the device is done with it."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        """Return when the result is there, or will be for what the stream does next."""
        self._watch.check()
        if self._waited:
            return
        self._waited = True
        with self._watch.waiting(self.want):
            for work in self.works:
                try:
                    work.wait()
                except RuntimeError as error:  # backends have no better class
                    self._watch.lost(None, error)
        if self.finish is not None:
            with torch.no_grad():
                self.finish()


# torch 2.13 gives these collectives new names and warns of the old ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
