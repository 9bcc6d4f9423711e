"""What has come of a flat's gradients, in this backward and in this step?"""

from __future__ import annotations

import torch
from torch import Tensor

from reshard.engine.counter import Counter
from reshard.engine.holding import Holding
from reshard.engine.loose import Loose


class Usage:
    """How a unit was used since the last backward."""

    __slots__ = ("ran", "tied")

    def __init__(self, tied: bool) -> None:
        self.ran = 0
        self.tied = tied


class Intake:
    """The gradients of one flat on their way.

    Parameters
    ----------
    holding
        The flat's tensors.
    usage
        Of its unit.
    dtype
        The type that gradients are summed in.
    whole
        Whether the sum is kept whole (stages 0 and 1) or as this rank's slice.
    """

    __slots__ = (
        "arrived",
        "buffer",
        "counter",
        "dtype",
        "ever",
        "external",
        "extra",
        "held",
        "holding",
        "keep_whole",
        "launched",
        "lent",
        "loose",
        "missing",
        "seen",
        "skippable",
        "usage",
        "views",
        "whole",
    )  # fmt: skip

    def __init__(self, holding: Holding, usage: Usage, dtype: torch.dtype, whole: bool) -> None:
        self.holding, self.usage, self.dtype, self.keep_whole = holding, usage, dtype, whole
        count = len(holding.parameters)
        self.ever = bytearray(b"\1" * count)  # expected; until something is known, all
        self.seen = bytearray(count)  # had a gradient in this step
        self.skippable = self.external = False
        self.counter = Counter()
        self.extra: Tensor | None = None  # a sum that belongs to the next one
        self.whole: Tensor | None = None
        self.loose: Loose | None = None  # the only micro-batch's gradients, on one rank
        self.buffer: Tensor | None = None
        self.lent = False  # the buffer is a gradient itself
        self.views: list[Tensor] = []
        self.begin()

    def begin(self) -> None:
        """A backward begins."""
        if self.loose is not None:  # it wasn't the only one
            loose, self.loose = self.loose, None
            self.counter.push(loose.into(self.out()))
        self.arrived = bytearray(len(self.ever))
        self.missing = sum(self.ever)
        self.launched = self.held = False

    @property
    def ready(self) -> bool:
        """Whether it needn't wait for more in this backward."""
        if self.held:
            return False
        if self.missing == 0:
            return True
        idle = self.skippable and not self.external and not self.usage.ran
        return idle and not any(self.arrived)

    def learn(self, first: bool) -> None:
        """A backward ends: remember what to wait for."""
        if any(self.arrived):
            self.external |= not self.usage.ran
            if first:
                self.ever = bytearray(len(self.ever))
            self.ever = bytearray(a | b for a, b in zip(self.ever, self.arrived, strict=True))
        elif not self.usage.ran:
            self.skippable = True
        elif first:
            self.ever = bytearray(len(self.ever))

    def out(self) -> Tensor:
        """Where the next sum of this rank's run goes."""
        holding = self.holding
        device = holding.whole.device
        if self.keep_whole and self.whole is None:
            self.whole = torch.empty(holding.bounds[-1], dtype=self.dtype, device=device)
            return self.whole[holding.low : holding.high]
        return torch.empty(holding.high - holding.low, dtype=self.dtype, device=device)

    def add(self, total: Tensor, *, partial: bool) -> None:
        """Take a sum over ranks: a micro-batch's, or only a part of it."""
        if self.extra is not None:
            total, self.extra = self.extra.add_(total), None
        if partial:
            self.extra = total
        else:
            self.counter.push(total)

    def total(self) -> Tensor | Loose:
        """The sum over the step in this rank's run; the intake is empty afterwards."""
        if self.loose is not None:
            return self.loose
        total = self.extra if not len(self.counter) else self.counter.total()
        assert total is not None, self.holding.flat.name
        if self.extra is not None and total is not self.extra:
            total.add_(self.extra)
        self.extra = None
        return total

    def clear(self) -> None:
        """Forget the step."""
        self.counter, self.extra, self.whole, self.buffer = Counter(), None, None, None
        self.loose, self.views, self.lent = None, [], False
        self.seen = bytearray(len(self.seen))
