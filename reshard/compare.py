"""By how much do the elements of two tensors differ, and where?

Both are read some elements at a time, so that memory doesn't grow with the tensors. Differences
are taken in float64 (complex128), which holds every floating-point type up to itself exactly;
those of integers of one type are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.box import Box
from reshard.pairs import Pair
from reshard.read import Reader

BYTES_AN_ELEMENT = 256
"""What an element needs at most while it is compared: two values and what is made of them."""

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far apart elements may be: ``|a - b| <= atol + rtol * |b|``.

    Parameters
    ----------
    rtol, atol
        Relative and absolute; with both 0 elements must be the same bits.
    """

    rtol: float = 0.0
    atol: float = 0.0

    def __post_init__(self) -> None:
        assert self.rtol >= 0, self.rtol
        assert self.atol >= 0, self.atol

    @property
    def exact(self) -> bool:
        """Whether nothing is tolerated."""
        return self.rtol == 0 and self.atol == 0


@dataclass(frozen=True, slots=True)
class Gap:
    """How the elements of two tensors of one shape differ.

    Parameters
    ----------
    numel
        Elements of each.
    differ
        How many aren't the same (bits, for one element type; else values).
    outside
        How many are farther apart than is tolerated.
    max_abs, max_abs_at, a, b
        The largest absolute difference, where it is, and both values there. A NaN against a
        number is infinitely far.
    max_rel, max_rel_at
        The largest ``|a - b| / |b|``, and where.
    """

    numel: int
    differ: int
    outside: int
    max_abs: float
    max_abs_at: Index | None
    a: float | complex | None
    b: float | complex | None
    max_rel: float
    max_rel_at: Index | None


def gap(
    reader_a: Reader, reader_b: Reader, pair: Pair, tolerance: Tolerance, max_memory: int
) -> Gap | None:
    """Compare two tensors element by element.

    Parameters
    ----------
    reader_a, reader_b
        They read the two checkpoints.
    pair
        The tensors.
    tolerance
        What counts as close.
    max_memory
        Bytes that this may take.

    Returns
    -------
    Gap or None
        ``None`` if their shapes differ, or a type is narrower than a byte.
    """
    a, b = pair.a, pair.b
    if a.shape != b.shape or a.dtype.bits % 8 or b.dtype.bits % 8:
        return None
    most = max(1024, max_memory // BYTES_AN_ELEMENT)
    found = _Found(tolerance)
    whole = Box.whole(a.shape)
    for start in range(0, a.numel, most):
        for _, box in whole.split(start, min(a.numel, start + most)):
            found.add(reader_a.region(a, box), reader_b.region(b, box), box)
    return found.gap(a.numel)


class _Found:
    """What has been found so far."""

    def __init__(self, tolerance: Tolerance) -> None:
        self._tolerance = tolerance
        self._differ = self._outside = 0
        self._abs: tuple[float, Index | None, Any, Any] = (0.0, None, None, None)
        self._rel: tuple[float, Index | None] = (0.0, None)

    def add(self, a: NDArray[Any], b: NDArray[Any], box: Box) -> None:
        """Compare a region."""
        unequal = _unequal(a, b)
        if not unequal.any():
            return
        at = np.flatnonzero(unequal)
        some_a, some_b = a.reshape(-1)[at], b.reshape(-1)[at]
        distance, size = _distance(some_a, some_b)
        self._differ += len(at)
        if self._tolerance.exact:
            self._outside += len(at)
        else:
            limit = self._tolerance.atol + self._tolerance.rtol * size
            self._outside += int(np.count_nonzero(~(distance <= limit)))
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            relative = np.where(distance == 0, 0.0, distance / size)
        relative[np.isnan(relative)] = np.inf
        row = int(distance.argmax())
        if self._abs[1] is None or distance[row] > self._abs[0]:
            where = _index(int(at[row]), box)
            self._abs = (float(distance[row]), where, _value(some_a[row]), _value(some_b[row]))
        row = int(relative.argmax())
        if self._rel[1] is None or relative[row] > self._rel[0]:
            self._rel = (float(relative[row]), _index(int(at[row]), box))

    def gap(self, numel: int) -> Gap:
        """All of it."""
        return Gap(numel, self._differ, self._outside, *self._abs, *self._rel)


def _unequal(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    """Where elements aren't the same, flat: bits of one type, else values (NaN is NaN)."""
    flat_a, flat_b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
    if flat_a.dtype == flat_b.dtype:
        width = flat_a.dtype.itemsize
        bytes_a, bytes_b = (f.view(np.uint8).reshape(-1, width) for f in (flat_a, flat_b))
        unequal: NDArray[np.bool_] = (bytes_a != bytes_b).any(axis=1)
        return unequal
    wide_a, wide_b = _wide(flat_a), _wide(flat_b)
    found: NDArray[np.bool_] = (wide_a != wide_b) & ~(np.isnan(wide_a) & np.isnan(wide_b))
    return found


def _distance(a: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """``|a - b|`` and ``|b|``."""
    if a.dtype == b.dtype and a.dtype.kind in "iu":
        unsigned = np.dtype(f"u{a.dtype.itemsize}")
        high, low = np.maximum(a, b).view(unsigned), np.minimum(a, b).view(unsigned)
        return (high - low).astype(np.float64), np.abs(b.astype(np.float64))
    wide_a, wide_b = _wide(a), _wide(b)
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(wide_a - wide_b)
    distance[(wide_a == wide_b) | (np.isnan(wide_a) & np.isnan(wide_b))] = 0.0
    distance[np.isnan(distance)] = np.inf
    return distance, np.abs(wide_b)


def _wide(values: NDArray[Any]) -> NDArray[Any]:
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


def _value(value: Any) -> float | complex:
    return complex(value) if np.iscomplexobj(value) else float(value)


def _index(flat: int, box: Box) -> Index:
    inside = np.unravel_index(flat, box.shape) if box.shape else ()
    return tuple(int(i) + o for i, o in zip(inside, box.start, strict=True))
