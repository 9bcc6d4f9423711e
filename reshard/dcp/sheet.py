"""Where does each piece that the ranks write come to lie in a native checkpoint?

The plans of all ranks say which boxes of which tensors each of them writes. The keys are read as
those of a distributed checkpoint are; a box is an entry, owned by the rank that writes it, so that
chunk r of each array is rank r's alone. Small values are sent to the coordinator instead: what is
in them decides how the manifest is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from reshard.box import Box
from reshard.engine.values import dtype_of_torch
from reshard.errors import UnsupportedError
from reshard.formats import native
from reshard.formats._dcp_keys import Keys, sort_keys
from reshard.formats._dcp_metadata import Blob, Chunk, Index, Path_, Stored
from reshard.formats._dcp_spaces import full_chunks
from reshard.layout import CLIENT, PARAM, Entry, FlatSpace, Layout
from reshard.manifest import Manifest
from reshard.partition import Explicit
from reshard.plain import LARGEST_ARRAY
from reshard.ruler import ints
from reshard.store import ShardStore

Place = tuple[int, int, int, int]
"""Index of a file, byte in it, byte of the piece, and how many bytes."""


@dataclass(frozen=True, slots=True)
class Sheet:
    """A native checkpoint before its payload is written.

    Parameters
    ----------
    index, keys
        What the plans say, as the metadata of a distributed checkpoint would.
    manifest
        The target.
    sent
        Keys whose values are sent to the coordinator.
    """

    index: Index
    keys: Keys
    manifest: Manifest
    sent: frozenset[str]

    def places(self) -> dict[tuple[str, Box], list[Place]]:
        """Where each box of each key lies."""
        key_of = {(name, state): key for key, name, state in named(self.keys)}
        found: dict[tuple[str, Box], list[Place]] = {}
        for space in self.manifest.layout.spaces:
            for state, dtype in space.states.items():
                store = self.manifest.stores[space.name, state]
                assert isinstance(store, ShardStore)
                for i, entry in enumerate(space.entries):
                    _, pieces = space.ruler.locate(ints([i]), ints([0]), ints([entry.numel]))
                    cut = store.split(pieces)
                    at, some = 0, []
                    for chunk, within, count in zip(
                        cut.multiple.tolist(), cut.within.tolist(), cut.count.tolist(), strict=True
                    ):
                        begin = int(store.offsets[chunk]) + within * dtype.itemsize
                        nbytes = count * dtype.itemsize
                        some.append((int(store.files[chunk]), begin, at, nbytes))
                        at += nbytes
                    found[key_of[entry.name, state], entry.region] = some
        return found


def sheet(plans: Sequence[SavePlan], root: Path) -> Sheet:
    """Lay out a native checkpoint for what all ranks are going to write."""
    index = _index(plans)
    keys = sort_keys(index)
    sent = frozenset((*index.values, *_small(index, keys)))
    cut = any(len(full_chunks(stored)) > 1 for stored in index.tensors.values())
    spaces = [_space(name, rows, len(plans)) for name, rows in _spaces(index, keys, sent)]
    layout = Layout(tuple(spaces), {"shard": len(plans)}, 3 if cut else None)
    return Sheet(index, keys, native.new_manifest(layout, root), sent)


def named(keys: Keys) -> Iterable[tuple[str, str, str]]:
    """Every key with the name and state that its tensor has."""
    yield from ((key, name, PARAM) for key, name in keys.model.items())
    for optimizer in keys.optimizers:
        for name, states in optimizer.state.items():
            yield from ((key, name, state) for state, key in states.items())
    yield from ((key, key, CLIENT) for key in keys.others)


def _index(plans: Sequence[SavePlan]) -> Index:
    """The plans, as metadata."""
    shapes: dict[str, tuple[Any, Any]] = {}
    chunks: dict[str, dict[Box, Blob]] = {}
    values: dict[str, tuple[Blob, ...]] = {}
    paths: dict[str, Path_] = {}
    for rank, plan in enumerate(plans):
        blob = Blob(f"__{rank}_0.distcp", 0, 0)
        paths.update(plan.planner_data or {})
        for item in plan.items:
            key = item.index.fqn
            if item.type == WriteItemType.BYTE_IO:
                values[key] = (blob,)
                continue
            data = item.tensor_data
            assert data is not None
            shapes[key] = tuple(data.size), dtype_of_torch(data.properties.dtype)
            chunks.setdefault(key, {})[box_of(item)] = blob
    tensors = {
        key: Stored(
            key,
            shape,
            dtype,
            tuple(
                Chunk(box, (blob,))
                for box, blob in sorted(chunks[key].items(), key=lambda c: c[0].start)
            ),
        )
        for key, (shape, dtype) in shapes.items()
    }
    return Index(tensors, values, {k: paths.get(k, (k,)) for k in (*tensors, *values)}, False)


def box_of(item: WriteItem) -> Box:
    """The box that a rank writes."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    start, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
    return Box(start, tuple(a + n for a, n in zip(start, sizes, strict=True)))


