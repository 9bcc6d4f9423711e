"""How are the parts of all ranks summed, fast and in rank order?

The order is that of ``counter.py``. Parts are read where they arrived and never written; sums are
made block by block, so that what one addition writes is still in the cache for the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["RankSum"]

BLOCK = 1 << 17
"""Elements of a block: smaller ones cost more calls, larger ones leave the cache (measured)."""

SERIAL = (1 << 15) - 64
"""Elements that torch adds in one thread: others have better use for the computation beside."""


class RankSum:
    """Sums of one part a rank, with scratch that is kept between them.

    Parameters
    ----------
    ranks
        The number of parts, P.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._block = BLOCK if torch.get_num_threads() == 1 else SERIAL
        self._scratch: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    def into(self, out: Tensor, parts: Sequence[Tensor]) -> None:
        """Write the sum of P parts into `out`, in the type of `out`.

        Parameters
        ----------
        out
            Shape [n]; overlaps no part.
        parts
            P tensors of shape [n], of one type that `out` can hold.
        """
        assert len(parts) == self._ranks
        if self._ranks == 1:
            out.copy_(parts[0])
            return
        scratch = self._room(out)
        for start in range(0, out.numel(), self._block):
            end = min(start + self._block, out.numel())
            free = [room[: end - start] for room in scratch]
            _block(out[start:end], [part[start:end] for part in parts], free)

    def _room(self, out: Tensor) -> list[Tensor]:
        """A block for each height of the counter, in the type of `out`."""
        key = (out.dtype, out.device)
        if key not in self._scratch:
            heights = self._ranks.bit_length()
            self._scratch[key] = [out.new_empty(self._block) for _ in range(heights)]
        return self._scratch[key]


def _block(out: Tensor, parts: Sequence[Tensor], free: list[Tensor]) -> None:
    # The heights are the ones of the number of parts so far, as in `Counter`. A sum of one part is
    # the part itself; larger ones lie in `out` (from rank 0 on) or in scratch.
    sums: list[Tensor] = []
    own: list[bool] = []

    def add(right: Tensor, right_is_own: bool) -> Tensor:
        left = sums.pop()
        if own.pop():
            left.add_(right)
        else:
            home = free.pop() if sums else out
            if left.dtype == home.dtype:
                torch.add(left, right, out=home)
            else:
                home.copy_(left).add_(right)
            left = home
        if right_is_own:
            free.append(right)
        return left

    for count, part in enumerate(parts):
        total, is_own = part, False
        carry = count
        while carry & 1:
            total, is_own = add(total, is_own), True
            carry >>= 1
        sums.append(total)
        own.append(is_own)
    total, is_own = sums.pop(), own.pop()
    while sums:
        total, is_own = add(total, is_own), True
