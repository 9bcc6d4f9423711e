"""How much travels, and for what? A transport that counts what another one carries.

Counted are logical bytes: what the definition of an operation makes this rank send. A rank sends
its slice to P - 1 others in a gather, and every other rank's run in a reduce; over all ranks that
is N(P-1) elements each, N(P-1)/P a rank on average.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from reshard.engine.transport import Op, Pending, Transport

__all__ = ["Counting", "Tally"]


@dataclass(frozen=True, slots=True)
class Tally:
    """Calls of one kind about one thing, and the bytes that this rank sent in them."""

    calls: int = 0
    sent: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.calls + other.calls, self.sent + other.sent)


class Counting:
    """A transport that carries everything over another one.

    Parameters
    ----------
    inner
        The transport that does it.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.size = inner.size
        self._tallies: dict[tuple[str, str], Tally] = {}

    @property
    def tallies(self) -> Mapping[tuple[str, str], Tally]:
        """What was counted, by kind (``gather``, ``reduce``, ``agree``, ``exchange``) and label."""
        return dict(self._tallies)

    def total(self, kind: str | None = None) -> Tally:
        """The sum over all labels, of one kind or of all."""
        chosen = (t for (k, _), t in self._tallies.items() if kind in (None, k))
        return sum(chosen, Tally())

    def reset(self) -> None:
        """Begin again at nothing."""
        self._tallies.clear()

    def gather(self, flat: Tensor, bounds: Sequence[int], label: str) -> Pending:
        """Count a gather."""
        own = bounds[self.rank + 1] - bounds[self.rank]
        self._count("gather", label, own * (self.size - 1) * flat.element_size())
        return self.inner.gather(flat, bounds, label)

    def reduce(self, flat: Tensor, bounds: Sequence[int], out: Tensor, label: str) -> Pending:
        """Count a reduce."""
        own = bounds[self.rank + 1] - bounds[self.rank]
        self._count("reduce", label, (bounds[-1] - own) * flat.element_size())
        return self.inner.reduce(flat, bounds, out, label)

    def agree(self, values: Tensor, op: Op, label: str) -> Tensor:
        """Count an agreement."""
        self._count("agree", label, values.numel() * values.element_size() * (self.size - 1))
        return self.inner.agree(values, op, label)

    def exchange(self, data: Any, label: str) -> list[Any]:
        """Count an exchange; its bytes are few and left out."""
        self._count("exchange", label, 0)
        return self.inner.exchange(data, label)

    def fail(self, error: BaseException) -> None:
        """Pass it on."""
        self.inner.fail(error)

    def rest(self) -> None:
        """Pass it on."""
        self.inner.rest()

    def close(self) -> None:
        """Close the inner transport."""
        self.inner.close()

    def retire(self) -> None:
        """Pass it on."""
        self.inner.retire()

    def _count(self, kind: str, label: str, sent: int) -> None:
        self._tallies[kind, label] = self._tallies.get((kind, label), Tally()) + Tally(1, sent)
