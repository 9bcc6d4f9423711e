"""How many ranks wrote a distributed checkpoint, and which of them held a chunk?

The metadata don't say. Data files are named by the rank that wrote them, and FSDP cuts dim 0 by
``torch.chunk``'s rule, which is tried for as many ranks as wrote, then for the divisors of that
number (HSDP: replicas share the writing). What fits no rule is owned by whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from reshard.formats._dcp_metadata import Chunk, Index, Stored


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks.

    Parameters
    ----------
    shards
        Size of the axis over which tensors are cut.
    replicas
        How many copies of each shard there were.
    rows
        Whether all tensors are cut by rows, as FSDP2 does.
    cut
        Whether any tensor is cut.
    """

    shards: int
    replicas: int
    rows: bool
    cut: bool

    def owner(self, stored: Stored, chunk: Chunk) -> int:
        """The shard that holds a chunk."""
        if not self.rows:
            return (chunk.blobs[0].rank or 0) % self.shards
        if not stored.shape:
            return 0
        step = -(-stored.shape[0] // self.shards)
        return chunk.box.start[0] // step if step else 0


def mesh_of(index: Index) -> Mesh:
    """Find out what the checkpoint was sharded over."""
    ranks = {blob.rank for _, blob in index.blobs()}
    known = [rank for rank in ranks if rank is not None]
    world = max(known, default=0) + 1
    tensors = [stored for stored in index.tensors.values() if len(stored.chunks) > 1]
    cut = any(_is_cut(stored) for stored in tensors)
    if not cut and not any(len(s.chunks) > 1 for s in tensors):
        return Mesh(1, world, True, False)
    most = max((len(_full(s)) for s in tensors), default=1)
    for shards in _divisors(world):
        if shards >= most and all(_by_rows(s, shards) for s in tensors):
            return Mesh(shards, world // shards, True, True)
    return Mesh(world, 1, False, True)


def _full(stored: Stored) -> list[Chunk]:
    """The chunks that hold elements."""
    return [c for c in stored.chunks if c.box.numel]


def _is_cut(stored: Stored) -> bool:
    return len(_full(stored)) > 1


def _divisors(number: int) -> Iterator[int]:
    """From the number itself down."""
    return (n for n in range(number, 0, -1) if number % n == 0)


def _by_rows(stored: Stored, shards: int) -> bool:
    """Whether a tensor is cut as ``torch.chunk`` cuts dim 0."""
    if not stored.shape:
        return True
    rows, *rest = stored.shape
    step = -(-rows // shards)
    starts: Iterable[int] = range(0, rows, step) if step else ()
    expected = [((a, *(0 for _ in rest)), (min(a + step, rows), *rest)) for a in starts]
    return [(c.box.start, c.box.stop) for c in _full(stored)] == expected or not _full(stored)
