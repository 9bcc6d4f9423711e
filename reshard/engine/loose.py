"""What of gradients that nobody else has to sum? On one rank they needn't even lie together.

The first micro-batch's gradients are kept as autograd made them. Should another one follow, they
are laid into a flat and summed as everywhere; if not, they are the step's gradient without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from reshard.engine.holding import Holding


class Loose:
    """A flat's gradients as tensors of their own.

    Parameters
    ----------
    holding
        The flat, all of which is this rank's.
    gradients
        One for each entry; ``None`` where there was none.
    """

    __slots__ = ("_entries", "_gradients")

    def __init__(self, holding: Holding, gradients: Sequence[Tensor | None]) -> None:
        self._entries = holding.flat.entries
        self._gradients = tuple(gradients)

    @property
    def tensors(self) -> list[Tensor]:
        """Those that there are."""
        return [gradient for gradient in self._gradients if gradient is not None]

    def __getitem__(self, run: slice) -> Tensor:
        """The gradient of the entry that lies at a run of the flat."""
        for entry, gradient in zip(self._entries, self._gradients, strict=True):
            if entry.offset == run.start and entry.numel:
                assert gradient is not None and entry.end == run.stop, entry
                return gradient.reshape(-1)
        raise AssertionError(run)

    def mul_(self, factor: float) -> None:
        """Multiply all of them."""
        for gradient in self.tensors:
            gradient.mul_(factor)

    @torch.no_grad()
    def into(self, flat: Tensor) -> Tensor:
        """Lay them into a flat, with zeros between."""
        flat.zero_()
        for entry, gradient in zip(self._entries, self._gradients, strict=True):
            if gradient is not None:
                flat[entry.offset : entry.end].copy_(gradient.reshape(-1))
        return flat
