"""What is a file of ``torch.save`` before its payload is written?

A :class:`Sheet` is filled with the storages of one file, each with what will lie in it: a rank's
slice of a flat space, a whole tensor, or a few bytes that are known already. Its
:class:`Blueprint` says where in the file each of them goes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.box import Shape
from reshard.digest import CRC32
from reshard.dtypes import DType, from_numpy
from reshard.errors import UnsupportedError
from reshard.layout import Entry, FlatSpace
from reshard.stored import StorageRef, StoredTensor, contiguous_strides
from reshard.targets import target_error, write_at
from reshard.torchfile_write import TorchZipLayout


@dataclass(frozen=True, slots=True)
class Slice:
    """The payload of a storage: a rank's shard of one state of a flat space."""

    space: str
    state: str


@dataclass(frozen=True, slots=True)
class Whole:
    """The payload of a storage: whole tensors or boxes of them, end to end."""

    state: str
    dtype: DType
    entries: tuple[Entry, ...]


Payload = Slice | Whole


@dataclass(frozen=True, slots=True)
class Local:
    """A tensor as one model-parallel rank has it.

    Parameters
    ----------
    name
        What the rank calls it.
    shape
        Its shape there.
    entries
        The tensors (or boxes of them) of the checkpoint that it is made of, in row-major order.
    """

    name: str
    shape: Shape
    entries: tuple[Entry, ...]

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return sum(e.numel for e in self.entries)


def torch_name(dtype: DType) -> str:
    """What torch calls an element type.

    Raises
    ------
    UnsupportedError
        If it has no such type.
    """
    if dtype.torch is None or dtype.bits % 8:
        raise UnsupportedError(
            f"torch has no {dtype} elements, so a file of torch.save can't hold them",
            hint="write these tensors to another format (--format native)",
        )
    return dtype.torch


@dataclass(slots=True)
class Sheet:
    """The storages of one file, in the order in which they lie."""

    storages: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    payload: dict[str, Payload] = field(default_factory=dict[str, Payload])
    inline: dict[str, bytes] = field(default_factory=dict[str, bytes])
    _made: dict[object, StorageRef] = field(default_factory=dict[object, StorageRef])

    def slice(
        self, space: FlatSpace, state: str, start: int = 0, count: int | None = None
    ) -> StoredTensor:
        """Elements ``[start, start + count)`` of a shard, all by default, as a 1-D tensor."""
        part = space.ruler.part if space.numel else 0
        storage = self._storage(Slice(space.name, state), space.states[state], part)
        shape = (part if count is None else count,)
        return StoredTensor(storage, start, shape, (1,), storage.dtype)

    def whole(self, state: str, local: Local, dtype: DType) -> StoredTensor:
        """A whole tensor; the same one again lies in the same storage."""
        storage = self._storage(Whole(state, dtype, local.entries), dtype, local.numel)
        return StoredTensor(storage, 0, local.shape, contiguous_strides(local.shape), storage.dtype)

    def empty(self, dtype: DType) -> StoredTensor:
        """A tensor of shape (0,), which stands for one that lies elsewhere."""
        storage = self._made.get(dtype)
        if storage is None:
            storage = self._made[dtype] = self._new(dtype, 0)
        return StoredTensor(storage, 0, (0,), (1,), storage.dtype)

    def array(self, array: NDArray[Any]) -> StoredTensor:
        """A small tensor that is at hand. Each has a storage of its own.

        (Optimizers add to ``step`` in place: two that shared a storage would count double.)
        """
        dtype = from_numpy(array.dtype)
        storage = self._new(dtype, array.size)
        self.inline[storage.key] = np.ascontiguousarray(array, dtype.numpy).tobytes()
        strides = contiguous_strides(array.shape)
        return StoredTensor(storage, 0, array.shape, strides, storage.dtype)

    def _storage(self, payload: Payload, dtype: DType, numel: int) -> StorageRef:
        storage = self._made.get(payload)
        if storage is None:
            storage = self._made[payload] = self._new(dtype, numel)
            self.payload[storage.key] = payload
        return storage

    def _new(self, dtype: DType, numel: int) -> StorageRef:
        storage = StorageRef(str(len(self.storages)), torch_name(dtype), numel)
        self.storages.append((storage.key, storage.nbytes))
        return storage


@dataclass(frozen=True, slots=True, eq=False)
class Blueprint:
    """A file of known length: where its storages lie, and all bytes that aren't payload.

    Parameters
    ----------
    layout
        The archive.
    sizes
        Bytes of each storage.
    payload
        What lies in the storages that are written by copying.
    inline
        The bytes of the others.
    """

    layout: TorchZipLayout
    sizes: Mapping[str, int]
    payload: Mapping[str, Payload]
    inline: Mapping[str, bytes]

    @classmethod
    def of(cls, value: object, sheet: Sheet) -> Blueprint:
        """Lay out a value whose tensors lie in the sheet's storages."""
        # One name for all: files of ranks that differ in nothing else have the same layout.
        layout = TorchZipLayout(value, sheet.storages, name="archive")
        return cls(layout, dict(sheet.storages), sheet.payload, sheet.inline)

    @property
    def nbytes(self) -> int:
        """Length of the file."""
        return self.layout.nbytes

    def finish_file(self, path: Path, checksums: Mapping[int, int]) -> None:
        """As :meth:`finish`, with the file at a path.

        Raises
        ------
        TargetError
            If it can't be written.
        """
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                self.finish(fd, checksums)
            finally:
                os.close(fd)
        except OSError as error:
            raise target_error(error, path) from error

    def finish(self, fd: int, checksums: Mapping[int, int]) -> None:
        """Write everything but the payload that was copied.

        Parameters
        ----------
        fd
            The file, open for writing.
        checksums
            CRC-32 of each copied storage, by the byte at which it begins.
        """
        crcs = {}
        for key in self.payload:
            if self.sizes[key]:
                crcs[key] = checksums[self.layout.offset(key)]
        for key, data in self.inline.items():
            crcs[key] = CRC32.of(data)
            write_at(fd, data, self.layout.offset(key))
        self.layout.finish(fd, crcs)
