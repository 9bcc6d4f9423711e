"""Whose master lies where in a bucket? Told by its content: rounded, it is the weight.

A bucket is walked from its beginning; at each place exactly one of the weights that are left has
to fit, element for element. None, or several, is an error: nothing is guessed. What lies between
is padding, which is memory that was never written. Only the beginnings of weights are kept in
memory; the rest is compared block by block.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.dtypes import BY_NAME, DType
from reshard.errors import CorruptError, IncompleteError, ReshardError, UnsupportedError
from reshard.formats._megatron_buckets import Bucket, Line, Match, Shard, states
from reshard.formats._megatron_parts import Part, Piece
from reshard.layout import PARAM, TensorKey
from reshard.source import source_error

ALIGN = 64
"""Elements to a multiple of which the beginning of a parameter is rounded."""

_HEAD = 32
_BLOCK = 1 << 18
_FLOATS = ("bfloat16", "float16", "float32")
_HINT = "save it with the optimizer format fully_reshardable, which stores names"

_Head = tuple[str, int, bytes]  # type, length and content of the beginning of a weight


def match(
    buckets: Iterable[Bucket],
    weights: Mapping[TensorKey, Part],
    paths: Mapping[int, Path],
    where: Path,
) -> dict[TensorKey, Part]:
    """The optimizer's states of all parameters in buckets.

    Parameters
    ----------
    buckets
        All buckets.
    weights
        The model's tensors by name and state.
    paths
        Index of a file to where it lies.
    where
        What errors name.

    Raises
    ------
    IncompleteError
        If something in a bucket is no weight of the model, or no bucket has a weight.
    UnsupportedError
        If several weights fit one place.
    """
    files = _Files(paths)
    shards = [
        Shard(name, part, piece)
        for (name, state), part in weights.items()
        if state == PARAM and part.dtype.name in _FLOATS
        for piece in part.pieces
    ]
    heads = _heads(shards, files)
    groups: dict[str, list[Bucket]] = {}
    for bucket in buckets:
        groups.setdefault(bucket.group, []).append(bucket)
    found: dict[Shard, list[Match]] = {}
    for some in groups.values():
        used: set[Shard] = set()
        for bucket in some:
            for one in _Walk(bucket, heads, used, files, where).matches():
                found.setdefault(one.shard, []).append(one)
    for shard in shards:
        if shard not in found:
            raise IncompleteError(
                f"the optimizer has no masters of {shard}: nothing that is left in its buckets "
                "rounds to that weight",
                where=where,
                hint=f"it is frozen, or the optimizer's part was lost; {_HINT}",
            )
    return states(found)


def _heads(shards: Iterable[Shard], files: _Files) -> dict[_Head, list[Shard]]:
    found: dict[_Head, list[Shard]] = {}
    for shard in shards:
        if not shard.numel:
            continue
        if shard.piece.strides is not None:
            raise UnsupportedError(f"{shard.name} isn't stored row-major")
        length = min(_HEAD, shard.numel)
        head = files.read(shard.piece, shard.part.dtype, 0, length)
        found.setdefault((shard.part.dtype.name, length, head.tobytes()), []).append(shard)
    return found


class _Walk:
    """Goes through a bucket."""

    def __init__(
        self,
        bucket: Bucket,
        heads: Mapping[_Head, list[Shard]],
        used: set[Shard],
        files: _Files,
        where: Path,
    ) -> None:
        self._bucket = bucket
        self._heads = heads
        self._used = used
        self._files = files
        self._where = where
        self._kinds = sorted({(dtype, length) for dtype, length, _ in heads})
        self._master = Line(bucket.master)

    def matches(self) -> Iterator[Match]:
        """Every parameter of the bucket, in the order in which they lie."""
        total = self._bucket.master.shape[0]
        at = 0
        last: Shard | None = None
        while at < total:
            aligned = -(-at // ALIGN) * ALIGN
            # A rank may have several boxes of a parameter (gate and up), without padding between.
            near = [] if last is None or at == aligned else self._fitting(at, last.name)
            far = self._fitting(aligned, None) if aligned < total else []
            places = [(shard, at) for shard in near] + [(shard, aligned) for shard in far]
            if aligned >= total and not places:
                return
            if len(places) != 1:
                raise self._wrong(aligned, [shard for shard, _ in places])
            ((last, begin),) = places
            self._used.add(last)
            yield Match(last, self._bucket, begin)
            at = begin + last.numel

    def _wrong(self, at: int, fitting: list[Shard]) -> ReshardError:
        where = f"element {at} of {self._bucket.group}.{self._bucket.name}"
        if not fitting:
            return IncompleteError(
                f"no weight of the model that is left is the rounding of what lies at {where}",
                where=self._where,
                hint="model and optimizer are of different steps, or weights are kept in another "
                f"way than as bf16, fp16 or fp32; {_HINT}",
            )
        names = ", ".join(map(str, fitting[:4]))
        return UnsupportedError(
            f"whose state lies at {where} can't be told: {len(fitting)} weights are the rounding "
            f"of it ({names}), and this optimizer format stores no names",
            where=self._where,
            hint=_HINT,
        )

    def _fitting(self, at: int, name: str | None) -> list[Shard]:
        found: list[Shard] = []
        left = self._bucket.master.shape[0] - at
        for kind, length in self._kinds:
            if length > left:
                continue
            head = self._rounded(at, length, kind)
            for shard in self._heads.get((kind, length, head.tobytes()), ()):
                if shard in self._used or shard.numel > left or name not in (None, shard.name):
                    continue
                if self._equal(shard, at):
                    found.append(shard)
        return found

    def _equal(self, shard: Shard, at: int) -> bool:
        kind = shard.part.dtype
        for begin in range(0, shard.numel, _BLOCK):
            count = min(_BLOCK, shard.numel - begin)
            weight = self._files.read(shard.piece, kind, begin, count)
            if self._rounded(at + begin, count, kind.name).tobytes() != weight.tobytes():
                return False
        return True

    def _rounded(self, at: int, count: int, kind: str) -> NDArray[Any]:
        """Masters, rounded to a type of weights."""
        master = self._bucket.master
        found = np.empty(count, master.dtype.numpy)
        for piece, low, high in self._master.over(at, at + count):
            begin = piece.box.start[0]
            some = self._files.read(piece, master.dtype, low - begin, high - low)
            found[low - at : high - at] = some
        with np.errstate(over="ignore", invalid="ignore"):  # padding may be anything
            return found.astype(BY_NAME[kind].numpy)


class _Files:
    """Reads elements."""

    def __init__(self, paths: Mapping[int, Path]) -> None:
        self._paths = paths

    def read(self, piece: Piece, dtype: DType, first: int, count: int) -> NDArray[Any]:
        """Elements of a piece that is row-major."""
        path = self._paths[piece.file]
        nbytes = dtype.nbytes(count)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = os.pread(fd, nbytes, piece.offset + dtype.nbytes(first))
            finally:
                os.close(fd)
        except OSError as error:
            raise source_error(error, path) from error
        if len(data) != nbytes:
            raise CorruptError("is shorter than it was", where=path)
        return np.frombuffer(data, dtype.numpy)
