"""What does the metadata of a zarr array say, and how does one of its chunks become bytes?

Version 2 (``.zarray``) and 3 (``zarr.json``). :class:`Array` has the grid and the names of the
chunks; :func:`chunk_bytes` decodes one, with tensorstore, from memory: so that only what is there
can be decoded, where tensorstore itself would make up a missing chunk of zeros. Element types and
codecs are those of a list; tensorstore would abort the process on some others.

Sources: zarr's storage specification version 2; zarr core specification version 3, "Array
metadata", and its codecs ``bytes``, ``gzip``, ``blosc``, ``crc32c``, ``transpose`` and
``sharding_indexed``. tensorstore adds ``zstd`` and the names of types that numpy hasn't.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.box import Box, Shape
from reshard.dtypes import BY_NAME, DType
from reshard.errors import CorruptError, UnsupportedError

V2, V3 = ".zarray", "zarr.json"

_V2_TYPES = {
    "|b1": "bool", "|i1": "int8", "|u1": "uint8", "<i2": "int16", "<u2": "uint16",
    "<i4": "int32", "<u4": "uint32", "<i8": "int64", "<u8": "uint64", "<f2": "float16",
    "<f4": "float32", "<f8": "float64", "<c8": "complex64", "<c16": "complex128",
    "bfloat16": "bfloat16", "float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2",
    "float8_e4m3fnuz": "float8_e4m3fnuz", "float8_e5m2fnuz": "float8_e5m2fnuz",
}  # fmt: skip

_V2_CODECS = frozenset(("zstd", "zlib", "gzip", "blosc", "bz2"))
_V3_CODECS = frozenset(("bytes", "transpose", "gzip", "blosc", "zstd", "crc32c"))
_MOST = 1 << 62


@dataclass(frozen=True, slots=True)
class Array:
    """An array.

    Parameters
    ----------
    version
        Of zarr: 2 or 3.
    shape, chunk
        Of the array and of each chunk.
    dtype
        Element type.
    separator, prefix
        A chunk's name is the prefix, and its indices with the separator between them.
    codec
        Its metadata, but with the shape of one chunk: what decodes a chunk.
    raw
        Whether a chunk is its elements in row-major, little-endian order, and nothing else.
    inner
        For chunks that are shards, the number of chunks in one; else 0.
    """

    version: int
    shape: Shape
    chunk: Shape
    dtype: DType
    separator: str
    prefix: str
    codec: str
    raw: bool
    inner: int = 0

    @property
    def grid(self) -> Shape:
        """How many chunks there are along each dim."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True))

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        return math.prod(self.grid)

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of a decoded chunk; one at the edge is padded to the full size."""
        return self.dtype.nbytes(math.prod(self.chunk))

    def boxes(self) -> Iterator[tuple[str, Box]]:
        """The name of each chunk, and the region of the array that it holds."""
        for number in range(self.chunks):  # lazily: a strange shape may have any number
            index = self._index(number)
            start = tuple(i * c for i, c in zip(index, self.chunk, strict=True))
            stop = tuple(
                min(o + c, n) for o, c, n in zip(start, self.chunk, self.shape, strict=True)
            )
            yield self._name(index), Box(start, stop)

    def is_chunk(self, name: str) -> bool:
        """Whether a name is one that a chunk could have, also outside of the grid."""
        if not name.startswith(self.prefix):
            return False
        parts = name.removeprefix(self.prefix).split(self.separator)
        return all(part.isascii() and part.isdecimal() for part in parts)

    def _index(self, number: int) -> Shape:
        index: list[int] = []
        for size in reversed(self.grid):
            number, at = divmod(number, size)
            index.insert(0, at)
        return tuple(index)

    def _name(self, index: Shape) -> str:
        if index:
            return self.prefix + self.separator.join(map(str, index))
        return self.prefix.removesuffix(self.separator) or "0"


def parse(raw: bytes, version: int, where: Path | str) -> Array:
    """Read an array's metadata.

    Parameters
    ----------
    raw
        Content of ``.zarray`` or ``zarr.json``.
    version
        Which of the two.
    where
        What errors name.

    Raises
    ------
    CorruptError
        If it makes no sense.
    UnsupportedError
        If the array is of a type, or written by a codec, that isn't known.
    """
    try:
        document = json.loads(raw)
        found = _v2(document) if version == 2 else _v3(document)
    except UnsupportedError as error:
        raise UnsupportedError(error.what, where=where) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(f"isn't metadata of a zarr array: {error!r}", where=where) from error
    return found


def _v2(document: dict[str, Any]) -> Array:
    _only(document["zarr_format"] == 2, "zarr_format", document["zarr_format"])
    shape, chunk = _shape(document["shape"]), _chunk(document["chunks"], document["shape"])
    name, compressor = document["dtype"], document["compressor"]
    _only(name in _V2_TYPES, "element type", name)
    _only(not document.get("filters"), "filters", document.get("filters"))
    _only(compressor is None or compressor["id"] in _V2_CODECS, "compressor", compressor)
    _only(document["order"] in ("C", "F"), "order", document["order"])
    separator = document.get("dimension_separator", ".")
    _only(separator in (".", "/"), "dimension_separator", separator)
    return Array(
        version=2,
        shape=shape,
        chunk=chunk,
        dtype=BY_NAME[_V2_TYPES[name]],
        separator=separator,
        prefix="",
        codec=json.dumps({**document, "shape": chunk, "dimension_separator": "."}),
        raw=compressor is None and document["order"] == "C",
    )


def _v3(document: dict[str, Any]) -> Array:
    _only(document["zarr_format"] == 3, "zarr_format", document["zarr_format"])
    _only(document["node_type"] == "array", "node_type", document["node_type"])
    grid, kind = document["chunk_grid"], document["data_type"]
    _only(grid["name"] == "regular", "chunk_grid", grid)
    shape = _shape(document["shape"])
    chunk = _chunk(grid["configuration"]["chunk_shape"], document["shape"])
    _only(isinstance(kind, str) and kind in BY_NAME, "data_type", kind)
    _only(BY_NAME[kind].bits % 8 == 0, "data_type", kind)
    _only(not document.get("storage_transformers"), "storage_transformers", "some")
    keys = document["chunk_key_encoding"]
    _only(keys["name"] in ("default", "v2"), "chunk_key_encoding", keys)
    default = keys["name"] == "default"
    separator = keys.get("configuration", {}).get("separator", "/" if default else ".")
    _only(separator in (".", "/"), "separator", separator)
    codecs = document["codecs"]
    plain, inner = _codecs(codecs, chunk)
    return Array(
        version=3,
        shape=shape,
        chunk=chunk,
        dtype=BY_NAME[kind],
        separator=separator,
        prefix=f"c{separator}" if default else "",
        codec=json.dumps(
            {
                "zarr_format": 3,
                "node_type": "array",
                "shape": chunk,
                "data_type": kind,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
                "chunk_key_encoding": {"name": "v2", "configuration": {"separator": "."}},
                "fill_value": document["fill_value"],
                "codecs": codecs,
            }
        ),
        raw=plain,
        inner=inner,
    )


def _codecs(codecs: list[dict[str, Any]], chunk: Shape) -> tuple[bool, int]:
    """Whether chunks are raw, and for shards, how many chunks are in one."""
    if len(codecs) == 1 and codecs[0]["name"] == "sharding_indexed":
        settings = codecs[0]["configuration"]
        for codec in (*settings["codecs"], *settings["index_codecs"]):
            _only(codec["name"] in _V3_CODECS, "codec", codec)
        index = [codec["name"] for codec in settings["index_codecs"]]
        _only(index in (["bytes"], ["bytes", "crc32c"]), "index_codecs", index)
        _only(settings.get("index_location", "end") in ("end", "start"), "index_location", settings)
        part = _chunk(settings["chunk_shape"], chunk)
        return False, math.prod(n // p for n, p in zip(chunk, part, strict=True))
    for codec in codecs:
        _only(codec["name"] in _V3_CODECS, "codec", codec)
    little = [codec.get("configuration", {}).get("endian", "little") for codec in codecs]
    return [codec["name"] for codec in codecs] == ["bytes"] and little == ["little"], 0


def _shape(given: Any) -> Shape:
    if not isinstance(given, list) or not all(type(n) is int and n >= 0 for n in given):
        raise ValueError(f"a shape of {given!r}")
    if math.prod(n or 1 for n in given) > _MOST:
        raise ValueError("more elements than there can be")
    return tuple(given)


def _chunk(given: Any, shape: Any) -> Shape:
    found = _shape(given)
    if len(found) != len(shape) or 0 in found:
        raise ValueError(f"chunks of {given!r} for a shape of {shape!r}")
    return found


def _only(holds: bool, what: str, found: object) -> None:
    if not holds:
        raise UnsupportedError(f"{what} {str(found)[:80]} of a zarr array isn't known")


def chunk_bytes(array: Array, stored: bytes) -> memoryview:
    """Decode one chunk.

    Parameters
    ----------
    array
        Which it is of.
    stored
        The chunk as it is stored.

    Returns
    -------
    memoryview
        Its elements, row-major, of the full size of a chunk.

    Raises
    ------
    ValueError
        If it can't be decoded.
    """
    import numpy as np
    import tensorstore

    if array.inner:
        _check_index(array, stored)
    context = tensorstore.Context()
    store = tensorstore.KvStore.open({"driver": "memory"}, context=context).result()
    version = (".zarray", "zarr") if array.version == 2 else ("zarr.json", "zarr3")
    store[version[0]] = array.codec.encode()
    store[".".join("0" for _ in array.chunk) or "0"] = stored
    spec = {"driver": version[1], "kvstore": {"driver": "memory"}}
    opened = tensorstore.open(spec, context=context, open=True).result()
    elements = np.ascontiguousarray(opened.read().result())
    return elements.reshape(-1).view(np.uint8).data


def _check_index(array: Array, stored: bytes) -> None:
    """See that a shard has all of its chunks: tensorstore would give the fill value."""
    (codec,) = json.loads(array.codec)["codecs"]
    settings = codec["configuration"]
    nbytes = 16 * array.inner
    whole = nbytes + 4 * (len(settings["index_codecs"]) - 1)
    if len(stored) < whole:
        raise ValueError(f"its {len(stored)} bytes are fewer than its index takes")
    begin = 0 if settings.get("index_location", "end") == "start" else len(stored) - whole
    index = stored[begin : begin + nbytes]
    for at in range(0, nbytes, 16):
        if index[at : at + 16] == b"\xff" * 16:
            raise ValueError(f"chunk {at // 16} of the shard is missing")
