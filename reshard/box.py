"""What is a region of a tensor, and how does a run of its elements look inside another region?

A **box** is a half-open region of a tensor's index space; a **run** a half-open interval of a
box's row-major elements. Everything that moves is a run of a box; where two boxes of one tensor
differ (a tensor-parallel cut, a device mesh, a chunk grid), their common elements are again
boxes, and this module finds them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import ge, le, sub

Shape = tuple[int, ...]


def strides_of(shape: Shape) -> Shape:
    """Row-major strides of ``shape``, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open region ``[start, stop)`` of an index space, one pair a dim.

    Parameters
    ----------
    start, stop
        Same length; ``0 <= start <= stop`` in each dim.
    """

    start: Shape
    stop: Shape

    def __post_init__(self) -> None:
        assert len(self.start) == len(self.stop), (self.start, self.stop)
        assert min(self.start, default=0) >= 0, (self.start, self.stop)
        assert all(map(le, self.start, self.stop)), (self.start, self.stop)

    @classmethod
    def whole(cls, shape: Shape) -> Box:
        """The box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> Shape:
        """Sizes of the box."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def numel(self) -> int:
        """Elements in the box (1 for a 0-d tensor)."""
        return math.prod(map(sub, self.stop, self.start))

    def within(self, shape: Shape) -> bool:
        """Whether the box lies inside a tensor of that shape."""
        return len(shape) == len(self.stop) and all(map(le, self.stop, shape))

    def covers(self, shape: Shape) -> bool:
        """Whether the box is the whole of a tensor of that shape."""
        return self.stop == tuple(shape) and not any(self.start)

    def intersect(self, other: Box) -> Box | None:
        """The common region, or ``None`` where there is none."""
        assert len(self.start) == len(other.start), (self, other)
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(map(ge, start, stop)):
            return None
        return Box(start, stop)

    def contiguous_in(self, shape: Shape) -> bool:
        """Whether the box's elements are one row-major run of a tensor of that shape."""
        sizes, first = self.shape, 0
        assert len(sizes) == len(shape), (self, shape)
        while first < len(sizes) and sizes[first] == 1:
            first += 1
        return sizes[first + 1 :] == tuple(shape[first + 1 :])

    def offset_in(self, shape: Shape) -> int:
        """Row-major index of the box's first element in a tensor of that shape."""
        return sum(a * s for a, s in zip(self.start, strides_of(shape), strict=True))

    def split(self, start: int, stop: int) -> Iterator[tuple[int, Box]]:
        """Cut the run ``[start, stop)`` of this box into boxes, in order.

        A run of a box of n dims is at most 2n - 1 boxes: a head, a middle and a tail in each dim.

        Yields
        ------
        offset, box
            The first element's row-major index in this box, and the region (in the coordinates
            of the tensor).
        """
        for at, low, high in _split(self.shape, start, stop):
            yield (
                at,
                Box(
                    tuple(o + a for o, a in zip(self.start, low, strict=True)),
                    tuple(o + b for o, b in zip(self.start, high, strict=True)),
                ),
            )


def _split(shape: Shape, start: int, stop: int) -> Iterator[tuple[int, Shape, Shape]]:
    if start >= stop:
        return
    if not shape:
        yield 0, (), ()
        return
    row = math.prod(shape[1:])
    first, first_at = divmod(start, row)
    last, last_to = divmod(stop, row)
    inner = shape[1:]
    if first == last:
        yield from _row(first, row, inner, first_at, last_to)
        return
    if first_at:
        yield from _row(first, row, inner, first_at, row)
        first += 1
    if first < last:
        yield first * row, (first, *(0,) * len(inner)), (last, *inner)
    if last_to:
        yield from _row(last, row, inner, 0, last_to)


def _row(
    index: int, row: int, inner: Shape, start: int, stop: int
) -> Iterator[tuple[int, Shape, Shape]]:
    for at, low, high in _split(inner, start, stop):
        yield index * row + at, (index, *low), (index + 1, *high)
