"""How do tensors of ``torch.save`` files come into a manifest, and the other values with them?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from reshard.builder import Builder, Placed
from reshard.dtypes import dtype
from reshard.layout import CLIENT, Entry
from reshard.pickle_stubs import Record, StoredArray
from reshard.plain import LARGEST_ARRAY, LeftOut, TensorRef
from reshard.stored import Device, DTypeName, StoredTensor
from reshard.torchfile import TorchFile, read_tensor


def placed(builder: Builder, file: TorchFile, tensor: StoredTensor, entry: Entry) -> Placed:
    """A box of a tensor whose elements are all of a stored tensor, with its member's CRC."""
    extent = file.extent(tensor)
    index = builder.file(file.path)
    member = extent.member
    builder.region(index, member.offset, member.nbytes, member.crc32, member.name)
    kind = dtype(extent.dtype)
    strides = None if extent.contiguous else tuple(s // kind.itemsize for s in extent.strides)
    return Placed(entry, kind, index, extent.offset, strides)


class Values:
    """Turns values of a pickle into plain data; large tensors become client tensors.

    Parameters
    ----------
    builder
        Where notes and tensors go.
    file
        The file that the values come from.
    prefix
        What the names of tensors begin with.
    """

    def __init__(self, builder: Builder, file: TorchFile, prefix: str = "") -> None:
        self._builder = builder
        self._file = file
        self._prefix = prefix
        self.tensors: list[Placed] = []

    def plain(self, value: Any, *path: str) -> Any:
        """The value as plain data (see :mod:`reshard.plain`)."""
        if isinstance(value, StoredTensor):
            return self._tensor(value, path)
        if isinstance(value, StoredArray):
            return np.asarray(value.numpy())
        if isinstance(value, DTypeName):
            return f"torch.{value}"
        if isinstance(value, Device):
            return str(value)
        if isinstance(value, Record):
            where = "/".join(path)
            self._builder.note(
                "left-out", f"an object of {value.qualname} in {self._file.path.name}", where
            )
            return LeftOut(value.qualname)
        if isinstance(value, Mapping):
            return {self._key(k): self.plain(v, *path, str(k)) for k, v in value.items()}
        if isinstance(value, list):
            return [self.plain(v, *path, str(i)) for i, v in enumerate(value)]
        if isinstance(value, tuple):
            return tuple(self.plain(v, *path, str(i)) for i, v in enumerate(value))
        if isinstance(value, (set, frozenset)):
            return {self.plain(v, *path) for v in value}
        return self._scalar(value, path)

    def _scalar(self, value: Any, path: tuple[str, ...]) -> Any:
        if value is None or isinstance(value, (bool, int, float, str, bytes, bytearray)):
            return value
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
            return np.asarray(value)
        name = type(value).__name__
        self._builder.note("left-out", f"a {name} in {self._file.path.name}", "/".join(path))
        return LeftOut(name)

    def _key(self, key: Any) -> Any:
        if isinstance(key, (str, int, float, bool, bytes, tuple)) or key is None:
            return key
        return str(key)

    def _tensor(self, tensor: StoredTensor, path: tuple[str, ...]) -> Any:
        kind = dtype(tensor.dtype)
        if tensor.numel * kind.itemsize <= LARGEST_ARRAY:
            return read_tensor(self._file, tensor)
        name = self._prefix + "/".join(path)
        entry = Entry(name, tensor.shape)
        self.tensors.append(placed(self._builder, self._file, tensor, entry))
        return TensorRef(name, CLIENT)
