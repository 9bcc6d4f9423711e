"""What do all backends of Megatron-Core's checkpoints give? Tensors in pieces, by key.

A **part** is a tensor as it is stored: its key, shape, and pieces, each a box with the place of its
bytes. Two things are stored otherwise, and put right here: shards that were flattened and cut
anywhere (``flattened_range``), and pieces of several layers in one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from reshard.box import Box, Shape, strides_of
from reshard.dtypes import DType
from reshard.errors import CorruptError, UnsupportedError
from reshard.torchfile import TorchFile


class Piece(NamedTuple):
    """A box of a tensor and where its bytes lie.

    Parameters
    ----------
    box
        The region.
    owner
        The rank that wrote it.
    file, offset
        Index of the file, byte of the first element.
    strides
        In elements; ``None`` for row-major.
    """

    box: Box
    owner: int
    file: int
    offset: int
    strides: Shape | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor as it is stored.

    Parameters
    ----------
    key
        What the checkpoint calls it.
    shape, dtype
        Of the whole.
    pieces
        Each box once.
    copies
        Further copies of some pieces, which must be equal.
    """

    key: str
    shape: Shape
    dtype: DType
    pieces: tuple[Piece, ...]
    copies: tuple[tuple[Piece, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Contents:
    """All that a checkpoint holds.

    Parameters
    ----------
    tensors
        By key.
    objects
        For each key of a sharded object, its grid, and what opens each shard, in row-major order.
    common
        The state that all ranks share.
    world
        How many ranks wrote, as far as that can be told.
    paths
        Index of a file to where it lies.
    """

    tensors: Mapping[str, Part]
    objects: Mapping[str, Objects]
    common: TorchFile
    world: int
    paths: Mapping[int, Path]


@dataclass(frozen=True, slots=True)
class Objects:
    """A sharded object: the shape of its grid and one opener for each of its shards."""

    shape: Shape
    shards: tuple[Callable[[], TorchFile], ...]


def run(box: Box, start: int, stop: int, piece: Piece, dtype: DType) -> Iterator[Piece]:
    """The boxes of a run ``[start, stop)`` of a box, whose first byte is the piece's."""
    for at, region in box.split(start, stop):
        yield piece._replace(box=region, offset=piece.offset + dtype.nbytes(at - start))


def unflattened(part: Part, shape: Shape, where: Path) -> Part:
    """Undo what Megatron-Core did to a tensor of which ranks hold flat ranges.

    A tensor [X, Y] whose tensor-parallel shards are [x, y] was stored as [X/x, Y/y, x*y], so that
    a range of a shard is a box.

    Parameters
    ----------
    part
        As it is stored.
    shape
        What it was before.
    where
        What errors name.

    Raises
    ------
    CorruptError
        If the two shapes don't fit together.

    Notes
    -----
    Source: Megatron-Core 0.12, ``dist_checkpointing/strategies/resharding.py``.
    """
    counts = part.shape[:-1]
    fits = len(counts) == len(shape) and all(
        c and n % c == 0 for c, n in zip(counts, shape, strict=True)
    )
    local = tuple(n // c for c, n in zip(counts, shape, strict=True)) if fits else ()
    whole = Box.whole(local)
    if not fits or part.shape[-1] != whole.numel:
        raise CorruptError(
            f"{part.key} is stored as {list(part.shape)}, which {list(shape)} can't be made of",
            where=where,
        )
    pieces: list[Piece] = []
    for piece in part.pieces:
        *inside, length = piece.box.shape
        if any(n != 1 for n in inside) or piece.strides is not None:
            raise UnsupportedError(f"{part.key} has a piece of several shards", where=where)
        *index, start = piece.box.start
        low = tuple(i * n for i, n in zip(index, local, strict=True))
        box = Box(low, tuple(a + n for a, n in zip(low, local, strict=True)))
        pieces += run(box, start, start + length, piece, part.dtype)
    return replace(part, shape=shape, pieces=tuple(pieces))


def layers(part: Part) -> dict[int, Part]:
    """Take a tensor of all layers apart along dim 0."""
    found: dict[int, list[Piece]] = {}
    for piece in part.pieces:
        step = (piece.strides or strides_of(piece.box.shape))[0]
        box = Box(piece.box.start[1:], piece.box.stop[1:])
        inner = None if piece.strides is None else piece.strides[1:]
        first = piece.box.start[0]
        for layer in range(first, piece.box.stop[0]):
            offset = piece.offset + part.dtype.nbytes(step * (layer - first))
            one = piece._replace(box=box, offset=offset, strides=inner)
            found.setdefault(layer, []).append(one)
    return {
        layer: replace(part, shape=part.shape[1:], pieces=tuple(pieces))
        for layer, pieces in sorted(found.items())
    }


def joined(first: Part, second: Part, key: str) -> Part:
    """Lay two tensors of one shape behind each other, along dim 0."""
    rows, *rest = first.shape

    def moved(piece: Piece) -> Piece:
        start, stop = piece.box.start, piece.box.stop
        box = Box((start[0] + rows, *start[1:]), (stop[0] + rows, *stop[1:]))
        return piece._replace(box=box)

    pieces = (*first.pieces, *map(moved, second.pieces))
    return replace(first, key=key, shape=(2 * rows, *rest), pieces=pieces)
