"""Which element types are there, how wide are they, and how do other worlds spell them?

One table. A :class:`DType` is named as zarr and tensorstore name it; numpy's own types stand for
themselves and the rest (bfloat16, the 8-bit floats) come from ``ml_dtypes``. Types narrower than
a byte have no numpy type here: they are moved as bytes and never computed with.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from reshard.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    Parameters
    ----------
    name
        Canonical name, as in zarr and tensorstore: ``"float32"``, ``"bfloat16"``.
    bits
        Width of one element.
    safetensors
        The code in a safetensors header (its format's specification lists them).
    torch
        The attribute of the ``torch`` module, or ``None``.
    """

    name: str
    bits: int
    safetensors: str | None
    torch: str | None

    @property
    def itemsize(self) -> int:
        """Bytes of one element; an error of ours for types narrower than a byte."""
        assert self.bits % 8 == 0, f"{self.name} is narrower than a byte"
        return self.bits // 8

    def nbytes(self, count: int) -> int:
        """Bytes of ``count`` elements, which must fill whole bytes."""
        assert count * self.bits % 8 == 0, f"{count} x {self.name} doesn't fill whole bytes"
        return count * self.bits // 8

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy type, little-endian.

        Raises
        ------
        UnsupportedError
            For a type narrower than a byte.
        """
        if self.bits % 8:
            raise UnsupportedError(
                f"{self.name} has no numpy type",
                hint="it can be copied and consolidated, but not read as an array",
            )
        return _numpy(self.name)

    def __str__(self) -> str:
        return self.name


@cache
def _numpy(name: str) -> np.dtype[Any]:
    if name in _ML_DTYPES:
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found
    return np.dtype(name).newbyteorder("<")


_ML_DTYPES = frozenset(
    ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
     "float8_e8m0fnu")
)  # fmt: skip

_TABLE = (
    DType("bool", 8, "BOOL", "bool"),
    DType("uint8", 8, "U8", "uint8"),
    DType("int8", 8, "I8", "int8"),
    DType("uint16", 16, "U16", "uint16"),
    DType("int16", 16, "I16", "int16"),
    DType("uint32", 32, "U32", "uint32"),
    DType("int32", 32, "I32", "int32"),
    DType("uint64", 64, "U64", "uint64"),
    DType("int64", 64, "I64", "int64"),
    DType("float16", 16, "F16", "float16"),
    DType("bfloat16", 16, "BF16", "bfloat16"),
    DType("float32", 32, "F32", "float32"),
    DType("float64", 64, "F64", "float64"),
    DType("complex64", 64, "C64", "complex64"),
    DType("complex128", 128, None, "complex128"),
    DType("float8_e4m3fn", 8, "F8_E4M3", "float8_e4m3fn"),
    DType("float8_e5m2", 8, "F8_E5M2", "float8_e5m2"),
    DType("float8_e4m3fnuz", 8, "F8_E4M3FNUZ", "float8_e4m3fnuz"),
    DType("float8_e5m2fnuz", 8, "F8_E5M2FNUZ", "float8_e5m2fnuz"),
    DType("float8_e8m0fnu", 8, "F8_E8M0", "float8_e8m0fnu"),
    DType("float6_e2m3fn", 6, "F6_E2M3", None),
    DType("float6_e3m2fn", 6, "F6_E3M2", None),
    DType("float4_e2m1fn", 4, "F4", None),
)
BY_NAME = {d.name: d for d in _TABLE}
BY_SAFETENSORS = {d.safetensors: d for d in _TABLE if d.safetensors is not None}
BY_TORCH = {d.torch: d for d in _TABLE if d.torch is not None}

_SHORT = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32",
    "float": "float32", "fp64": "float64", "double": "float64",
}  # fmt: skip

FLOATS = frozenset(d.name for d in _TABLE if d.name.startswith(("float", "bfloat")))


def dtype(name: str) -> DType:
    """Find a type by its name, or by the short names that people use (``bf16``, ``fp32``).

    Raises
    ------
    UnsupportedError
        If there is no such type.
    """
    found = BY_NAME.get(_SHORT.get(name, name))
    if found is None:
        raise UnsupportedError(
            f"unknown element type {name!r}", hint="known types: " + ", ".join(BY_NAME)
        )
    return found


def from_numpy(of: np.dtype[Any]) -> DType:
    """Find the type of a numpy array's elements."""
    return dtype(of.name)
