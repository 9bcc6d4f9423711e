"""Which entries of the source does each tensor of the target come from?

Replica k of a target's tensor is made of replica k of its source, or of the first where there is
no such one; every replica is one **message**. For each entry of the target a :class:`Sources`
says whether the source has an entry with the very same box, so that intervals can be cut by
intervals, or whether boxes must be searched for.

What has to be read only to be compared is found here, too: replicas that no message is made of,
and 16-bit weights that must be the rounding of their masters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from reshard.box import Box, Shape
from reshard.copies import Message
from reshard.coverage import Replicas
from reshard.dtypes import FLOATS, DType
from reshard.errors import InconsistentError, NotFoundError, RequestError
from reshard.frames import NO_COVER, WHOLE, Cover, Frame, Frames, Part, Sources, frame_of
from reshard.layout import TensorKey, key_text
from reshard.manifest import Manifest, Place, Tensor
from reshard.ruler import ints
from reshard.store import EntryStore, Store


class _Rows:
    """Columns of a :class:`Sources` that are yet to be filled."""

    def __init__(self, count: int) -> None:
        self.boxes: list[Box | None] = [None] * count
        self.covers: list[Cover] = [NO_COVER] * count
        self.message = [0] * count
        self.store = [-1] * count
        self.entry = [0] * count
        self.frame: list[Frame] = [WHOLE] * count


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
        self.derived: list[tuple[int, TensorKey, TensorKey]] = []
        self._replicas = Replicas(target)
        self._replicas_before = Replicas(source)
        self._covers: dict[TensorKey, tuple[Cover, ...]] = {}
        self._by_box: dict[Cover, dict[Box, Place]] = {}
        self._stores: dict[Part, int] = {}  # to a number of its own
        # messages with the bytes of a cover as they are in the source
        self._readings: dict[Cover, list[int]] = {}
        rows = {
            (index, state): _Rows(len(space.entries))
            for index, space in enumerate(target.layout.spaces)
            for state in space.states
        }
        for key, tensor in target.tensors.items():
            self._join(tensor, self._found(key, tensor), rows)
        self.sources = self._all_sources(rows)
        only: list[tuple[int, Cover]] = []
        for key, parent in proofs:
            only += self._prove(source.tensors[key], source.tensors[parent])
        unread = list(self._unread_replicas()) if self.equal else []
        self.copies_of = [cover.tensor.key for _, cover in unread]
        only += unread
        self.read_only = self._whole(only)
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

    def _join(self, tensor: Tensor, source: Tensor, rows: Mapping[Part, _Rows]) -> None:
        replicas = self._replicas.of(tensor)
        known = self.covers_of(source)
        made = []
        for replica in range(max(replicas) + 1):
            cover = known[replica if self.equal and replica < len(known) else 0]
            made.append((self._message(tensor, cover), cover))
        for (space, entry), replica in zip(tensor.places, replicas, strict=True):
            box = self.target.space(space).entries[entry].box
            self._fill(rows[space, tensor.state], entry, box, *made[replica])

    def _message(self, tensor: Tensor, cover: Cover, written: bool = True) -> int:
        """A new message of a tensor, and its twin in the source's type where that is another."""
        made, source = self._readings.setdefault(cover, []), cover.tensor
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

    def covers_of(self, tensor: Tensor) -> tuple[Cover, ...]:
        """The replicas of a source tensor."""
        found = self._covers.get(tensor.key)
        if found is None:
            places = self._replicas_before.places(tensor)
            found = self._covers[tensor.key] = tuple(Cover(tensor, some) for some in places)
        return found

    def _place(self, cover: Cover, box: Box | None) -> Place | None:
        """The place of a cover with that very box, unless it has strides."""
        places, shape = cover.places, cover.tensor.shape
        if len(places) == 1:
            found = self.source.space(places[0][0]).entries[places[0][1]]
            same = box == found.box or _whole(box, shape) == found.region
            place = places[0] if same else None
        else:
            if cover not in self._by_box:
                self._by_box[cover] = {
                    self.source.space(s).entries[e].region: (s, e) for s, e in places
                }
            place = self._by_box[cover].get(_whole(box, shape))
        if place is None or self._strided(place, cover.tensor.state):
            return None
        return place

    def _strided(self, place: Place, state: str) -> bool:
        store = self._store((place[0], state))
        return isinstance(store, EntryStore) and store.strides_of(place[1]) is not None

    def _store(self, part: Part) -> Store:
        return self.source.stores[self.source.space(part[0]).name, part[1]]

    # -- rows ---------------------------------------------------------------------------------

    def _fill(self, rows: _Rows, row: int, box: Box | None, message: int, cover: Cover) -> None:
        rows.boxes[row] = box
        rows.covers[row] = cover
        rows.message[row] = message
        place, frame = self._place(cover, box), frame_of(box, cover.tensor.shape)
        if place is None or frame is None:
            return
        part = (place[0], cover.tensor.state)
        rows.store[row] = self._stores.setdefault(part, len(self._stores))
        rows.entry[row] = place[1]
        rows.frame[row] = frame

    def _all_sources(self, rows: Mapping[Part, _Rows]) -> dict[Part, Sources]:
        """The rows as columns; states of a space that lie alike share their frames."""
        found: dict[Part, Sources] = {}
        known: dict[int, list[Frames]] = {}
        for (space, state), some in rows.items():
            sources = self._sources(some)
            alike = known.setdefault(space, [])
            frames = next((f for f in alike if f.same(sources.frames)), None)
            if frames is None:
                alike.append(sources.frames)
            else:
                sources = replace(sources, frames=frames)
            found[space, state] = sources
        return found

    def _sources(self, rows: _Rows) -> Sources:
        numbers, group = np.unique(ints(rows.store), return_inverse=True)
        if len(numbers) and numbers[0] < 0:
            numbers, group = numbers[1:], group - 1
        parts = list(self._stores)
        stores = tuple(parts[number] for number in numbers.tolist())
        entry = ints(rows.entry)
        first, row, pitch = ints(rows.frame).reshape(-1, 3).T.copy()
        density = np.zeros(len(entry))
        for index, (space, _) in enumerate(stores):
            some = np.flatnonzero(group == index)
            density[some] = 1 / self.source.space(space).ruler.size[entry[some]] + 1 / row[some]
        frames = Frames(
            group=group,
            entry=entry,
            first=first,
            row=row,
            pitch=pitch,
            density=density,
            spaces=tuple(space for space, _ in stores),
            stores=tuple(map(self._store, stores)),
        )
        return Sources(rows.boxes, rows.covers, ints(rows.message), frames, stores)

    def _whole(self, wanted: Sequence[tuple[int, Cover]]) -> Sources:
        """A row for the whole of each tensor that is only read."""
        rows = _Rows(len(wanted))
        for row, (message, cover) in enumerate(wanted):
            self._fill(rows, row, None, message, cover)
        return self._sources(rows)

    # -- what is only read --------------------------------------------------------------------

    def _read(self, covers: Iterable[Cover]) -> Iterator[tuple[int, Cover]]:
        """Read those covers that aren't read anyway: (message, cover)."""
        for cover in covers:
            if cover not in self._readings:
                yield self._message(cover.tensor, cover, written=False), cover

    def _unread_replicas(self) -> Iterator[tuple[int, Cover]]:
        tensors = {cover.tensor.key: cover.tensor for cover in self._readings}
        return self._read(c for tensor in tensors.values() for c in self.covers_of(tensor))

    def _prove(self, tensor: Tensor, parent: Tensor) -> Iterator[tuple[int, Cover]]:
        """Read what proves that a tensor is its parent, cast."""
        if tensor.shape != parent.shape:
            raise InconsistentError(
                f"{key_text(tensor.key)} is {list(tensor.shape)} and {key_text(parent.key)}, "
                f"which it must be the rounding of, is {list(parent.shape)}",
                where=self.source.root,
            )
        cover = self.covers_of(parent)[0]
        yield from self._read((self.covers_of(tensor)[0], cover))
        cast = self._cast_of(cover, tensor.dtype)
        if cast is None:
            index = self._message(parent, cover, written=False)
            yield index, cover
            cast = self._add_twin(index, tensor)
        self.derived.append((cast, tensor.key, parent.key))

    def _cast_of(self, parent: Cover, dtype: DType) -> int | None:
        """A message with that cast of a parent, of copies that are made anyway."""
        for index in self._readings[parent]:
            message = self.messages[index]
            if message.dtype == dtype:
                return index
            if message.twin < 0:
                return self._add_twin(index, replace(parent.tensor, dtype=dtype))
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
        for cover, messages in self._readings.items():
            found.setdefault(cover.tensor.key, []).extend(messages)
        return list(found.items())


def _whole(box: Box | None, shape: Shape) -> Box:
    return Box.whole(shape) if box is None else box
