"""Which entries of the source does each tensor of the target come from?

Replica k of a target's tensor is made of replica k of its source, or of the first where there is
no such one; every replica is one **message**. For each entry of the target a :class:`Sources`
says whether the source has an entry with the very same box, so that intervals can be cut by
intervals, or whether boxes must be searched for.

What has to be read only to be compared is found here, too: replicas that no message is made of,
and 16-bit weights that must be the rounding of their masters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from reshard.box import Box, Shape
from reshard.copies import Message
from reshard.coverage import replicas as covers_of_places
from reshard.dtypes import FLOATS, DType
from reshard.errors import InconsistentError, NotFoundError, RequestError
from reshard.layout import TensorKey, key_text
from reshard.manifest import Manifest, Tensor
from reshard.ruler import Ints
from reshard.store import EntryStore

ENDLESS = 1 << 62
"""The length of a row that never ends."""

Place = tuple[int, int]
"""Index of a space and of an entry in it."""


@dataclass(frozen=True, slots=True)
class Cover:
    """One replica of a source tensor.

    Parameters
    ----------
    tensor
        The tensor.
    places
        Where it lies: one place, or the places of boxes that make it up.
    """

    tensor: Tensor
    places: tuple[Place, ...]


@dataclass(eq=False)
class Sources:
    """Where some boxes come from; columns with one row a box.

    Parameters
    ----------
    boxes
        The boxes.
    store
        Index (see :attr:`Join.stores`) of the store whose entry holds the same box; -1 where
        boxes must be searched.
    entry
        The entry of that store's space.
    message
        The message of its tensor.
    first, row, pitch
        Element x of the box is element ``first + x // row * pitch + x % row`` of the message;
        of use only where ``store`` isn't -1.
    covers
        The cover that each box comes from.
    density
        About how many copies an element of the box costs.
    """

    boxes: list[Box | None]
    store: Ints
    entry: Ints
    message: Ints
    first: Ints
    row: Ints
    pitch: Ints
    covers: list[Cover]
    density: NDArray[np.float64]

    @cached_property
    def even(self) -> bool:
        """Whether ``row`` is endless everywhere."""
        return not (self.row < ENDLESS).any()

    @cached_property
    def distinct(self) -> list[int]:
        """The different values of ``store``."""
        return [int(s) for s in np.unique(self.store)]

    @classmethod
    def empty(cls, count: int) -> Sources:
        """Rows that are yet to be filled."""
        store, entry, message, first, pitch = np.zeros((5, count), np.int64)
        return cls(
            boxes=[None] * count,
            store=store,
            entry=entry,
            message=message,
            first=first,
            row=np.full(count, ENDLESS),
            pitch=pitch,
            covers=[_NO_COVER] * count,
            density=np.zeros(count),
        )


_NO_COVER = Cover(Tensor("", "", (), DType("uint8", 8, None, None), ()), ())


class Join:
    """What each entry of a target is made of.

    Parameters
    ----------
    source, target, origin, casts, proofs, replicas
        As for :class:`~reshard.plan.Plan`, with the same errors.

    Attributes
    ----------
    messages
        All messages: those of the target first.
    stores
        (space index, state) of the source stores that hold boxes of the target.
    sources
        For each (space index, state) of the target, a row an entry.
    read_only
        A row for each message that is only read.
    copies_of
        The source tensor of each replica among them.
    same
        (source tensor, messages): bytes of one tensor as they are in the source, to be equal.
    derived
        (message, tensor, from): a message that holds ``from`` cast to ``tensor``'s type.
    """

    def __init__(
        self,
        source: Manifest,
        target: Manifest,
        *,
        origin: Mapping[TensorKey, TensorKey],
        casts: frozenset[TensorKey],
        proofs: Sequence[tuple[TensorKey, TensorKey]],
        replicas: str,
    ) -> None:
        self.source = source
        self.target = target
        self.origin = origin
        self.casts = casts
        self.equal = replicas == "equal"
        self.messages: list[Message] = []
        self.stores: list[tuple[int, str]] = []
        self.derived: list[tuple[int, TensorKey, TensorKey]] = []
        self._store_index: dict[tuple[int, str], int] = {}
        self._covers: dict[TensorKey, list[Cover]] = {}
        self._by_box: dict[tuple[TensorKey, int], dict[Box, Place]] = {}
        # messages with the bytes of a cover as they are in the source
        self._readings: dict[tuple[TensorKey, int], list[int]] = {}
        self.sources = {
            (index, state): Sources.empty(len(space.entries))
            for index, space in enumerate(target.layout.spaces)
            for state in space.states
        }
        for key, tensor in target.tensors.items():
            self._join(tensor, self._found(key, tensor))
        only: list[tuple[int, Tensor, int]] = []
        for key, parent in proofs:
            only += self._prove(source.tensors[key], source.tensors[parent])
        unread = list(self._unread_replicas()) if self.equal else []
        self.copies_of = [tensor.key for _, tensor, _ in unread]
        only += unread
        self.read_only = self._whole(only)
        for rows in (*self.sources.values(), self.read_only):
            self._find_density(rows)
        self.same = self._same()

    # -- tensors of the target ----------------------------------------------------------------

    def _found(self, key: TensorKey, tensor: Tensor) -> Tensor:
        """The source of a target's tensor."""
        source_key = self.origin.get(key, key)
        found = self.source.tensors.get(source_key)
        if found is None:
            raise NotFoundError(f"the source has no {key_text(source_key)}", where=self.source.root)
        if found.shape != tensor.shape:
            raise InconsistentError(
                f"{key_text(key)} is {list(found.shape)} in the source and "
                f"{list(tensor.shape)} in the target",
                where=self.source.root,
            )
        if found.dtype != tensor.dtype:
            self._check_cast(key, found.dtype, tensor.dtype)
        return found

    def _check_cast(self, key: TensorKey, old: DType, new: DType) -> None:
        if key not in self.casts:
            raise RequestError(
                f"{key_text(key)} is {old} in the source and {new} in the target",
                where=self.source.root,
                hint="name a cast (--dtype) to change element types",
            )
        for kind in (old, new):
            if kind.name not in FLOATS or kind.bits % 8:
                raise RequestError(
                    f"{key_text(key)} can't be cast from {old} to {new}: "
                    f"{kind} isn't a floating-point type of whole bytes",
                    where=self.source.root,
                    hint="only floating-point tensors can be cast; keep this one's type",
                )

    def _join(self, tensor: Tensor, source: Tensor) -> None:
        covers = covers_of_places(self.target, tensor)
        known = self.covers_of(source)
        messages, chosen = [], []
        for replica in range(max(covers) + 1):
            chosen.append(replica if self.equal and replica < len(known) else 0)
            messages.append(self._message(tensor, source, chosen[-1]))
        for (space, entry), cover in zip(tensor.places, covers, strict=True):
            rows = self.sources[space, tensor.state]
            rows.message[entry] = messages[cover]
            box = self.target.space(space).entries[entry].box
            self._fill(rows, entry, box, source, chosen[cover])

    def _message(self, tensor: Tensor, source: Tensor, cover: int, written: bool = True) -> int:
        """A new message of a tensor, and its twin in the source's type where that is another."""
        made = self._readings.setdefault((source.key, cover), [])
        index, counts = len(self.messages), not made
        same = tensor.dtype == source.dtype
        twin = -1 if same else index + 1
        self.messages.append(
            Message(tensor.key, tensor.nbytes, tensor.dtype, written, counts, twin)
        )
        if not same:
            before = Message(source.key, source.nbytes, source.dtype, False, counts, index)
            self.messages.append(before)
        made.append(index if same else twin)
        return index

    # -- covers of the source -----------------------------------------------------------------

    def covers_of(self, tensor: Tensor) -> list[Cover]:
        """The replicas of a source tensor."""
        found = self._covers.get(tensor.key)
        if found is None:
            covers = covers_of_places(self.source, tensor)
            found = self._covers[tensor.key] = [
                Cover(
                    tensor,
                    tuple(p for p, c in zip(tensor.places, covers, strict=True) if c == index),
                )
                for index in range(max(covers) + 1)
            ]
        return found

    def _place(self, source: Tensor, cover: int, box: Box | None) -> Place | None:
        """The place of a cover with that very box, unless it has strides."""
        places = self.covers_of(source)[cover].places
        if len(places) == 1:
            found = self.source.space(places[0][0]).entries[places[0][1]]
            same = box == found.box or _whole(box, found.shape) == found.region
            place = places[0] if same else None
        else:
            key = (source.key, cover)
            if key not in self._by_box:
                self._by_box[key] = {
                    self.source.space(s).entries[e].region: (s, e) for s, e in places
                }
            place = self._by_box[key].get(_whole(box, source.shape))
        if place is None or self._strided(place, source.state):
            return None
        return place

    def _strided(self, place: Place, state: str) -> bool:
        store = self.source.stores[self.source.space(place[0]).name, state]
        return isinstance(store, EntryStore) and store.strides_of(place[1]) is not None

    # -- rows ---------------------------------------------------------------------------------

    def _fill(self, rows: Sources, row: int, box: Box | None, source: Tensor, cover: int) -> None:
        rows.boxes[row] = box
        rows.covers[row] = self.covers_of(source)[cover]
        place, frame = self._place(source, cover, box), _frame(box, source.shape)
        if place is None or frame is None:
            rows.store[row] = -1
            return
        rows.store[row] = self._index((place[0], source.state))
        rows.entry[row] = place[1]
        rows.first[row], rows.row[row], rows.pitch[row] = frame

    def _find_density(self, rows: Sources) -> None:
        for index in rows.distinct:
            if index >= 0:
                some = np.flatnonzero(rows.store == index)
                size = self.source.space(self.stores[index][0]).ruler.size[rows.entry[some]]
                rows.density[some] = 1 / size + 1 / rows.row[some]

    def _index(self, store: tuple[int, str]) -> int:
        index = self._store_index.setdefault(store, len(self.stores))
        if index == len(self.stores):
            self.stores.append(store)
        return index

    def _whole(self, wanted: list[tuple[int, Tensor, int]]) -> Sources:
        """A row for the whole of each tensor that is only read."""
        rows = Sources.empty(len(wanted))
        for row, (message, tensor, cover) in enumerate(wanted):
            rows.message[row] = message
            self._fill(rows, row, None, tensor, cover)
        return rows

    # -- what is only read --------------------------------------------------------------------

    def _read(self, tensor: Tensor, cover: int) -> Iterator[tuple[int, Tensor, int]]:
        """Read a cover, unless that is done anyway: (message, tensor, cover)."""
        if (tensor.key, cover) not in self._readings:
            yield self._message(tensor, tensor, cover, written=False), tensor, cover

    def _unread_replicas(self) -> Iterator[tuple[int, Tensor, int]]:
        for tensor in {key: self.source.tensors[key] for key, _ in self._readings}.values():
            for cover in range(len(self.covers_of(tensor))):
                yield from self._read(tensor, cover)

    def _prove(self, tensor: Tensor, parent: Tensor) -> Iterator[tuple[int, Tensor, int]]:
        """Read what proves that a tensor is its parent, cast."""
        if tensor.shape != parent.shape:
            raise InconsistentError(
                f"{key_text(tensor.key)} is {list(tensor.shape)} and {key_text(parent.key)}, "
                f"which it must be the rounding of, is {list(parent.shape)}",
                where=self.source.root,
            )
        yield from self._read(tensor, 0)
        yield from self._read(parent, 0)
        cast = self._cast_of(parent, tensor.dtype)
        if cast is None:
            index = self._message(parent, parent, 0, written=False)
            yield index, parent, 0
            cast = self._add_twin(index, tensor)
        self.derived.append((cast, tensor.key, parent.key))

    def _cast_of(self, parent: Tensor, dtype: DType) -> int | None:
        """A message with that cast of a parent, of copies that are made anyway."""
        for index in self._readings[parent.key, 0]:
            message = self.messages[index]
            if message.dtype == dtype:
                return index
            if message.twin < 0:
                return self._add_twin(index, replace(parent, dtype=dtype))
            if self.messages[message.twin].dtype == dtype:
                return message.twin
        return None

    def _add_twin(self, index: int, cast: Tensor) -> int:
        """Let the copies of a message fill another one, in another type."""
        message, twin = self.messages[index], len(self.messages)
        self.messages[index] = replace(message, twin=twin)
        self.messages.append(
            Message(cast.key, cast.nbytes, cast.dtype, False, message.counts, index)
        )
        return twin

    def _same(self) -> list[tuple[TensorKey, list[int]]]:
        found: dict[TensorKey, list[int]] = {}
        for (key, _), messages in self._readings.items():
            found.setdefault(key, []).extend(messages)
        return list(found.items())


def _whole(box: Box | None, shape: Shape) -> Box:
    return Box.whole(shape) if box is None else box


def _frame(box: Box | None, shape: Shape) -> tuple[int, int, int] | None:
    """How a box's elements lie in its tensor: first, row and pitch of :class:`Sources`.

    ``None`` if its rows don't stand at one distance.
    """
    if box is None:
        return 0, ENDLESS, 0
    first, sizes = box.offset_in(shape), box.shape
    if box.contiguous_in(shape):
        return first, ENDLESS, 0
    cut = max(d for d in range(len(shape)) if sizes[d] != shape[d])
    row, pitch = max(1, math.prod(sizes[cut:])), math.prod(shape[cut:])
    outer = Box(box.start[:cut], box.stop[:cut])
    return (first, row, pitch) if outer.contiguous_in(shape[:cut]) else None
