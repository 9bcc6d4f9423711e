"""How do tensors of ``torch.save`` files come into a manifest, and the other values with them?"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from reshard.builder import Builder, Placed
from reshard.dtypes import BY_NAME, dtype
from reshard.layout import CLIENT, Entry
from reshard.pickle_stubs import GlobalMeta, Record, StoredArray
from reshard.plain import LARGEST_ARRAY, LeftOut, NumpyArray, TensorRef
from reshard.stored import StoredTensor
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
            return self._array(value, path)
        if isinstance(value, Record):
            return self._record(value, path)
        if isinstance(value, Mapping):
            return {self._key(k): self.plain(v, *path, str(k)) for k, v in value.items()}
        if isinstance(value, list):
            return [self.plain(v, *path, str(i)) for i, v in enumerate(value)]
        if isinstance(value, tuple):
            return tuple(self.plain(v, *path, str(i)) for i, v in enumerate(value))
        if isinstance(value, (set, frozenset)):
            return self._set(value, path)
        return self._scalar(value, path)

    def _left_out(self, name: str, path: tuple[str, ...], what: str = "an object of") -> LeftOut:
        self._builder.note("left-out", f"{what} {name} in {self._file.path.name}", "/".join(path))
        return LeftOut(name)

    def _record(self, value: Record, path: tuple[str, ...]) -> Any:
        filled = (value.args, value.kwargs, value.items, value.pairs)
        if value.qualname != "argparse.Namespace" or any(filled):
            return self._left_out(value.qualname, path)
        found = Namespace()
        vars(found).update((k, self.plain(v, *path, k)) for k, v in value.fields.items())
        return found

    def _array(self, value: StoredArray, path: tuple[str, ...]) -> Any:
        array = value.numpy() if value.numeric else None
        if array is None or array.dtype.name not in BY_NAME:
            return self._left_out("numpy.ndarray", path, "a numpy array that isn't of numbers:")
        return array.view(NumpyArray)

    def _set(self, value: set[Any] | frozenset[Any], path: tuple[str, ...]) -> Any:
        found = [self.plain(v, *path) for v in value]
        if not all(map(_hashable, found)):
            return self._left_out(type(value).__name__, path, "tensors in a")
        return set(found) if isinstance(value, set) else frozenset(found)

    def _scalar(self, value: Any, path: tuple[str, ...]) -> Any:
        if value is None or isinstance(value, (bool, int, float, str, bytes, bytearray)):
            return value
        if isinstance(value, np.generic) and value.dtype.name in BY_NAME:
            return value
        if isinstance(value, GlobalMeta):
            return self._left_out(value.qualname, path, "the name")
        return self._left_out(type(value).__name__, path)

    def _key(self, key: Any) -> Any:
        """A dict's key; one that isn't plain is named by its text."""
        if isinstance(key, tuple):
            return tuple(self._key(k) for k in key)
        if isinstance(key, (str, int, float, bool, bytes)) or key is None:
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


def _hashable(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(map(_hashable, value))
    return isinstance(value, Hashable)
