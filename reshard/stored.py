"""What stands for a torch tensor inside a file, before any of its payload is read?

A :class:`StoredTensor` says where its elements lie in a storage, and a :class:`StorageRef` names
that storage. Both are checked when they are made: a tensor that doesn't lie inside its storage
can't exist. The rules are those of ``torch._utils._rebuild_tensor_v2`` and ``_v3`` (torch 2.13).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from reshard.dtypes import BY_TORCH
from reshard.errors import CorruptError, UnsupportedError

#: The storage class that torch writes for a dtype; the dtypes that aren't here have none and
#: lie in an ``UntypedStorage`` (torch 2.13, ``torch.storage._dtype_to_storage_type_map``).
STORAGE_CLASS: Final[Mapping[str, str]] = {
    "bool": "BoolStorage",
    "int8": "CharStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "uint8": "ByteStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}

#: How torch writes a device.
DEVICE: Final = re.compile(r"[a-z][a-z0-9_]*(?::[0-9]{1,9})?")
_MAX_NDIM: Final = 64


def brief(value: object) -> str:
    """Show a value of a file in a message: short, and without walking over what is inside it."""
    if isinstance(value, str | bytes):
        return repr(value[:60])
    if isinstance(value, int | float | None) and abs(value or 0) < 1 << 70:
        return repr(value)
    if isinstance(value, list | tuple | dict):
        return f"<{type(value).__name__} of {len(value)}>"
    return f"<{getattr(value, 'qualname', type(value).__name__)}>"


def item_bytes(name: str) -> int:
    """Bytes of one element of a torch dtype, by its name (a key of ``dtypes.BY_TORCH``)."""
    return BY_TORCH[name].itemsize


def contiguous_strides(shape: Iterable[int]) -> tuple[int, ...]:
    """Give the strides, in elements, of a row-major tensor, as torch counts them."""
    strides: list[int] = []
    step = 1
    for size in reversed(tuple(shape)):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class DTypeName(str):
    """A ``torch.<dtype>`` that stood in a pickle: its name, for example ``"bfloat16"``."""

    __slots__ = ()


class Size(tuple[int, ...]):
    """A ``torch.Size``: a tuple of ints that is written back as a ``torch.Size``."""

    __slots__ = ()


class Device(str):
    """A ``torch.device``: its text, for example ``"cuda:0"``."""

    __slots__ = ()


def _is(kind: type, value: object) -> bool:
    """Whether a value that a pickle gave has the type that it should have."""
    return isinstance(value, kind)


@dataclass(frozen=True, slots=True)
class StorageRef:
    """One storage: a run of bytes that tensors are views of.

    Parameters
    ----------
    key
        Its name in the archive: its bytes are the member ``data/<key>``.
    dtype
        The element type; ``"uint8"`` for an untyped storage.
    numel
        Number of elements of that type.
    device
        Where it lived when it was saved, for example ``"cuda:0"``.

    Raises
    ------
    UnsupportedError
        A dtype that isn't in :data:`reshard.dtypes.BY_TORCH`.
    CorruptError
        A negative size, or a field that isn't of its type.
    """

    key: str
    dtype: str
    numel: int
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not (_is(str, self.key) and _is(str, self.device)):
            raise CorruptError(f"storage {brief(self.key)} on {brief(self.device)}: not text")
        if not _is(str, self.dtype) or self.dtype not in BY_TORCH:
            raise UnsupportedError(f"storage {brief(self.key)} has the dtype {brief(self.dtype)}")
        if type(self.numel) is not int or self.numel < 0:
            raise CorruptError(f"storage {brief(self.key)} has {brief(self.numel)} elements")

    def __reduce__(self) -> tuple[object, ...]:
        return StorageRef, (self.key, self.dtype, self.numel, self.device)

    def __setstate__(self, state: object) -> None:
        raise CorruptError("a pickle tries to change a storage after it was made")

    @property
    def nbytes(self) -> int:
        """Bytes of the whole storage."""
        return self.numel * item_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that lies in a storage of a file; none of its payload is read.

    Parameters
    ----------
    storage
        The storage that it is a view of.
    offset
        Its first element, counted in elements of ``dtype`` from the storage's start.
    shape
        Sizes of its dims.
    strides
        Steps between neighbours of each dim, in elements.
    dtype
        A name in :data:`reshard.dtypes.BY_TORCH`.
    requires_grad
        As saved.

    Raises
    ------
    CorruptError
        It doesn't lie inside its storage, or a field isn't a whole number from 0.
    UnsupportedError
        A dtype that isn't in :data:`reshard.dtypes.BY_TORCH`, or more than 64 dims.
    """

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    requires_grad: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.storage, StorageRef):
            raise CorruptError(f"a tensor lies in {brief(self.storage)}, not in a storage")
        if not _is(str, self.dtype) or self.dtype not in BY_TORCH:
            raise UnsupportedError(f"{self._place} has the dtype {brief(self.dtype)}")
        if not (_is(tuple, self.shape) and _is(tuple, self.strides)):
            raise CorruptError(f"the shape or strides of {self._place} aren't tuples")
        if len(self.shape) != len(self.strides):
            raise CorruptError(
                f"{self._place} has {len(self.shape)} dims but {len(self.strides)} strides"
            )
        if len(self.shape) > _MAX_NDIM:
            raise UnsupportedError(f"{self._place} has {len(self.shape)} dims, over {_MAX_NDIM}")
        if type(self.requires_grad) is not bool:
            raise CorruptError(f"requires_grad of {self._place} is {brief(self.requires_grad)}")
        counts = (self.offset, *self.shape, *self.strides)
        if {*map(type, counts)} != {int} or min(counts) < 0:
            raise CorruptError(
                f"{self._place} has offset, shape and strides"
                f" {', '.join(map(brief, counts))}: not all are whole numbers from 0"
            )
        end = self.end * item_bytes(self.dtype)
        if end > self.storage.nbytes and self.numel:
            raise CorruptError(
                f"{self._place} ends at byte {end}, past the {self.storage.nbytes} bytes there"
            )

    @property
    def _place(self) -> str:
        return f"a tensor in storage {brief(self.storage.key)}"

    def __reduce__(self) -> tuple[object, ...]:
        parts = (self.storage, self.offset, self.shape, self.strides)
        return StoredTensor, (*parts, self.dtype, self.requires_grad)

    def __setstate__(self, state: object) -> None:
        raise CorruptError("a pickle tries to change a tensor after it was made")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, packed."""
        return self.numel * item_bytes(self.dtype)

    @property
    def end(self) -> int:
        """One past its last element, counted from the storage's start (its offset if empty)."""
        if self.numel == 0:
            return self.offset
        steps = zip(self.shape, self.strides, strict=True)
        return self.offset + sum((size - 1) * stride for size, stride in steps) + 1

    @property
    def contiguous(self) -> bool:
        """Whether its elements lie one after the other, row-major, without holes."""
        return self.numel == 0 or all(
            size == 1 or stride == packed
            for size, stride, packed in zip(
                self.shape, self.strides, contiguous_strides(self.shape), strict=True
            )
        )

    @classmethod
    def whole(cls, key: str, dtype: str, shape: Iterable[int]) -> StoredTensor:
        """Make a row-major tensor that fills the storage ``key``."""
        sizes = tuple(shape)
        storage = StorageRef(key, dtype, math.prod(sizes))
        return cls(storage, 0, sizes, contiguous_strides(sizes), dtype)