def _small(index: Index, keys: Keys) -> Iterable[str]:
    """Tensors that become values: 0-d states, settings, and what the script has that is small."""
    for optimizer in keys.optimizers:
        for states in optimizer.state.values():
            for key in states.values():
                if key in index.tensors and not index.tensors[key].shape:
                    yield key
        for settings in optimizer.settings.values():
            yield from (key for key in settings.values() if key in index.tensors)
    for key in keys.others:
        stored = index.tensors.get(key)
        if stored is None or len(full_chunks(stored)) > 1:
            continue
        if stored.dtype.nbytes(full_chunks(stored)[0].box.numel) <= LARGEST_ARRAY:
            yield key


Row = tuple[str, Mapping[str, Stored]]


def _spaces(index: Index, keys: Keys, sent: frozenset[str]) -> Iterable[tuple[str, list[Row]]]:
    """The spaces: states of an optimizer that are cut alike share one."""
    kinds: dict[tuple[object, ...], list[Row]] = {}
    for key, name in keys.model.items():
        stored = index.tensors[key]
        kinds.setdefault((PARAM, stored.dtype.name), []).append((name, {PARAM: stored}))
    for number, optimizer in enumerate(keys.optimizers):
        for name, states in optimizer.state.items():
            left = {s: index.tensors[k] for s, k in states.items() if k not in sent}
            while left:
                first = next(iter(left.values()))
                alike = {s: t for s, t in left.items() if _cut(t) == _cut(first)}
                kind = ("optimizer", number, *((s, t.dtype.name) for s, t in alike.items()))
                kinds.setdefault(kind, []).append((name, alike))
                left = {s: t for s, t in left.items() if s not in alike}
    for key in keys.others:
        if key not in sent:
            stored = index.tensors[key]
            kinds.setdefault((CLIENT, stored.dtype.name), []).append((key, {CLIENT: stored}))
    for number, (kind, rows) in enumerate(kinds.items()):
        yield f"{kind[0]}{number}", rows


def _cut(stored: Stored) -> tuple[object, ...]:
    return stored.shape, *(chunk.box for chunk in full_chunks(stored))


def _space(name: str, rows: Sequence[Row], world: int) -> FlatSpace:
    entries: list[Entry] = []
    owners: list[int] = []
    for tensor, states in rows:
        first = next(iter(states.values()))
        for chunk in full_chunks(first):
            whole = chunk.box.covers(first.shape)
            entries.append(Entry(tensor, first.shape, None if whole else chunk.box))
            owners.append(_owner(tensor, states, chunk.box))
    return FlatSpace(
        name=name,
        entries=tuple(entries),
        partition=Explicit(world, tuple(owners)),
        states={state: stored.dtype for state, stored in rows[0][1].items()},
    )


def _owner(name: str, states: Mapping[str, Stored], box: Box) -> int:
    """The rank that writes a box: that of its first state counts, where replicas are dealt out."""
    (blob,) = next(c for c in full_chunks(next(iter(states.values()))) if c.box == box).blobs
    if blob.rank is None:
        raise UnsupportedError(f"nobody writes {name}")
    return blob.rank
