"""Which bytes must be copied where, to turn one manifest into another?

A :class:`Plan` joins a source and a target manifest (:mod:`reshard.join`). It is lazy:
:meth:`Plan.batches` makes the copies of one target file a bounded number at a time, in closed
form and whole columns at once (:mod:`reshard.crossing`), so that a plan of ten thousand tensors
over thousands of ranks is never held in memory. What the states of a space have in common is
found once, where their files are asked for in the order of :attr:`Plan.files`.

Besides copies that are written there are **proofs**, read and digested only: replicas that are
not written again, and 16-bit weights that the target leaves out because its masters give them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from reshard.box import Box
from reshard.collector import collector_paused
from reshard.copies import NO_GAPS, PROOF, Batch, Block, Message, Runs, nbytes_of
from reshard.crossing import Crossing, copies_of_entries, crossing
from reshard.dtypes import DType
from reshard.frames import Frames, Sources
from reshard.join import Join
from reshard.layout import FlatSpace, TensorKey
from reshard.manifest import Manifest
from reshard.overlap import ROWS, Overlap, Wanted
from reshard.parts import Parts
from reshard.recent import Recent
from reshard.ruler import Ints, Pieces, cut_at, pick, slices
from reshard.slabs import APART, Slabs
from reshard.store import EntryStore, ShardStore, Store

__all__ = ["PROOF", "Batch", "Block", "Message", "Plan", "Runs"]

KEPT = 4
"""How many of the things that states share are kept until the next state asks for them."""


@dataclass(frozen=True, slots=True, eq=False)
class _Goal:
    """One state of a space of the target.

    Parameters
    ----------
    index, space
        The space.
    dtype, store
        The state's element type, and where it will lie.
    sources
        Where its boxes come from.
    """

    index: int
    space: FlatSpace
    dtype: DType
    store: Store
    sources: Sources


@dataclass(frozen=True, slots=True, eq=False)
class _Shard:
    """What a chunk of a target's shard holds, whatever the state, in elements.

    Parameters
    ----------
    portions
        Pieces that lie in one group of the frames, few enough for a batch.
    gaps
        (first element, elements) of padding.
    """

    portions: tuple[tuple[int, Pieces], ...]
    gaps: tuple[Ints, Ints]


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

    @collector_paused()
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
        self._overlap = Overlap(source)
        self._recent = Recent(KEPT)
        self._goals = [
            _Goal(
                index,
                space,
                dtype,
                target.stores[space.name, state],
                self.join.sources[index, state],
            )
            for index, space in enumerate(target.layout.spaces)
            for state, dtype in space.states.items()
        ]
        self._slabs = Recent(len(self._goals) + 1)  # one a state, and one of the proofs
        stores = [goal.store for goal in self._goals]
        assert all(isinstance(store, ShardStore) or store.strides is None for store in stores)
        self._parts = Parts(stores)

    @cached_property
    def files(self) -> Sequence[int]:
        """Indices of the target's files, those of the states of one shard after each other."""
        spaces = [goal.index for goal in self._goals]
        return self._parts.ordered(spaces, len(self.target.files))

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
        for number, rows in self._parts.of(file):
            goal = self._goals[number]
            if isinstance(goal.store, ShardStore):
                for chunk in rows.tolist():
                    yield from self._chunk(file, goal, goal.store, chunk)
            else:
                yield from self._entries(file, goal, goal.store, rows)

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
            for portion in _portions(sources.frames, pieces):
                yield from self._copies(PROOF, sources, dtype, portion, 0)

    # -- cutting the target -------------------------------------------------------------------

    def _chunk(self, file: int, goal: _Goal, store: ShardStore, chunk: int) -> Iterator[Batch]:
        frames, dtype = goal.sources.frames, goal.dtype
        key = (goal.index, frames, store.part, store.chunk, chunk)
        shard = self._recent.get(key, lambda: _shard(goal.space, frames, store, chunk))
        offset = int(store.offsets[chunk])
        begin, count = shard.gaps
        if len(begin):
            gaps = (offset + nbytes_of(dtype, begin), nbytes_of(dtype, count))
            yield Batch(file, dtype, dtype, gaps=gaps)
        for number, portion in enumerate(shard.portions):
            yield from self._copies(file, goal.sources, dtype, portion, offset, (*key, number))

    def _entries(self, file: int, goal: _Goal, store: EntryStore, rows: Ints) -> Iterator[Batch]:
        numel = goal.space.ruler.numel
        rows = rows[numel[rows] > 0]
        rows = rows[np.argsort(store.offsets[rows], kind="stable")]
        for portion in _portions(goal.sources.frames, _whole(rows, numel[rows])):
            yield from self._copies(file, goal.sources, goal.dtype, portion, store.offsets)

    # -- finding the source's bytes -----------------------------------------------------------

    def _copies(
        self,
        file: int,
        sources: Sources,
        dtype: DType,
        portion: tuple[int, Pieces],
        base: Ints | int,
        key: Hashable = None,
    ) -> Iterator[Batch]:
        """Copies of some pieces whose shard begins at byte ``base`` (or one base an entry).

        What doesn't depend on the state is kept under ``key`` for the next one.
        """
        group, pieces = portion
        if group < 0:
            begin = base if isinstance(base, int) else pick(base, pieces.entry)
            target = begin + nbytes_of(dtype, pieces.local)
            slabs = self._slabs_of(sources)
            on_line = pick(slabs.line, pieces.entry) != APART
            if on_line.any():
                rows = np.flatnonzero(on_line)
                yield from self._cut_slabs(
                    file, sources, dtype, pieces.take(rows), target[rows], slabs
                )
            if not on_line.all():
                rows = np.flatnonzero(~on_line)
                yield from self._searched(file, sources, dtype, pieces.take(rows), target[rows])
            return

        def cross() -> Crossing:
            return crossing(self.source, sources.frames, group, pieces)

        found = cross() if key is None else self._recent.get(key, cross)
        index, state = sources.stores[group]
        space = self.source.space(index)
        kind, store = space.states[state], self.source.stores[space.name, state]
        yield Batch(file, kind, dtype, found.runs(kind, dtype, store, sources.message, base))

    def _slabs_of(self, sources: Sources) -> Slabs:
        return self._slabs.get(id(sources), lambda: Slabs(self.source, sources))

    def _cut_slabs(
        self,
        file: int,
        sources: Sources,
        dtype: DType,
        pieces: Pieces,
        target: Ints,
        slabs: Slabs,
    ) -> Iterator[Batch]:
        message = pick(sources.message, pieces.entry)
        for some in slabs.cut(pieces, ROWS):
            index, state = some.part
            space = self.source.space(index)
            runs = copies_of_entries(
                space,
                state,
                self.source.stores[space.name, state],
                (some.entry, some.start, some.count),
                (dtype, target[some.piece], some.moved),
                message[some.piece],
                some.at,
            )
            yield Batch(file, space.states[state], dtype, runs)

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


