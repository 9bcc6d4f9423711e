"""What does autograd keep of a parameter that will be released?

A handle: which unit, and which view of its flat. When backward opens it, the unit is gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reshard.engine.holding import Holding
from reshard.engine.inner import identity, storage_identity
from reshard.engine.residency import Residency, Resident


@dataclass(frozen=True, slots=True, eq=False)
class _Handle:
    resident: Resident
    holding: Holding
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Handles:
    """Hooks for what autograd saves.

    Parameters
    ----------
    residency
        What brings units back.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._of = {
            identity(holding.storage): (resident, holding)
            for resident in residency.residents
            for holding in resident.holdings
        }

    def pack(self, value: Tensor) -> Any:
        """Keep a handle of what lies in a flat, and everything else as it is."""
        if value.layout is not torch.strided:
            return value
        found = self._of.get(storage_identity(value))
        if found is None or value.dtype != found[1].dtype:
            return value
        return _Handle(*found, value.size(), value.stride(), int(value.storage_offset()))

    def unpack(self, kept: Any) -> Any:
        """Give the value back, gathered."""
        if not isinstance(kept, _Handle):
            return kept
        self._residency.need(kept.resident)
        return kept.holding.whole.as_strided(kept.size, kept.stride, kept.offset)
