"""What is a copy, and what is a batch of them?

A copy takes elements from a source file to a target file. **Runs** are contiguous on both sides
and stand in columns; a **block** is strided in the source. Every copy carries its place in a
**message**: the row-major bytes of one replica of a tensor. Digests are taken of messages; since
each byte of a target's tensor is in one copy, they also prove that all of it was copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from reshard.box import Shape
from reshard.dtypes import DType
from reshard.errors import UnsupportedError
from reshard.layout import TensorKey
from reshard.ruler import Ints, Rows, cut_at, ints, pick, slices

PROOF = -1
"""The file index of copies that are read and digested, but not written."""


@dataclass(frozen=True, slots=True)
class Message:
    """The row-major bytes of one replica of a tensor, in one element type.

    Parameters
    ----------
    key
        The tensor: the target's if it is written, else the source's.
    nbytes
        Bytes of the whole tensor.
    dtype
        Its element type here.
    written
        Whether the bytes go into the target.
    counts
        Whether reading them counts for the checksums of the source's regions: no byte of the
        source may count twice.
    twin
        Index of the message of the same elements in another element type, which the same copies
        fill; -1 where there is none.
    """

    key: TensorKey
    nbytes: int
    dtype: DType
    written: bool
    counts: bool
    twin: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Copies of contiguous bytes; columns of the same length, sorted by ``target``.

    Parameters
    ----------
    file, source
        Source file and the byte in it.
    target
        The byte in the target file.
    count
        Elements.
    message, at
        The message that the bytes belong to, and the byte in it.
    """

    file: Ints
    source: Ints
    target: Ints
    count: Ints
    message: Ints
    at: Ints

    def __len__(self) -> int:
        return len(self.file)

    def take(self, rows: Rows) -> Runs:
        """Some of the rows."""
        return Runs(
            pick(self.file, rows),
            pick(self.source, rows),
            pick(self.target, rows),
            pick(self.count, rows),
            pick(self.message, rows),
            pick(self.at, rows),
        )

    def cut(self, source: DType, target: DType, nbytes: int) -> Runs:
        """The same copies in pieces of at most about ``nbytes`` bytes."""
        most = max(1, nbytes // max(source.bits, target.bits)) * 8  # whole bytes for any width
        cut = cut_at(np.zeros_like(self.count), self.count, most)
        runs = self.take(cut.query)
        return replace(
            runs,
            source=runs.source + cut.moved * source.bits // 8,
            target=runs.target + cut.moved * target.bits // 8,
            count=cut.count,
            at=runs.at + cut.moved * target.bits // 8,
        )

    @classmethod
    def chained(cls, parts: Sequence[Runs]) -> Runs:
        """The copies of all parts, in their order: not sorted where they are of several files."""
        return cls(
            np.concatenate([p.file for p in parts]),
            np.concatenate([p.source for p in parts]),
            np.concatenate([p.target for p in parts]),
            np.concatenate([p.count for p in parts]),
            np.concatenate([p.message for p in parts]),
            np.concatenate([p.at for p in parts]),
        )

    @classmethod
    def joined(cls, parts: Sequence[Runs]) -> Runs:
        """The copies of all parts, sorted by ``target``."""
        if not parts:
            return NO_RUNS
        runs = cls.chained(parts)
        return runs.take(np.argsort(runs.target, kind="stable"))


NO_RUNS = Runs(*(ints([]) for _ in range(6)))
NO_GAPS = ints([]), ints([])


@dataclass(frozen=True, slots=True)
class Block:
    """A strided region of a source file that becomes contiguous bytes of the target.

    Parameters
    ----------
    file, source
        Source file and the byte of the first element.
    shape, strides
        Sizes, and strides in the source in bytes.
    target
        The byte in the target file.
    message
        The message that the elements belong to.
    at, steps
        The byte in the message of the first element, and the message's strides in bytes.
    """

    file: int
    source: int
    shape: Shape
    strides: Shape
    target: int
    message: int
    at: int
    steps: Shape

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def reach(self) -> int:
        """Bytes from the first element to the last one in the source."""
        return sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    def cut(self, target: DType, most: int) -> Iterator[Block]:
        """The same elements in blocks of at most ``most`` elements, in order."""
        if self.count <= most:
            yield self
            return
        inner = self.count // self.shape[0]
        rows = max(1, most // inner)
        for row in range(0, self.shape[0], rows):
            some = min(rows, self.shape[0] - row)
            part = replace(
                self,
                source=self.source + row * self.strides[0],
                shape=(some, *self.shape[1:]),
                target=self.target + target.nbytes(row * inner),
                at=self.at + row * self.steps[0],
            )
            yield from (part,) if inner <= most else part._row().cut(target, most)

    def _row(self) -> Block:
        """The block without its first dim, which has size 1."""
        assert self.shape[0] == 1
        return replace(self, shape=self.shape[1:], strides=self.strides[1:], steps=self.steps[1:])


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Some copies into one target file.

    Parameters
    ----------
    target_file
        Index of the target file, or :data:`PROOF`.
    source_dtype, target_dtype
        Equal unless the copies cast.
    runs, blocks
        The copies.
    gaps
        (first byte, bytes) of padding in the target: zeros that no copy fills.
    """

    target_file: int
    source_dtype: DType
    target_dtype: DType
    runs: Runs = NO_RUNS
    blocks: tuple[Block, ...] = ()
    gaps: tuple[Ints, Ints] = NO_GAPS

    @property
    def nbytes(self) -> int:
        """Bytes that the batch puts into the target."""
        count = int(self.runs.count.sum()) + sum(b.count for b in self.blocks)
        return self.target_dtype.nbytes(count)

    def shares(self, nbytes: int) -> Iterator[Batch]:
        """The same copies in batches of about ``nbytes`` bytes, so that workers can share them."""
        if self.nbytes <= nbytes + nbytes // 2:
            yield self
            return
        runs = self.runs.cut(self.source_dtype, self.target_dtype, nbytes)
        filled = np.cumsum(runs.count) * self.target_dtype.bits // 8
        for rows in slices(filled, nbytes):
            yield self._only(runs=runs.take(rows))
        for block in self.blocks:
            for part in block.cut(self.target_dtype, nbytes // self.target_dtype.itemsize):
                yield self._only(blocks=(part,))
        if len(self.gaps[0]):
            yield Batch(self.target_file, self.source_dtype, self.target_dtype, gaps=self.gaps)

    def _only(self, runs: Runs = NO_RUNS, blocks: tuple[Block, ...] = ()) -> Batch:
        return Batch(self.target_file, self.source_dtype, self.target_dtype, runs, blocks)


def nbytes_of(dtype: DType, elements: Ints) -> Ints:
    """Bytes of numbers of elements.

    Raises
    ------
    UnsupportedError
        If elements narrower than a byte don't fill whole bytes.
    """
    if dtype.bits % 8 == 0:
        return elements * (dtype.bits // 8)
    bits = elements * dtype.bits
    if (bits % 8).any():
        raise UnsupportedError(f"a cut inside a byte of {dtype} elements")
    return bits // 8