def _shard(space: FlatSpace, frames: Frames, store: ShardStore, chunk: int) -> _Shard:
    """Cut a chunk out of its shard."""
    shard, within = divmod(chunk, store.chunks_per_shard)
    pieces = space.ruler.shard(shard)
    if store.chunks_per_shard > 1:
        pieces = _clip(pieces, within * store.chunk, store.chunk)
    gaps = _between(pieces.local, pieces.count, store.chunk)
    return _Shard(tuple(_portions(frames, pieces)), gaps)


def _portions(frames: Frames, pieces: Pieces) -> Iterator[tuple[int, Pieces]]:
    """Pieces by the group of the frames that they are in, and few enough for a batch."""
    for group in frames.groups:
        some = pieces
        if len(frames.groups) > 1:
            some = pieces.take(np.flatnonzero(pick(frames.group, pieces.entry) == group))
        if group < 0:
            yield group, some
        elif len(some):
            for part in _bounded(some, pick(frames.density, some.entry)):
                yield group, part


def _bounded(pieces: Pieces, density: NDArray[np.float64]) -> Iterator[Pieces]:
    """So much of some pieces at a time that its copies fill a batch."""
    if pieces.count @ density + 2 * len(pieces) <= ROWS:
        yield pieces
        return
    most = pieces.count * density + 2
    if most.max() > ROWS:
        # whole bytes of any element type are left
        size = np.maximum(ROWS / np.maximum(density, 1e-18), 8).astype(np.int64) // 8 * 8
        cut = cut_at(np.zeros_like(pieces.count), pieces.count, size)
        some = pieces.take(cut.query)
        start, local = some.start + cut.moved, some.local + cut.moved
        pieces = Pieces(some.entry, start, cut.count, some.shard, local)
        most = cut.count * pick(density, cut.query) + 2
    for rows in slices(np.cumsum(most).astype(np.int64), ROWS):
        yield pieces.take(rows)


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


def _clip(pieces: Pieces, low: int, size: int) -> Pieces:
    """The pieces' local elements ``[low, low + size)``, counted from ``low``."""
    start = np.maximum(pieces.local, low)
    stop = np.minimum(pieces.local + pieces.count, low + size)
    keep = np.flatnonzero(stop > start)
    moved = (start - pieces.local)[keep]
    some = pieces.take(keep)
    return Pieces(
        some.entry, some.start + moved, (stop - start)[keep], some.shard, some.local + moved - low
    )


def _between(local: Ints, count: Ints, length: int) -> tuple[Ints, Ints]:
    """What lies between pieces and after the last, up to ``length``: (first element, elements)."""
    if int(count.sum()) == length:
        return NO_GAPS
    begin, end = np.append(0, local + count), np.append(local, length)
    keep = np.flatnonzero(end > begin)
    return begin[keep], (end - begin)[keep]
