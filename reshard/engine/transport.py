"""How do elements get to the other ranks? One protocol, whatever the backend.

A transport belongs to one process group. It gathers flats, sums them in rank order, and agrees on
small values. :func:`connect` chooses it: numbered messages for gloo (``tagged.py``), the backend's
own collectives elsewhere (``collective.py``), and nothing at all for a single rank.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Alone", "Done", "Pending", "Transport", "backend", "connect"]

Op = Literal["max", "sum"]


class Pending(Protocol):
    """Something that is in flight."""

    def wait(self) -> None:
        """Return when the result is there. Calling it again does nothing.

        Raises
        ------
        RanksDisagree
            The ranks wait for different things, so that none of them could ever go on.
        RankFailed
            A rank failed or left.
        """
        ...


class Transport(Protocol):
    """What the engine asks of a process group.

    All ranks make the same calls with the same labels; the label says what it is about, in the
    counts and in messages (``layers.3``).
    """

    @property
    def rank(self) -> int:
        """The number of this rank in the group."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks in the group, P."""
        ...

    def gather(self, flat: Tensor, bounds: Sequence[int], label: str) -> Pending:
        """Fill a flat, of which each rank has filled its own slice, on every rank.

        Parameters
        ----------
        flat
            Shape [N], contiguous, any element type. It is filled in place and must keep its
            storage until ``wait``.
        bounds
            P + 1 offsets; rank r has filled ``[bounds[r], bounds[r + 1])``.
        label
            What it is about.
        """
        ...

    def reduce(self, flat: Tensor, bounds: Sequence[int], out: Tensor, label: str) -> Pending:
        """Sum this rank's run of every rank's flat into `out`.

        Parts are added in rank order by the pairwise rule of ``counter.py``, in the type of `out`.

        Parameters
        ----------
        flat
            Shape [N], contiguous. It may be reused after ``wait``.
        bounds
            P + 1 offsets; this rank receives ``[bounds[rank], bounds[rank + 1])``.
        out
            Shape [bounds[rank + 1] - bounds[rank]], contiguous; its type may be wider than that of
            `flat`. It is overwritten.
        label
            What it is about.
        """
        ...

    def agree(self, values: Tensor, op: Op, label: str) -> Tensor:
        """Combine a small tensor over all ranks; sums are taken in rank order.

        Returns
        -------
        Tensor
            A new tensor like `values`, the same on every rank.
        """
        ...

    def exchange(self, data: Any, label: str) -> list[Any]:
        """Give every rank what each rank has said, in rank order.

        For what is small, rare and plain: `data` travels as JSON.
        """
        ...

    def fail(self, error: BaseException) -> None:
        """Tell all ranks that this one fails, and why, before it raises.

        What ends the process unhandled is told without this.
        """
        ...

    def rest(self) -> None:
        """Let go of buffers that nothing uses now; the next operation makes new ones."""
        ...

    def close(self) -> None:
        """Let go of buffers and threads. The process group stays the caller's."""
        ...

    def retire(self) -> None:
        """Do so when nobody uses it any more, in whatever thread: it waits for nothing."""
        ...


class Done:
    """A :class:`Pending` that has nothing to wait for."""

    def wait(self) -> None:
        """Return at once."""


class Alone:
    """The transport of a group of one rank: nothing travels, no process group is needed."""

    rank = 0
    size = 1

    def gather(self, flat: Tensor, bounds: Sequence[int], label: str) -> Pending:
        """Nothing to do: the one slice is the flat."""
        return Done()

    def reduce(self, flat: Tensor, bounds: Sequence[int], out: Tensor, label: str) -> Pending:
        """Copy the flat into `out`, unless it is `out`."""
        if out.data_ptr() != flat.data_ptr():
            out.copy_(flat[bounds[0] : bounds[1]])
        return Done()

    def agree(self, values: Tensor, op: Op, label: str) -> Tensor:
        """Return a copy: one rank always agrees."""
        return values.clone()

    def exchange(self, data: Any, label: str) -> list[Any]:
        """Return what was said, in the form in which it would have travelled."""
        return [json.loads(json.dumps(data))]

    def fail(self, error: BaseException) -> None:
        """Nobody to tell."""

    def rest(self) -> None:
        """Nothing to let go of."""

    def close(self) -> None:
        """Nothing to let go of."""

    def retire(self) -> None:
        """Nothing to let go of."""


def connect(
    group: ProcessGroup | None = None,
    *,
    name: str = "all",
    device: torch.device | None = None,
    ordered: bool = True,
) -> Transport:
    """Make the transport of a process group, on all its ranks together.

    The first one watches over its ranks, and later ones of parts of them share its watch: connect
    the whole before the parts.

    Parameters
    ----------
    group
        The group; None for all ranks. Without ``torch.distributed`` there is one rank.
    name
        What the group is called in messages.
    device
        Where the elements lie; it decides which of the group's backends carries them.
    ordered
        Sum in rank order everywhere. Otherwise backends that can sum do it in their own order.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return Alone()
    from reshard.engine.collective import Collective
    from reshard.engine.tagged import Tagged
    from reshard.engine.watch import Watch

    whole = group if group is not None else dist.group.WORLD
    assert whole is not None
    where = device if device is not None else torch.device("cpu")
    watch = Watch.over(whole, where)
    if backend(whole, where) == "gloo":
        return Tagged(whole, watch, name=name)
    return Collective(whole, watch, name=name, device=where, ordered=ordered)


def backend(group: ProcessGroup, device: torch.device) -> str:
    """Name the backend that carries a device's elements (``gloo``, ``nccl``)."""
    # "cpu:gloo,cuda:nccl" where a group has several.
    config = dist.get_backend_config(group)
    of = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    return of.get(device.type, config)
