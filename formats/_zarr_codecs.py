"""How do the bytes of a zarr chunk become its elements, where no library is needed for it?

:class:`Chain` undoes the codecs that checkpoints are written with: zstd and a checksum, or none.
:class:`Shard` finds the chunks in a shard, which holds several and an index of them. All that is
stored is checked: lengths, checksums, and that each chunk is there.

Sources: zarr's codecs ``bytes``, ``crc32c`` and ``sharding_indexed``, version 1.0; tensorstore's
``zstd``, a stream of frames.
"""

from __future__ import annotations

import importlib
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.box import Shape
from reshard.formats._zstd import check_whole, decompressed

_CHAINS = {
    ("bytes",): (False, False),
    ("bytes", "zstd"): (True, False),
    ("bytes", "crc32c"): (False, True),
    ("bytes", "zstd", "crc32c"): (True, True),
}

_CRC = 4
_ENTRY = struct.Struct("<QQ")  # offset and length of a chunk, or both all ones
_MISSING = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Chain:
    """How a chunk is encoded.

    Parameters
    ----------
    zstd
        Whether its elements, row-major and little-endian, are compressed.
    summed
        Whether a CRC-32C of what is stored stands behind it.
    """

    zstd: bool = False
    summed: bool = False

    @classmethod
    def of(cls, codecs: Sequence[dict[str, Any]]) -> Chain | None:
        """What zarr's metadata say, or ``None`` if it is something else."""
        ends = {codec.get("configuration", {}).get("endian", "little") for codec in codecs}
        found = _CHAINS.get(tuple(codec["name"] for codec in codecs))
        return None if found is None or ends != {"little"} else cls(*found)

    def decoded(self, stored: memoryview) -> Iterator[bytes | memoryview]:
        """Yield the elements of a chunk, some at a time.

        Raises
        ------
        ValueError
            If it is damaged.
        """
        if self.summed:
            stored = checked(stored)
        if self.zstd:
            check_whole(stored)
            yield from decompressed(stored)
        else:
            yield stored


@dataclass(frozen=True, slots=True)
class Shard:
    """What a shard is made of.

    Parameters
    ----------
    shape, part
        Of the shard, and of each chunk in it.
    chain
        How these are encoded; ``None`` if only a library can decode them.
    summed, first
        Whether a CRC-32C follows the index, and whether the index comes first.
    """

    shape: Shape
    part: Shape
    chain: Chain | None
    summed: bool
    first: bool

    @property
    def grid(self) -> Shape:
        """How many chunks there are along each dim."""
        return tuple(n // p for n, p in zip(self.shape, self.part, strict=True))

    def index(self, stored: memoryview) -> list[tuple[int, int]]:
        """Offset and length of each chunk, in row-major order.

        Raises
        ------
        ValueError
            If the index is damaged, or a chunk isn't there: others would read zeros in its place.
        """
        nbytes = _ENTRY.size * math.prod(self.grid)
        whole = nbytes + _CRC * self.summed
        if len(stored) < whole:
            raise ValueError(f"its {len(stored)} bytes are fewer than its index takes")
        index = stored[:whole] if self.first else stored[len(stored) - whole :]
        found = list(_ENTRY.iter_unpack(checked(index) if self.summed else index))
        for number, (offset, length) in enumerate(found):
            if offset == length == _MISSING:
                raise ValueError(f"chunk {number} of the shard is missing")
            if offset + length > len(stored):
                raise ValueError(f"chunk {number} of the shard ends behind its last byte")
        return found

    def decoded(self, stored: memoryview, dtype: np.dtype[Any]) -> Iterator[bytes | memoryview]:
        """Yield the elements of the whole shard, row-major, some at a time.

        Raises
        ------
        ValueError
            If it is damaged.
        """
        chain = self.chain
        assert chain is not None
        chunks = (stored[offset : offset + length] for offset, length in self.index(stored))
        if math.prod(self.grid[1:]) == 1:  # one after the other along the first dim
            for chunk in chunks:
                yield from self._sized(chain, chunk, dtype)
            return
        whole: NDArray[Any] = np.empty(self.shape, dtype)
        for place, chunk in zip(np.ndindex(self.grid), chunks, strict=True):
            box = tuple(slice(i * n, (i + 1) * n) for i, n in zip(place, self.part, strict=True))
            elements = np.frombuffer(b"".join(self._sized(chain, chunk, dtype)), dtype)
            whole[box] = elements.reshape(self.part)
        yield whole.reshape(-1).view(np.uint8).data

    def _sized(
        self, chain: Chain, chunk: memoryview, dtype: np.dtype[Any]
    ) -> Iterator[bytes | memoryview]:
        """The elements of one chunk, which must be as many as there are places."""
        nbytes, found = math.prod(self.part) * dtype.itemsize, 0
        for piece in chain.decoded(chunk):
            found += len(piece)
            if found > nbytes:
                break
            yield piece
        if found != nbytes:
            raise ValueError(f"a chunk of its shard has {found} bytes or more, not {nbytes}")


def checked(stored: memoryview) -> memoryview:
    """Bytes without the CRC-32C that stands behind them.

    Raises
    ------
    ValueError
        If it is wrong.
    """
    content, end = stored[: max(0, len(stored) - _CRC)], bytes(stored[-_CRC:])
    crc = importlib.import_module("awscrt.checksums").crc32c(content)
    if len(end) < _CRC or crc != int.from_bytes(end, "little"):
        raise ValueError(f"its CRC-32C is {crc:08x}, and {end[::-1].hex()} stands behind it")
    return content
