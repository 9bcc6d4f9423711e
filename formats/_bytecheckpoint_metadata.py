"""What does a ``.metadata`` of ByteCheckpoint list?

A pickle: like that of torch's distributed checkpoint, with the pieces' own tensors (their strides)
pickled inside. The payload is raw bytes of each piece's storage. Nothing of it is trusted: every
field is checked before it is used.

Source: ByteCheckpoint 0.0.2, ``bytecheckpoint/checkpointer/meta_type.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.box import Box, Shape
from reshard.dtypes import DType, dtype
from reshard.errors import CorruptError, IncompleteError, UnsafeError, UnsupportedError
from reshard.formats._pieces import outside
from reshard.pickles import load_pickle
from reshard.stored import StoredTensor

METADATA = ".metadata"
MARK = b"bytecheckpoint"
_CLASS = "bytecheckpoint.checkpointer.meta_type.Metadata"
_TENSOR = "TensorStorageMetadata"
_BYTES = "BytesStorageMetadata"


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of a file of the folder."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor and where it lies; ``strides`` in elements, ``None`` for row-major."""

    shape: Shape
    box: Box
    dtype: DType
    place: Place
    skip: int
    strides: Shape | None


@dataclass(frozen=True, slots=True)
class Metadata:
    """What the file lists.

    Parameters
    ----------
    tensors
        The pieces of each tensor, by its name in the state dict.
    values
        Where the values that aren't tensors lie.
    paths
        Each name's keys in the nested state dict.
    """

    tensors: Mapping[str, tuple[Piece, ...]]
    values: Mapping[str, Place]
    paths: Mapping[str, tuple[str, ...]]


def looks_like(path: Path) -> bool:
    """Whether a ``.metadata`` is ByteCheckpoint's and not torch's."""
    try:
        with path.open("rb") as file:
            return MARK in file.read(1 << 12)
    except OSError:
        return False


def read(path: Path) -> Metadata:
    """Read it.

    Raises
    ------
    CorruptError
        If it makes no sense, or lists a piece without a place.
    UnsupportedError
        If it holds what this reader can't invert.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CorruptError(f"can't be read: {error.strerror}", where=path) from error
    document = load_pickle(raw, where=str(path)).value
    if getattr(document, "qualname", None) != _CLASS:
        raise CorruptError("isn't the metadata of a ByteCheckpoint", where=path)
    try:
        return _Reading(path, document.fields).run()
    except (KeyError, TypeError, AttributeError, ValueError, AssertionError) as error:
        raise CorruptError(f"makes no sense: {error!r}", where=path) from error


class _Reading:
    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        self._path = path
        self._fields = fields
        version = fields["bytecheckpoint_version"]
        if not isinstance(version, str) or not version.startswith("0.0."):
            raise UnsupportedError(f"was written by ByteCheckpoint {version!r}", where=path)
        if fields["user_defined_dict"]:
            raise UnsupportedError(
                "has flat parameters of FSDP, which hold several parameters in one",
                where=path,
                hint="save the state dict with the original parameters",
            )
        self._places = self._keyed(fields["storage_data"])
        self._metas = self._keyed(fields["all_tensor_metadata"])

    def run(self) -> Metadata:
        tensors: dict[str, tuple[Piece, ...]] = {}
        values: dict[str, Place] = {}
        for name, what in self._fields["state_dict_metadata"].items():
            kind = what.qualname.rpartition(".")[2]
            if kind == _TENSOR:
                tensors[name] = tuple(self._pieces(name, what.fields))
            elif kind == _BYTES:
                values[name] = self._place(name, None)
            else:
                raise ValueError(f"a {kind}")
        listed = {name for name, _ in self._places}
        if unknown := listed - tensors.keys() - values.keys():
            raise CorruptError(
                f"has a place for {min(unknown)}, which it doesn't list", where=self._path
            )
        paths = {
            name: tuple(str(key) for key in keys)
            for name, keys in self._fields["planner_data"].items()
        }
        return Metadata(tensors, values, paths)

    def _keyed(self, given: Mapping[Any, Any]) -> dict[tuple[str, Shape | None], Any]:
        found: dict[tuple[str, Shape | None], Any] = {}
        for index, value in given.items():
            fields = index.fields
            offset = fields.get("offset")
            key = (fields["fqn"], None if offset is None else _shape(offset))
            if not isinstance(key[0], str) or key in found:
                raise ValueError(f"an index {fields!r}")
            found[key] = value
        return found

    def _pieces(self, name: str, fields: Mapping[str, Any]) -> Iterator[Piece]:
        shape, kind = _shape(fields["size"]), dtype(str(fields["properties"].state[0]))
        chunks = {_shape(c.fields["offsets"]): _shape(c.fields["sizes"]) for c in fields["chunks"]}
        extra = [key[1] for key in self._places if key[0] == name and key[1] not in chunks]
        if extra:
            raise CorruptError(
                f"has a place for a piece of {name} that it doesn't list", where=self._path
            )
        for start, sizes in chunks.items():
            box = Box(start, tuple(o + n for o, n in zip(start, sizes, strict=True)))
            if not box.within(shape):
                raise ValueError(f"a piece {box} of {name}, whose shape is {shape}")
            place = self._place(name, start)
            yield self._piece(name, shape, box, kind, place)

    def _piece(self, name: str, shape: Shape, box: Box, kind: DType, place: Place) -> Piece:
        meta = self._metas.get((name, box.start))
        if not isinstance(meta, bytes):
            raise ValueError(f"no tensor for a piece of {name}")
        tensor = load_pickle(meta, where=f"{self._path} ({name})").value
        if not isinstance(tensor, StoredTensor) or tensor.dtype != kind.name:
            raise ValueError(f"a piece of {name} isn't a tensor of {kind}")
        if tensor.shape != box.shape:
            raise ValueError(f"a piece of {name} is {tensor.shape} and {box.shape}")
        if place.nbytes != tensor.storage.numel * kind.itemsize:
            raise CorruptError(
                f"gives a piece of {name} {place.nbytes} bytes; its storage has "
                f"{tensor.storage.numel * kind.itemsize}",
                where=self._path,
            )
        rows = math.prod(box.shape) and _row_major(tensor.shape, tensor.strides)
        strides = None if rows or not math.prod(box.shape) else tensor.strides
        return Piece(shape, box, kind, place, tensor.offset * kind.itemsize, strides)

    def _place(self, name: str, start: Shape | None) -> Place:
        found = self._places.get((name, start))
        if found is None:
            raise IncompleteError(
                f"lists a piece of {name} and doesn't say where it lies", where=self._path
            )
        fields = found.fields
        file, numbers = fields["relative_path"], (fields["offset"], fields["length"])
        if not isinstance(file, str) or outside(file):
            raise UnsafeError(f"names a file {file!r} outside of its folder", where=self._path)
        if not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
            raise ValueError(f"a place {fields!r}")
        return Place(file, *numbers)


def _shape(given: Any) -> Shape:
    found = tuple(given)
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in found):
        raise ValueError(f"sizes {found!r}")
    return found


def _row_major(shape: Shape, strides: Shape) -> bool:
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
