"""Where do pieces of a target lie in the source, where both have the same boxes?

The source's shards and chunks cut them: a few operations over whole columns (:func:`crossing`),
in elements, so that the result serves every state that lies alike. :meth:`Crossing.runs` gives
the bytes of one state.
"""

from __future__ import annotations

from dataclasses import dataclass

from reshard.copies import Runs, nbytes_of
from reshard.dtypes import DType
from reshard.frames import Frames
from reshard.layout import FlatSpace
from reshard.manifest import Manifest
from reshard.ruler import ALL, Ints, Pieces, Rows, cut_at, pick, pick_again
from reshard.store import EntryStore, Store


@dataclass(frozen=True, slots=True, eq=False)
class Located:
    """Where runs of source entries lie, in pieces that are contiguous in a file.

    Parameters
    ----------
    query
        The run that each piece is of.
    start, count
        Its first element in the entry, and its length.
    extent, within
        The chunk of the store (the entry, where each is an extent of its own), and the element
        of it at which the piece begins.
    """

    query: Rows
    start: Ints
    count: Ints
    extent: Ints
    within: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Crossing:
    """Pieces of a target's space, cut where a space of the source is cut; columns in elements.

    Parameters
    ----------
    entry
        The target's entry that each piece is of.
    local
        The element of the target's shard at which it begins.
    at
        The element of its message at which it begins.
    count
        Its length.
    extent, within
        Where it lies in the source; see :class:`Located`.
    """

    entry: Ints
    local: Ints
    at: Ints
    count: Ints
    extent: Ints
    within: Ints

    def runs(
        self, source: DType, target: DType, store: Store, message: Ints, base: Ints | int
    ) -> Runs:
        """The copies of one state.

        Parameters
        ----------
        source, target
            Its element types.
        store
            Where it lies in the source.
        message
            The message of each of the target's entries.
        base
            The byte in the target file at which element 0 of the shard lies, or one an entry.
        """
        file, byte = bytes_at(store, source, self.extent, self.within)
        begin = base if isinstance(base, int) else pick(base, self.entry)
        return Runs(
            file=file,
            source=byte,
            target=begin + nbytes_of(target, self.local),
            count=self.count,
            message=pick(message, self.entry),
            at=nbytes_of(target, self.at),
        )


def bytes_at(store: Store, dtype: DType, extent: Ints, within: Ints) -> tuple[Ints, Ints]:
    """Files, and bytes in them, of elements of a store's extents."""
    return pick(store.files, extent), pick(store.offsets, extent) + nbytes_of(dtype, within)


def copies_of_entries(
    space: FlatSpace,
    state: str,
    store: Store,
    runs: tuple[Ints, Ints, Ints],
    target: tuple[DType, Ints | int, Ints],
    message: Ints,
    at: Ints,
) -> Runs:
    """Copies of runs of a source's entries, cut where the source is cut.

    Parameters
    ----------
    space, state, store
        Where they lie.
    runs
        Entry, first element and length of each.
    target
        The target's element type, the byte from which elements are counted there (one a run, or
        one for all), and the element at which each run begins.
    message, at
        The message of each run, and the element of it.
    """
    entry, start, count = runs
    dtype, base, first = target
    found = located(space, store, entry, start, count)
    query, moved = found.query, found.start - pick(start, found.query)
    file, byte = bytes_at(store, space.states[state], found.extent, found.within)
    begin = base if isinstance(base, int) else pick(base, query)
    return Runs(
        file=file,
        source=byte,
        target=begin + nbytes_of(dtype, pick(first, query) + moved),
        count=found.count,
        message=pick(message, query),
        at=nbytes_of(dtype, pick(at, query) + moved),
    )


def crossing(source: Manifest, frames: Frames, group: int, pieces: Pieces) -> Crossing:
    """Cut pieces of boxes which the source has, too, where the source is cut.

    Parameters
    ----------
    source
        The source.
    frames
        How the boxes lie in it.
    group
        The group of ``frames`` that all of the pieces are in.
    pieces
        Pieces of those boxes.
    """
    space, store = source.space(frames.spaces[group]), frames.stores[group]
    entry = pick(frames.entry, pieces.entry)
    found = located(space, store, entry, pieces.start, pieces.count)
    entry = pick(pieces.entry, found.query)
    made = Crossing(
        entry=entry,
        local=pick(pieces.local - pieces.start, found.query) + found.start,
        at=pick(frames.first, entry) + found.start,
        count=found.count,
        extent=found.extent,
        within=found.within,
    )
    return made if frames.even else _cut_rows(made, found.start, frames)


def _cut_rows(made: Crossing, start: Ints, frames: Frames) -> Crossing:
    """Cut pieces also where the rows of their boxes end; ``start`` is in the box."""
    cut = cut_at(start, made.count, pick(frames.row, made.entry))
    entry = pick(made.entry, cut.query)
    gap = pick(frames.pitch - frames.row, entry)
    return Crossing(
        entry=entry,
        local=pick(made.local, cut.query) + cut.moved,
        at=pick(made.at, cut.query) + cut.moved + cut.multiple * gap,
        count=cut.count,
        extent=pick(made.extent, cut.query),
        within=pick(made.within, cut.query) + cut.moved,
    )


def located(space: FlatSpace, store: Store, entry: Ints, start: Ints, count: Ints) -> Located:
    """Where runs of a space's entries lie.

    Parameters
    ----------
    space, store
        The space, and one of its stores.
    entry, start, count
        The runs, none of them empty.
    """
    if isinstance(store, EntryStore):
        return Located(ALL, start, count, entry, start)
    query, pieces = space.ruler.locate(entry, start, count)
    cut = store.split(pieces)
    begin = pick(pieces.start, cut.query) + cut.moved
    return Located(pick_again(query, cut.query), begin, cut.count, cut.multiple, cut.within)
