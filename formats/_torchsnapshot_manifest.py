"""What does ``.snapshot_metadata`` of a torchsnapshot list?

JSON: ``"<rank>/<key>/<way in the state dict>"`` to an entry: a container, a value written in
place, an object in a file, or a tensor with its file and byte range (whole, in chunks, or the
shards of a rank). Every field is checked before it is used.

Source: torchsnapshot 0.1.0, ``torchsnapshot/manifest.py``.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from reshard.box import Box, Shape
from reshard.dtypes import BY_TORCH, DType
from reshard.errors import CorruptError, UnsafeError, UnsupportedError
from reshard.formats._pieces import outside

METADATA = ".snapshot_metadata"
_MOST = 1 << 62


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor: where it lies; ``end`` is ``None`` for the whole file."""

    box: Box
    dtype: DType
    file: str
    begin: int
    end: int | None

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return self.dtype.nbytes(self.box.numel)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as one rank lists it; the shape of a sharded one is told by all ranks' parts."""

    shape: Shape | None
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class InFile:
    """An object of ``torch.save`` in a file of its own."""

    file: str
    replicated: bool


@dataclass(frozen=True, slots=True)
class Container:
    """A dict with its keys, or a list (``None``)."""

    keys: tuple[str | int, ...] | None


@dataclass(frozen=True, slots=True)
class Value:
    """A value that is written in place."""

    value: int | float | str | bool | bytes
    replicated: bool


Entry = Tensor | InFile | Container | Value


@dataclass(frozen=True, slots=True)
class Listing:
    """What the file lists: for each rank, the way to each entry."""

    world: int
    ranks: tuple[Mapping[tuple[str, ...], Entry], ...]


def read(path: Path) -> Listing:
    """Read it.

    Raises
    ------
    CorruptError
        If it makes no sense.
    UnsupportedError
        If it is YAML, as of earlier versions, or lists kinds that aren't known.
    UnsafeError
        If it names files outside of the folder.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CorruptError(f"can't be read: {error.strerror}", where=path) from error
    if not raw.lstrip().startswith(b"{"):
        raise UnsupportedError(
            "isn't JSON", where=path, hint="earlier versions of torchsnapshot wrote YAML"
        )
    try:
        document = json.loads(raw)
        world = document["world_size"]
        _check(type(world) is int and 0 < world < 1 << 20, f"a world size of {world!r}")
        ranks: tuple[dict[tuple[str, ...], Entry], ...] = tuple({} for _ in range(world))
        for name, entry in document["manifest"].items():
            rank, *way = name.split("/")
            _check(rank.isdecimal() and int(rank) < world and bool(way), f"an entry {name!r}")
            ranks[int(rank)][tuple(map(unquote, way))] = _entry(entry)
    except (UnsafeError, UnsupportedError) as error:
        raise type(error)(error.what, where=path) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(f"isn't a list of a snapshot: {error!r}", where=path) from error
    return Listing(world, ranks)


def _entry(entry: Mapping[str, Any]) -> Entry:
    kind = entry["type"]
    match kind:
        case "dict" | "OrderedDict":
            keys = entry["keys"]
            _check(all(type(k) in (str, int) for k in keys), f"keys {keys!r}")
            return Container(tuple(keys))
        case "list":
            return Container(None)
        case "object":
            _only(entry["serializer"] == "torch_save", "serializer", entry["serializer"])
            return InFile(_file(entry["location"]), entry["replicated"] is True)
        case "Tensor":
            part = _part(entry, (0,) * len(entry["shape"]))
            return Tensor(part.box.shape, (part,))
        case "ChunkedTensor":
            shape = _shape(entry["shape"])
            return Tensor(shape, tuple(_parts(entry["chunks"])))
        case "ShardedTensor":
            return Tensor(None, tuple(_parts(entry["shards"])))
        case "int" | "float" | "str" | "bool" | "bytes":
            replicated = entry["replicated"] is True
            return Value(_value(kind, entry["serialized_value"]), replicated)
        case _:
            raise UnsupportedError(f"lists a {str(kind)[:80]}, which isn't known")


def _parts(pieces: Any) -> Iterator[Part]:
    for piece in pieces:
        part = _part(piece["tensor"], _shape(piece["offsets"]))
        _check(part.box.shape == _shape(piece["sizes"]), f"a piece {piece!r}")
        yield part


def _part(entry: Mapping[str, Any], start: Shape) -> Part:
    _only(entry["serializer"] == "buffer_protocol", "serializer", entry["serializer"])
    shape, name = _shape(entry["shape"]), entry["dtype"]
    known = isinstance(name, str) and name.removeprefix("torch.") in BY_TORCH
    _only(known, "element type", name)
    box = Box(start, tuple(o + n for o, n in zip(start, shape, strict=True)))
    kind, given = BY_TORCH[name.removeprefix("torch.")], entry.get("byte_range")
    begin, end = (0, None) if given is None else _shape(given)
    if end is not None:
        _check(end - begin == kind.nbytes(box.numel), f"{end - begin} bytes for {kind} {shape}")
    return Part(box, kind, _file(entry["location"]), begin, end)


def _shape(given: Any) -> Shape:
    _check(
        isinstance(given, list) and all(type(n) is int and 0 <= n < _MOST for n in given),
        f"numbers {given!r}",
    )
    return tuple(given)


def _file(location: Any) -> str:
    _check(isinstance(location, str), f"a location {location!r}")
    if outside(location):
        raise UnsafeError(f"names a file {location!r} outside of its folder")
    return str(location)


def _value(kind: str, text: Any) -> int | float | str | bool | bytes:
    """A value of its text; a float is eight bytes, little-endian, in base 64."""
    _check(isinstance(text, str), f"a value {text!r}")
    if kind == "int":
        return int(text)
    if kind == "bool":
        _check(text in ("True", "False"), f"a bool {text!r}")
        return bool(text == "True")
    if kind == "str":
        return str(text)
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"a value {text!r}") from error
    if kind == "bytes":
        return raw
    _check(len(raw) == 8, f"a float {text!r}")
    return float(struct.unpack("<d", raw)[0])


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _only(holds: bool, what: str, found: object) -> None:
    if not holds:
        raise UnsupportedError(f"has a tensor or object of the {what} {str(found)[:80]}")
