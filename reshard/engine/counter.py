"""In which order are gradients summed?

Pairwise, as a binary counter does: a sum of two equal heights is carried, left + right. The order
depends on the number of terms alone, so that a sum over ranks followed by one over micro-batches
is the sum that one process builds over all of them (for a power of two of ranks).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Counter:
    """A sum that grows term by term.

    The left term of an addition takes the sum in place, so that the first tensor that was pushed
    is the one that :meth:`total` returns: give tensors that may be written.
    """

    __slots__ = ("_count", "_sums")

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._count = 0

    def __len__(self) -> int:
        """How many terms were pushed."""
        return self._count

    def push(self, term: Tensor) -> None:
        """Add a term. Heights are the positions of the ones in the number of terms."""
        carry = self._count
        while carry & 1:
            left = self._sums.pop()
            term = left.add_(term)
            carry >>= 1
        self._sums.append(term)
        self._count += 1

    def total(self) -> Tensor:
        """The sum of all terms; the smallest sums first where they aren't a power of two."""
        assert self._sums, "nothing was pushed"
        total = self._sums.pop()
        while self._sums:
            total = self._sums.pop().add_(total)
        self._count = 0
        return total


def pairwise_sum(terms: Iterable[Tensor]) -> Tensor:
    """Sum tensors in the counter's order, into the first of them."""
    counter = Counter()
    for term in terms:
        counter.push(term)
    return counter.total()
