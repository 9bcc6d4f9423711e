"""What does the metadata of a zarr array say, and how does one of its chunks become bytes?

Version 2 (``.zarray``) and 3 (``zarr.json``). :class:`Array` has the grid and the names of the
chunks; :func:`decoded` decodes one: by :mod:`._zarr_codecs` if it is encoded as checkpoints usually
are, else with tensorstore, from memory. So only what is there can be decoded, where tensorstore
itself would make up a missing chunk of zeros. Element types and codecs are those of a list;
tensorstore would abort the process on some others.

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
from reshard.formats._zarr_codecs import Chain, Shard

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
    chain
        How a chunk is encoded; ``None`` if only tensorstore can decode it, or it is a shard.
    shard
        What a chunk is made of, if chunks are shards.
    """

    version: int
    shape: Shape
    chunk: Shape
    dtype: DType
    separator: str
    prefix: str
    codec: str
    chain: Chain | None
    shard: Shard | None = None

    @property
    def raw(self) -> bool:
        """Whether a chunk is its elements in row-major, little-endian order, and nothing else."""
        return self.chain == Chain()

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
        chain=_v2_chain(compressor, document["order"]),
    )


def _v2_chain(compressor: dict[str, Any] | None, order: str) -> Chain | None:
    if order != "C" or (compressor is not None and compressor["id"] != "zstd"):
        return None
    return Chain(zstd=compressor is not None)


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
    chain, shard = _codecs(codecs, chunk)
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
        chain=chain,
        shard=shard,
    )


def _codecs(codecs: list[dict[str, Any]], chunk: Shape) -> tuple[Chain | None, Shard | None]:
    if len(codecs) == 1 and codecs[0]["name"] == "sharding_indexed":
        settings = codecs[0]["configuration"]
        for codec in (*settings["codecs"], *settings["index_codecs"]):
            _only(codec["name"] in _V3_CODECS, "codec", codec)
        index = Chain.of(settings["index_codecs"])
        place = settings.get("index_location", "end")
        _only(index is not None and not index.zstd, "index_codecs", settings["index_codecs"])
        _only(place in ("end", "start"), "index_location", settings)
        part, inner = _chunk(settings["chunk_shape"], chunk), Chain.of(settings["codecs"])
        _only(not any(n % p for n, p in zip(chunk, part, strict=True)), "chunk_shape", part)
        return None, Shard(chunk, part, inner, index == Chain(summed=True), place == "start")
    for codec in codecs:
        _only(codec["name"] in _V3_CODECS, "codec", codec)
    return Chain.of(codecs), None


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


def decoded(array: Array, stored: bytes) -> Iterator[bytes | memoryview]:
    """Decode one chunk.

    Parameters
    ----------
    array
        Which it is of.
    stored
        The chunk as it is stored.

    Yields
    ------
    bytes or memoryview
        Its elements, row-major, of the full size of a chunk: some at a time.

    Raises
    ------
    ValueError
        If it can't be decoded.
    """
    view, shard = memoryview(stored), array.shard
    if array.chain is not None:
        yield from array.chain.decoded(view)
    elif shard is not None and shard.chain is not None:
        yield from shard.decoded(view, array.dtype.numpy)
    else:
        if shard is not None:
            shard.index(view)  # tensorstore would give the fill value for a missing chunk
        yield _by_tensorstore(array, stored)


def _by_tensorstore(array: Array, stored: bytes) -> memoryview:
    import numpy as np
    import tensorstore

    context = tensorstore.Context()
    store = tensorstore.KvStore.open({"driver": "memory"}, context=context).result()
    version = (".zarray", "zarr") if array.version == 2 else ("zarr.json", "zarr3")
    store[version[0]] = array.codec.encode()
    store[".".join("0" for _ in array.chunk) or "0"] = stored
    spec = {"driver": version[1], "kvstore": {"driver": "memory"}}
    opened = tensorstore.open(spec, context=context, open=True).result()
    elements = np.ascontiguousarray(opened.read().result())
    return elements.reshape(-1).view(np.uint8).data
