"""Are chunks that tensorstore and zstandard wrote decoded to what they were made of, or refused?"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from reshard.formats._zarr import Array, decoded, parse
from reshard.formats._zstd import check_whole, decompressed

BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
CRC = {"name": "crc32c"}
ZSTD = {"name": "zstd", "configuration": {"level": 1}}
CHAINS = {
    "plain": [BYTES],
    "zstd": [BYTES, ZSTD],
    "crc32c": [BYTES, CRC],
    "both": [BYTES, ZSTD, CRC],
    "other": [{"name": "gzip", "configuration": {"level": 1}}],  # left to tensorstore
}
KINDS = ("float32", "bfloat16", "uint8", "int64")


def written(
    elements: NDArray[Any], part: list[int] | None, codecs: list[Any], index: tuple[str, bool]
) -> tuple[Array, bytes]:
    """An array of one chunk as tensorstore writes it: its metadata, and what is stored."""
    shape = list(elements.shape)
    if part is not None:
        place, summed = index
        settings = {
            "chunk_shape": part,
            "codecs": codecs,
            "index_codecs": [BYTES, CRC] if summed else [BYTES],
            "index_location": place,
        }
        codecs = [{"name": "sharding_indexed", "configuration": settings}]
    with tempfile.TemporaryDirectory() as folder:
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": folder},
            "metadata": {
                "shape": shape,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}},
                "data_type": elements.dtype.name,
                "codecs": codecs,
            },
        }
        tensorstore.open(spec, create=True).result().write(elements).result()
        (chunk,) = [p for p in (Path(folder) / "c").rglob("*") if p.is_file()] or [
            Path(folder) / "c"
        ]
        document = (Path(folder) / "zarr.json").read_bytes()
        return parse(document, 3, folder), chunk.read_bytes()


@st.composite
def chunks(draw: st.DrawFn) -> tuple[NDArray[Any], Array, bytes]:
    """Elements none of which is the fill value, and how tensorstore stored them."""
    part = draw(st.lists(st.integers(1, 4), max_size=3))
    shape = [n * draw(st.integers(1, 3)) for n in part]
    kind = draw(st.sampled_from(KINDS))
    count = math.prod(shape)
    elements = (
        (np.arange(count) % 100 + 1).reshape(shape).astype(tensorstore.dtype(kind).numpy_dtype)
    )
    codecs = CHAINS[draw(st.sampled_from(sorted(CHAINS)))]
    if codecs is CHAINS["other"]:
        codecs = [BYTES, *codecs]
    index = draw(st.tuples(st.sampled_from(("start", "end")), st.booleans()))
    shard = part if draw(st.booleans()) else None
    return elements, *written(elements, shard, codecs, index)


def joined(array: Array, stored: bytes) -> bytes:
    """The whole chunk, as it is decoded."""
    return b"".join(decoded(array, stored))


@given(chunks())
def test_the_same_as_was_written(chunk: tuple[NDArray[Any], Array, bytes]) -> None:
    elements, array, stored = chunk
    assert joined(array, stored) == elements.tobytes()


@given(chunks(), st.data())
def test_a_shorter_one_is_noticed(chunk: tuple[NDArray[Any], Array, bytes], data: Any) -> None:
    elements, array, stored = chunk
    cut = data.draw(st.integers(0, len(stored) - 1))
    try:
        found = joined(array, stored[:cut])
    except ValueError:
        return
    # raw elements have nothing else: who asks for them compares the length
    assert len(found) < elements.nbytes


@pytest.mark.parametrize("name", ["crc32c", "both"])
@pytest.mark.parametrize("part", [None, [2, 3]])
def test_each_flipped_bit_is_noticed(name: str, part: list[int] | None) -> None:
    elements = np.arange(1, 25, dtype=np.float32).reshape(4, 6)
    array, stored = written(elements, part, CHAINS[name], ("end", True))
    for bit in range(len(stored) * 8):
        changed = bytearray(stored)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=r"CRC-32C|missing|behind|fewer"):
            joined(array, bytes(changed))


@pytest.mark.parametrize("name", sorted(CHAINS))
def test_a_chunk_that_a_shard_lacks(name: str) -> None:
    """tensorstore leaves out chunks of the fill value, and reads zeros for those that are lost."""
    elements = np.zeros((4, 6), np.float32)
    elements[:2] = 1
    codecs = [BYTES, *CHAINS[name]] if name == "other" else CHAINS[name]
    array, stored = written(elements, [2, 3], codecs, ("end", True))
    with pytest.raises(ValueError, match="chunk 2 of the shard is missing"):
        joined(array, stored)


@pytest.mark.parametrize("level", [1, 19])
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("nbytes", [0, 1, 100, 1 << 17, (1 << 17) + 1, 3_000_000])
def test_where_a_zstd_stream_ends(level: int, summed: bool, told: bool, nbytes: int) -> None:
    noise = np.random.default_rng(0).bytes(nbytes)
    for content in (noise, b"a" * nbytes, (b"abc" * nbytes)[:nbytes]):
        writer = zstandard.ZstdCompressor(
            level=level, write_checksum=summed, write_content_size=told
        )
        stream = writer.compress(content)
        check_whole(stream)
        check_whole(stream * 2)
        assert b"".join(decompressed(stream)) == content
        for cut in (1, 2, 5, len(stream) - 1):
            with pytest.raises(ValueError, match="frame"):
                check_whole(stream[:-cut])
        with pytest.raises(ValueError, match="no zstd frame"):
            check_whole(stream + b"x")
    with pytest.raises(ValueError, match="no zstd frame"):
        check_whole(b"")


def test_a_stream_that_becomes_very_long_comes_in_pieces() -> None:
    stream = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    assert max(len(piece) for piece in decompressed(stream)) <= 1 << 20
