"""How does a value whose bytes are known become a blob?

As ``torch.save`` writes it: plain data as a pickle, arrays in it as tensors beside the pickle.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from reshard.digest import CRC32
from reshard.dtypes import from_numpy
from reshard.errors import UnsupportedError
from reshard.pickle_stubs import StoredArray
from reshard.pickle_write import Call, Global, NewObj
from reshard.plain import LeftOut, NumpyArray, TensorRef
from reshard.stored import StoredTensor
from reshard.torchfile_write import TorchZipLayout


@dataclass(frozen=True, slots=True, eq=False)
class Small:
    """A blob of which all bytes are known.

    Parameters
    ----------
    layout
        Of the blob.
    payload
        The storages, by key.
    array
        The array, if that is all that the value is.
    """

    layout: TorchZipLayout
    payload: Mapping[str, bytes]
    array: np.ndarray[Any, Any] | None

    def write(self, fd: int, at: int) -> None:
        """Write it at a place of a file."""
        for key, data in self.payload.items():
            begin = at + self.layout.offset(key)
            view = memoryview(data)
            while view:
                done = os.pwrite(fd, view, begin)
                view, begin = view[done:], begin + done
        self.layout.finish(fd, {k: CRC32.of(v) for k, v in self.payload.items()}, at=at)


def small(value: Any) -> Small:
    """Lay out the blob of plain data (:mod:`reshard.plain`).

    Raises
    ------
    UnsupportedError
        If there is something in it that a pickle can't hold here.
    """
    payload: dict[str, bytes] = {}
    pickled = _pickled(value, payload)
    sizes = [(key, len(data)) for key, data in payload.items()]
    tensor = isinstance(value, np.ndarray) and not isinstance(value, NumpyArray)
    return Small(TorchZipLayout(pickled, sizes), payload, value if tensor else None)


def _pickled(value: Any, payload: dict[str, bytes]) -> Any:
    if isinstance(value, NumpyArray):
        return StoredArray.of(value)
    if isinstance(value, np.ndarray):
        kind = from_numpy(value.dtype)
        key = str(len(payload))
        payload[key] = np.ascontiguousarray(value, kind.numpy).tobytes()
        return StoredTensor.whole(key, str(kind.torch), value.shape)
    if isinstance(value, Namespace):
        attributes = _pickled(vars(value), payload)
        return NewObj(Global("argparse", "Namespace"), attributes or None)
    if isinstance(value, Mapping):
        return {k: _pickled(v, payload) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        found = [_pickled(v, payload) for v in value]
        return tuple(found) if isinstance(value, tuple) else found
    if isinstance(value, frozenset):
        order = sorted(value, key=repr)
        return Call(Global("builtins", "frozenset"), (order,))
    if isinstance(value, bytearray):
        return Call(Global("builtins", "bytearray"), (bytes(value),))
    if isinstance(value, (TensorRef, LeftOut)):
        raise UnsupportedError(
            "a large tensor, or a value that was left out, stands inside a tuple, which DCP keeps "
            "as one pickle"
        )
    return value
