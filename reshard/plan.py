"""Which bytes must be copied where, to turn one manifest into another?

A :class:`Plan` joins a source and a target manifest (:mod:`reshard.join`). It is lazy:
:meth:`Plan.batches` makes the copies of one target file a bounded number at a time, in closed
form and whole columns at once (:mod:`reshard.overlap`), so that a plan of ten thousand tensors
over thousands of ranks is never held in memory.

Besides copies that are written there are **proofs**, read and digested only: replicas that are
not written again, and 16-bit weights that the target leaves out because its masters give them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reshard.box import Box
from reshard.copies import PROOF, Batch, Block, Message, Runs, nbytes_of
from reshard.dtypes import DType
from reshard.join import Join, Sources
from reshard.layout import FlatSpace, TensorKey
from reshard.manifest import Manifest
from reshard.overlap import ROWS, Overlap, Wanted
from reshard.ruler import ALL, Ints, Pieces, cut_at, pick, slices
from reshard.store import ShardStore

__all__ = ["PROOF", "Batch", "Block", "Message", "Plan", "Runs"]


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The rows of one store (chunks or entries) that lie in one target file."""

    space: int
    state: str
    rows: Ints


class Plan:
    """The copies that turn one manifest into another.

    Parameters
    ----------
    source, target
        The checkpoints; the target's files needn't exist.
    origin
        Target tensor to source tensor, where it isn't the same key.
    casts
        Target tensors whose element type may differ from their source's.
    proofs
        Pairs (tensor, from): source tensor ``tensor`` must equal ``from`` cast to its type.
    replicas
        ``"equal"``: replica k is made of the source's replica k, and replicas that the target
        doesn't take are read and compared; ``"first"``: all are made of the first, and the
        others are left unread.

    Raises
    ------
    NotFoundError
        If the source lacks a tensor of the target.
    InconsistentError
        If shapes differ.
    RequestError
        If element types differ and a cast wasn't allowed, or isn't one between floating-point
        types.
    IncompleteError
        If a tensor has a hole.
    """

    def __init__(
        self,
        source: Manifest,
        target: Manifest,
        *,
        origin: Mapping[TensorKey, TensorKey] | None = None,
        casts: frozenset[TensorKey] | set[TensorKey] = frozenset(),
        proofs: Sequence[tuple[TensorKey, TensorKey]] = (),
        replicas: str = "equal",
    ) -> None:
        self.source = source
        self.target = target
        self.origin = dict(origin or {})
        self.casts = frozenset(casts)
        self.join = Join(
            source,
            target,
            origin=self.origin,
            casts=self.casts,
            proofs=proofs,
            replicas=replicas,
        )
        self._overlap = Overlap(self.join)
        self._parts = self._parts_of_files()

    @property
    def files(self) -> range:
        """Indices of the target's files."""
        return range(len(self.target.files))

    @property
    def messages(self) -> Sequence[Message]:
        """What digests are taken of."""
        return self.join.messages

    @property
    def derived(self) -> Sequence[tuple[int, TensorKey, TensorKey]]:
        """What must be the rounding of what: (message with the rounding, tensor, from)."""
        return self.join.derived

    @property
    def copies_of(self) -> Sequence[TensorKey]:
        """The source tensor of each replica that is read only to be compared with the others."""
        return self.join.copies_of

    def source_key(self, key: TensorKey) -> TensorKey:
        """The source tensor that a target tensor is made of."""
        return self.origin.get(key, key)

    def batches(self, file: int) -> Iterator[Batch]:
        """The copies into one target file, a bounded number at a time.

        Parameters
        ----------
        file
            Index of the target file.
        """
        for part in self._parts[file]:
            space = self.target.space(part.space)
            store = self.target.stores[space.name, part.state]
            sources = self.join.sources[part.space, part.state]
            dtype = space.states[part.state]
            if isinstance(store, ShardStore):
                for chunk in part.rows.tolist():
                    yield from self._chunk(file, space, store, dtype, sources, chunk)
            else:
                rows = part.rows[space.ruler.numel[part.rows] > 0]
                rows = rows[np.argsort(store.offsets[rows], kind="stable")]
                pieces = _whole(rows, space.ruler.numel[rows])
                yield from self._copies(file, sources, dtype, pieces, store.offsets[rows])

    def proofs(self) -> Iterator[Batch]:
        """Copies that are read and digested only (their target file is :data:`PROOF`)."""
        sources = self.join.read_only
        kinds = [cover.tensor.dtype for cover in sources.covers]
        for dtype in dict.fromkeys(kinds):
            rows = [
                row
                for row, cover in enumerate(sources.covers)
                if kinds[row] == dtype and cover.tensor.numel
            ]
            numel = np.array([sources.covers[row].tensor.numel for row in rows], np.int64)
            pieces = _whole(np.array(rows, np.int64), numel)
            yield from self._copies(PROOF, sources, dtype, pieces, np.zeros_like(numel))

    # -- cutting the target -------------------------------------------------------------------

    def _parts_of_files(self) -> list[list[_Part]]:
        parts: list[list[_Part]] = [[] for _ in self.target.files]
        for index, space in enumerate(self.target.layout.spaces):
            for state in space.states:
                store = self.target.stores[space.name, state]
                assert isinstance(store, ShardStore) or store.strides is None, space.name
                order = np.argsort(store.files, kind="stable")
                for rows in slices(store.files[order], 1):
                    file = int(store.files[order[rows.start]])
                    parts[file].append(_Part(index, state, order[rows]))
        return parts

    def _chunk(
        self,
        file: int,
        space: FlatSpace,
        store: ShardStore,
        dtype: DType,
        sources: Sources,
        chunk: int,
    ) -> Iterator[Batch]:
        shard, within = divmod(chunk, store.chunks_per_shard)
        low, offset = within * store.chunk, int(store.offsets[chunk])
        pieces = space.ruler.shard(shard)
        if store.chunks_per_shard > 1:
            pieces = _clip(pieces, low, low + store.chunk)
        local = pieces.local - low
        begin, count = _between(local, pieces.count, store.chunk)
        if len(begin):
            gaps = (offset + nbytes_of(dtype, begin), nbytes_of(dtype, count))
            yield Batch(file, dtype, dtype, gaps=gaps)
        yield from self._copies(file, sources, dtype, pieces, offset + nbytes_of(dtype, local))

    # -- finding the source's bytes -----------------------------------------------------------

    def _copies(
        self, file: int, sources: Sources, dtype: DType, pieces: Pieces, target: Ints
    ) -> Iterator[Batch]:
        only = sources.distinct[0] if len(sources.distinct) == 1 else None
        stores = pick(sources.store, pieces.entry) if only is None else None
        for store in sources.distinct:
            rows = ALL if stores is None else np.flatnonzero(stores == store)
            some, places = pieces.take(rows), pick(target, rows)
            if store < 0:
                yield from self._searched(file, sources, dtype, some, places)
            else:
                yield from self._direct(file, store, sources, dtype, some, places)

    def _direct(
        self,
        file: int,
        store: int,
        sources: Sources,
        dtype: DType,
        pieces: Pieces,
        target: Ints,
    ) -> Iterator[Batch]:
        index, state = self.join.stores[store]
        source_dtype = self.source.space(index).states[state]
        for some, places in _portions(sources, dtype, pieces, target):
            runs = self._overlap.direct(store, sources, dtype, some, places)
            yield Batch(file, source_dtype, dtype, runs)

    def _searched(
        self, file: int, sources: Sources, dtype: DType, pieces: Pieces, target: Ints
    ) -> Iterator[Batch]:
        waiting: dict[DType, _Waiting] = {}
        columns = (pieces.entry, pieces.start, pieces.count, target)
        for row, start, count, place in zip(*(c.tolist() for c in columns), strict=True):
            cover, box = sources.covers[row], sources.boxes[row]
            whole = Box.whole(cover.tensor.shape) if box is None else box
            wanted = Wanted(whole, start, count, place, dtype, int(sources.message[row]))
            kind = cover.tensor.dtype
            some = waiting.setdefault(kind, _Waiting(file, kind, dtype))
            for copies in self._overlap.searched(cover, wanted):
                if some.add(copies) >= ROWS:
                    yield some.batch()
        yield from (some.batch() for some in waiting.values() if some.size)


