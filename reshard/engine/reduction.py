"""When and how do gradients become slices?

A gradient is taken where autograd has just finished it (the post-accumulate-grad hook: once a
backward, however often the module ran), into the send buffer of its flat, and ``.grad`` is
``None`` again. When a flat's gradients are there, and those of all flats before it in the order
that all ranks share, its reduction starts, beside the backward. Send buffers go round; no whole
gradient outlives a backward at stages 2 and 3.

A flat starts without waiting for parameters that have never had a gradient, and without waiting
at all where its unit didn't run. Should a gradient come all the same, it stays in ``.grad``, is
**late**, and goes with the next backward or, at the latest, with the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from reshard.engine.inner import backward_number
from reshard.engine.intake import Intake
from reshard.engine.loose import Loose
from reshard.errors import RequestError

if TYPE_CHECKING:
    from reshard.engine.transport import Pending, Transport

IN_FLIGHT = 2
"""Reductions that run at the same time; a buffer is filled beside one of them."""


class _Flight(NamedTuple):
    intake: Intake
    pending: Pending
    out: Tensor


class Reducer:
    """All gradients of a rank.

    Parameters
    ----------
    intakes
        One a trained flat, in the order in which reductions start: the same on all ranks.
    transport
        The group over which slices lie.
    combine
        Sums a slice, in place, over the groups that hold copies; ``None`` without copies.
    """

    def __init__(
        self,
        intakes: Sequence[Intake],
        transport: Transport,
        combine: Callable[[Tensor, str], None] | None,
    ) -> None:
        self.intakes = tuple(intakes)
        self.order = list(intakes)
        self.transport, self.combine = transport, combine
        self.finished: list[int] = []  # the order of this rank's first backward
        self.backwards = 0
        self.late: set[Intake] = set()
        self.unsynced = False
        self._state: str | None = None
        self._outer: int | None = None
        self._head = 0
        self._flights: deque[_Flight] = deque()
        self._pool: list[Tensor] = []
        self._partial = False
        for number, intake in enumerate(self.intakes):
            for k, parameter in enumerate(intake.holding.parameters):
                hooked: Any = parameter
                hooked.register_post_accumulate_grad_hook(self._hook(number, intake, k))

    # -- a backward ------------------------------------------------------------------------------

    @property
    def inside(self) -> bool:
        """Whether a backward is under way."""
        return self._state is not None

    def begin(self, *, sync: bool, partial: bool = False) -> None:
        """A backward begins; without ``sync`` gradients stay where they are."""
        assert self._state is None, self._state
        self._state, self._partial = "take" if sync else "leave", partial
        self._head, self._outer = 0, None
        for intake in self.intakes:
            intake.begin()

    def outermost(self, _: Any) -> None:
        """A hook of the loss: tells a backward from those that checkpointing nests in it."""
        self._outer = backward_number()

    def end(self) -> None:
        """A backward is through: whatever hasn't started starts, and all is waited for."""
        if self._state == "take":
            for intake in self.order[self._head :]:
                self._take_rest(intake)
                self._launch(intake)
            self._head = len(self.order)
            self._land(0)
            self._pool.clear()
            first = self.backwards == 0
            for intake in self.intakes:
                intake.learn(first)
                intake.usage.ran = 0
            self.backwards += 1
            self.unsynced = False
        else:
            self.unsynced = True
        self._state = None

    def flush(self, intakes: Sequence[Intake]) -> None:
        """Reduce what no backward took along: late gradients, and those kept by no_sync."""
        self._partial = True
        for intake in intakes:
            intake.begin()
            self._take_rest(intake)
            self._launch(intake)
        self._land(0)
        self._pool.clear()
        self.late.clear()
        self.unsynced = False

    def abandon(self) -> None:
        """Forget a step that failed."""
        self._state = None
        self._flights.clear()
        self._pool.clear()
        self.clear()

    def clear(self) -> None:
        """A step is through."""
        self.late.clear()
        self.unsynced = False
        for intake in self.intakes:
            intake.clear()
            for parameter in intake.holding.parameters:
                parameter.grad = None

    def agree(self, order: Sequence[int]) -> None:
        """Start reductions in this order from now on."""
        self.order = [self.intakes[number] for number in order]

    # -- a gradient ------------------------------------------------------------------------------

    def _hook(self, number: int, intake: Intake, k: int) -> Callable[[Parameter], None]:
        def arrived(parameter: Parameter) -> None:
            if self._state == "take":
                self._take(intake, k, parameter)
                if intake.ready and not intake.launched:
                    if self.backwards == 0 and number not in self.finished:
                        self.finished.append(number)
                    self._advance()
            elif self._state is None:
                raise RequestError(
                    "a backward reached the parameter past the engine",
                    where=intake.holding.flat.entries[k].name,
                    hint="call engine.backward(loss) instead of loss.backward()",
                )

        return arrived

    def _take(self, intake: Intake, k: int, parameter: Parameter) -> None:
        gradient = parameter.grad
        assert gradient is not None
        intake.seen[k] = 1
        if intake.launched:
            self.late.add(intake)
            return
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if not intake.views and self._goes_as_it_is(intake, gradient):
            intake.buffer, intake.lent = gradient.detach().view(-1), True
            intake.views = intake.holding.views(intake.buffer)
            self._arrive(intake, k)
        else:
            self._put(intake, k, gradient)
        parameter.grad = None
        if backward_number() != self._outer:
            intake.held |= intake.usage.tied or intake.usage.ran != 1

    @torch.no_grad()
    def _put(self, intake: Intake, k: int, gradient: Tensor) -> None:
        """Put a gradient in its place in the send buffer, or add it to what is there."""
        if not intake.views:
            self._open(intake)
        if intake.arrived[k]:
            intake.views[k].add_(gradient)
            return
        if intake.buffer is None:
            intake.views[k] = gradient.detach()
        else:
            intake.views[k].copy_(gradient)
        self._arrive(intake, k)

    def _arrive(self, intake: Intake, k: int) -> None:
        intake.arrived[k] = 1
        intake.missing -= intake.ever[k]

    def _take_rest(self, intake: Intake) -> None:
        self.late.discard(intake)
        for k, parameter in enumerate(intake.holding.parameters):
            if parameter.grad is not None:
                self._outer = backward_number()
                self._take(intake, k, parameter)

    def _goes_as_it_is(self, intake: Intake, gradient: Tensor) -> bool:
        """Whether a gradient is all of its flat, so that it can be sent from where it lies."""
        holding = intake.holding
        alone = len(holding.parameters) == 1 and gradient.numel() == holding.bounds[-1]
        whole = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.itemsize
        fits = gradient.dtype == holding.dtype and gradient.is_contiguous() and whole
        return alone and fits and not self._stays(intake)

    # -- a reduction -----------------------------------------------------------------------------

    def _open(self, intake: Intake) -> None:
        """Give an intake a send buffer, a used one if there is one."""
        if self._stays_loose(intake):
            intake.views = list(intake.holding.parameters)  # in their places come gradients
            return
        if all(any(flight.intake.arrived) for flight in self._flights):  # see _advance
            self._land(IN_FLIGHT - 1)  # its send buffer is wanted
        size, dtype = intake.holding.bounds[-1], intake.holding.dtype
        fitting = [b for b in self._pool if b.numel() >= size and b.dtype == dtype]
        if self._stays(intake):
            best = intake.out()
        elif fitting:
            best = min(fitting, key=Tensor.numel)
            self._pool = [b for b in self._pool if b is not best]
        else:
            best = torch.empty(size, dtype=dtype, device=intake.holding.whole.device)
        intake.buffer = best
        intake.views = intake.holding.views(best)

    def _stays(self, intake: Intake) -> bool:
        """Whether nothing is sent, so that what one rank takes is the sum already."""
        return self.transport.size == 1 and intake.dtype == intake.holding.dtype

    def _stays_loose(self, intake: Intake) -> bool:
        """Whether it may be the only micro-batch of the step, so that nothing is summed."""
        begun = len(intake.counter) or intake.extra is not None
        return self._stays(intake) and self.combine is None and not begun and not self._partial

    def _advance(self) -> None:
        while self._head < len(self.order) and self.order[self._head].ready:
            intake = self.order[self._head]
            if len(self._flights) >= IN_FLIGHT and self._skipping(intake):
                # The others may have to compute what is skipped here, with our slices: who waited
                # for them now, before the end of the pass, could wait for ever.
                return
            self._launch(intake)
            self._head += 1

    def _skipping(self, intake: Intake) -> bool:
        """Whether this rank has nothing to add to a reduction that it would wait for, or start."""
        under_way = [flight.intake for flight in self._flights]
        return not all(any(one.arrived) for one in [intake, *under_way])

    def _launch(self, intake: Intake) -> None:
        assert not intake.launched
        self._land(IN_FLIGHT - 1)
        if not intake.views:
            self._open(intake)
        if intake.buffer is None:
            pairs = zip(intake.views, intake.arrived, strict=True)
            intake.loose = Loose(intake.holding, [g if a else None for g, a in pairs])
            intake.launched, intake.views = True, []
            return
        assert intake.buffer is not None
        for k, view in enumerate(intake.views):
            if not intake.arrived[k]:
                view.zero_()
        holding = intake.holding
        for low, high in holding.gaps:
            intake.buffer[low:high].zero_()
        out = intake.buffer if self._stays(intake) else intake.out()
        send = intake.buffer[: holding.bounds[-1]]
        pending = self.transport.reduce(send, holding.bounds, out, holding.flat.name)
        intake.launched = True
        self._flights.append(_Flight(intake, pending, out))

    def _land(self, left: int) -> None:
        """Wait for the oldest reductions until so many are left."""
        while len(self._flights) > left:
            intake, pending, out = self._flights.popleft()
            pending.wait()
            if self.combine is not None:
                self.combine(out, intake.holding.flat.name)
            intake.add(out, partial=self._partial)
            assert intake.buffer is not None
            if out is not intake.buffer and not intake.lent:
                self._pool.append(intake.buffer)
            intake.buffer, intake.views, intake.lent = None, [], False
            self._trim()

    def _trim(self) -> None:
        """Let go of send buffers that no intake of this backward will ask for."""
        wanted = sum(not one.launched and one.buffer is None for one in self.order)
        del self._pool[wanted:]
