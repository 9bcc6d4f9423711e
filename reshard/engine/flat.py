"""How do a unit's parameters lie, and which run is mine?

A flat is the partition ``contiguous`` of the core: entries end to end, each beginning at a
multiple of :data:`ALIGN` elements, and the whole padded so that P equal slices of whole
multiples fill it. Rank i owns ``[i*N/P, (i+1)*N/P)`` of the padded length N. Aligned entries give
kernels the addresses that a fresh tensor has; aligned cuts leave vector tails where they are in
a whole parameter; equal slices are what collectives are fastest with.

Nothing here has a tensor: names and shapes are enough, for any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from reshard.partition import Contiguous

ALIGN = 16
"""Elements: 64 bytes of fp32, which is how torch aligns a tensor of its own."""


def aligned(count: int) -> int:
    """The next multiple of :data:`ALIGN`."""
    return -(-count // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class Entry:
    """A parameter in its flat.

    Parameters
    ----------
    name
        As ``named_parameters`` says it (the first name, where it is tied).
    shape
        Its shape.
    offset
        The element of the flat that it begins at.
    group
        The number of its parameter group.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    group: int

    def __post_init__(self) -> None:
        assert self.offset % ALIGN == 0 and self.group >= 0, self

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """One past its last element in the flat."""
        return self.offset + self.numel


@dataclass(frozen=True, slots=True)
class Piece:
    """The run of one parameter that lies in a slice.

    Parameters
    ----------
    entry
        The position of the parameter in the flat.
    low, high
        The run, in elements of the slice.
    start
        The element of the parameter that the run begins at.
    """

    entry: int
    low: int
    high: int
    start: int


@dataclass(frozen=True, slots=True)
class Flat:
    """Parameters of a unit that share an element type and are all trained or all frozen.

    Parameters
    ----------
    name
        The unit's name, the element type, and ``frozen`` where it is.
    entries
        The parameters, in order.
    dtype
        The element type of the parameters, as torch says it without its prefix: ``float32``.
    trained
        Whether they get gradients.
    """

    name: str
    entries: tuple[Entry, ...]
    dtype: str
    trained: bool
    numel: int = field(init=False)

    def __post_init__(self) -> None:
        at = 0
        for entry in self.entries:
            assert entry.offset == at, (self.name, entry, at)
            at += aligned(entry.numel)
        object.__setattr__(self, "numel", at)

    def part(self, P: int) -> int:
        """The elements of a slice, padding included."""
        return aligned(-(-self.numel // P))

    def size(self, P: int) -> int:
        """The elements of the whole flat, padding included: P slices."""
        return P * self.part(P)

    def bounds(self, P: int) -> tuple[int, ...]:
        """The P + 1 positions between which the slices lie."""
        part = self.part(P)
        return tuple(i * part for i in range(P + 1))

    def partition(self, P: int) -> Contiguous:
        """The core's rule for the same cut."""
        return Contiguous(P, align=ALIGN, multiple=ALIGN)

    def pieces(self, rank: int, P: int) -> tuple[Piece, ...]:
        """What rank ``rank`` of ``P`` owns of each parameter; empty runs are left out."""
        part = self.part(P)
        low, high = rank * part, (rank + 1) * part
        found: list[Piece] = []
        for number, entry in enumerate(self.entries):
            first, last = max(entry.offset, low), min(entry.end, high)
            if first < last:
                found.append(Piece(number, first - low, last - low, first - entry.offset))
        return tuple(found)

    def gaps(self, P: int) -> tuple[tuple[int, int], ...]:
        """The runs of padding."""
        ends = [0, *(entry.end for entry in self.entries)]
        starts = [*(entry.offset for entry in self.entries), self.size(P)]
        return tuple((a, b) for a, b in zip(ends, starts, strict=True) if a < b)


def lay(
    name: str,
    parameters: Sequence[tuple[str, tuple[int, ...], int]],
    dtype: str,
    trained: bool,
) -> Flat:
    """Lay parameters, each a (name, shape, group), end to end in the order of their groups."""
    entries: list[Entry] = []
    at = 0
    for parameter, shape, group in sorted(parameters, key=lambda p: p[2]):
        entries.append(Entry(parameter, tuple(shape), at, group))
        at += aligned(entries[-1].numel)
    return Flat(name, tuple(entries), dtype, trained)