def _portions(
    sources: Sources, dtype: DType, pieces: Pieces, target: Ints
) -> Iterator[tuple[Pieces, Ints]]:
    """So much of some pieces at a time that its copies fill a batch."""
    density = pick(sources.density, pieces.entry)
    most = pieces.count * density + 2
    if most.sum() <= ROWS:
        yield pieces, target
        return
    if most.max() > ROWS:
        # whole bytes of any element type are left
        size = np.maximum(ROWS / np.maximum(density, 1e-18), 8).astype(np.int64) // 8 * 8
        cut = cut_at(np.zeros_like(pieces.count), pieces.count, size)
        some = pieces.take(cut.query)
        target = pick(target, cut.query) + nbytes_of(dtype, cut.moved)
        start, local = some.start + cut.moved, some.local + cut.moved
        pieces = Pieces(some.entry, start, cut.count, some.shard, local)
        most = cut.count * pick(density, cut.query) + 2
    for rows in slices(np.cumsum(most).astype(np.int64), ROWS):
        yield pieces.take(rows), target[rows]


class _Waiting:
    """Copies that are gathered for a batch."""

    def __init__(self, file: int, source: DType, target: DType) -> None:
        self._file, self._source, self._target = file, source, target
        self._runs: list[Runs] = []
        self._blocks: list[Block] = []
        self.size = 0

    def add(self, copies: Runs | Block) -> int:
        """Add copies and say how many there are now."""
        if isinstance(copies, Runs):
            self._runs.append(copies)
            self.size += len(copies)
        else:
            self._blocks.append(copies)
            self.size += 1
        return self.size

    def batch(self) -> Batch:
        """The batch, and begin anew."""
        runs = Runs.joined(self._runs)
        batch = Batch(self._file, self._source, self._target, runs, tuple(self._blocks))
        self._runs, self._blocks, self.size = [], [], 0
        return batch


def _whole(entry: Ints, numel: Ints) -> Pieces:
    """Entries as pieces that are whole; what shard they are on isn't asked."""
    zero = np.zeros_like(entry)
    return Pieces(entry, zero, numel, zero, zero)


def _clip(pieces: Pieces, low: int, high: int) -> Pieces:
    """The pieces, cut to local elements ``[low, high)``."""
    start = np.maximum(pieces.local, low)
    stop = np.minimum(pieces.local + pieces.count, high)
    keep = np.flatnonzero(stop > start)
    moved = (start - pieces.local)[keep]
    some = pieces.take(keep)
    return Pieces(
        some.entry, some.start + moved, (stop - start)[keep], some.shard, some.local + moved
    )


def _between(local: Ints, count: Ints, length: int) -> tuple[Ints, Ints]:
    """What lies between pieces and after the last, up to ``length``: (first element, elements)."""
    begin, end = np.append(0, local + count), np.append(local, length)
    keep = np.flatnonzero(end > begin)
    return begin[keep], (end - begin)[keep]
