"""How do chunks of tensors become spaces of a manifest?

A chunk is an entry: a box, with the shard that holds it, and an extent of its own (a blob). States
that are cut alike share a space. Where each rank wrote metadata of its own, a box may have been
written several times: these are replicas, which are proved equal when they are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from reshard.builder import Builder
from reshard.dtypes import DType
from reshard.errors import IncompleteError
from reshard.formats._dcp_blobs import Blobs, Payload
from reshard.formats._dcp_mesh import Mesh
from reshard.formats._dcp_metadata import Blob, Chunk, Stored
from reshard.formats._dcp_zstd import ZstdBlob
from reshard.layout import Entry, FlatSpace
from reshard.partition import Explicit
from reshard.side_by_side import side_by_side
from reshard.store import EntryStore


def full_chunks(stored: Stored) -> tuple[Chunk, ...]:
    """The chunks that hold elements; of a tensor without elements, one that holds all of none.

    Raises
    ------
    IncompleteError
        If there is none.
    """
    found = tuple(c for c in stored.chunks if c.box.numel)
    if not found:
        found = tuple(c for c in stored.chunks if c.box.covers(stored.shape))[:1]
    if not found:
        raise IncompleteError(
            f"{stored.key} {list(stored.shape)} is in the metadata, but none of its elements is "
            "in a file"
        )
    return found


@dataclass(frozen=True, slots=True)
class Spaces:
    """Puts tensors into a manifest.

    Parameters
    ----------
    builder
        The manifest in the making.
    blobs
        The files.
    mesh
        Who held what.
    """

    builder: Builder
    blobs: Blobs
    mesh: Mesh
    _files: dict[str, int] = field(default_factory=dict)

    def add(
        self,
        name: str,
        tensors: Iterable[tuple[str, Mapping[str, Stored]]],
        group: int | None = None,
    ) -> None:
        """Add tensors as a space.

        Parameters
        ----------
        name
            Of the space.
        tensors
            Names with their states, all of which have the same shape and chunks.
        group
            The parameter group.
        """
        entries: list[Entry] = []
        owners: list[int] = []
        places: dict[str, list[tuple[Stored, Chunk]]] = {}
        for tensor, states in tensors:
            first = next(iter(states.values()))
            for chunk in full_chunks(first):
                whole = chunk.box.covers(first.shape)
                entries.append(Entry(tensor, first.shape, None if whole else chunk.box))
                owners.append(self.mesh.owner(first, chunk))
            for state, stored in states.items():
                places.setdefault(state, []).extend((stored, c) for c in full_chunks(stored))
        if not entries:
            return
        space = FlatSpace(
            name=name,
            entries=tuple(entries),
            partition=Explicit(self.mesh.shards, tuple(owners)),
            states={state: placed[0][0].dtype for state, placed in places.items()},
            group=group,
        )
        stores = {
            state: self._store([(s.dtype, c, c.blobs[0]) for s, c in placed])
            for state, placed in places.items()
        }
        self.builder.add(space, stores)
        for state, placed in places.items():
            self._replicas(f"{name}.{state}", state, entries, placed)

    def loose(self, state: str, tensors: Iterable[tuple[str, Stored]]) -> None:
        """Add tensors of one state that belong to no group, one space an element type."""
        kinds: dict[DType, list[tuple[str, Mapping[str, Stored]]]] = {}
        for name, stored in tensors:
            kinds.setdefault(stored.dtype, []).append((name, {state: stored}))
        for kind, some in kinds.items():
            self.add(f"{state}.{kind}", some)

    def _replicas(
        self,
        name: str,
        state: str,
        entries: Sequence[Entry],
        placed: Sequence[tuple[Stored, Chunk]],
    ) -> None:
        """Copies of boxes that further ranks wrote."""
        for copy in range(1, max(len(chunk.blobs) for _, chunk in placed)):
            some = [i for i, (_, chunk) in enumerate(placed) if len(chunk.blobs) > copy]
            dtype = placed[0][0].dtype
            space = FlatSpace(
                name=f"{name}.replicate{copy}",
                entries=tuple(entries[i] for i in some),
                partition=Explicit(1, (0,) * len(some)),
                states={state: dtype},
                coords={"replicate": copy},
            )
            rows = [(dtype, placed[i][1], placed[i][1].blobs[copy]) for i in some]
            self.builder.add(space, {state: self._store(rows)})

    def _store(self, rows: Sequence[tuple[DType, Chunk, Blob]]) -> EntryStore:
        def payload(row: tuple[DType, Chunk, Blob]) -> Payload:
            dtype, chunk, blob = row
            return self.blobs.payload(blob, chunk.box.shape, dtype)

        found = []
        for (_, _, blob), at in zip(rows, side_by_side(payload, rows, portion=64), strict=True):
            file = self._file(blob, at)
            label = f"{blob.file} at byte {blob.offset}"
            self.builder.region(file, at.begin, at.nbytes, at.crc32, label)
            found.append((file, at.offset, at.strides))
        return EntryStore.of(found)

    def _file(self, blob: Blob, found: Payload) -> int:
        if found.whole is not None:
            return self.builder.encoded(blob.file, found.whole, ZstdBlob(blob))
        file = self._files.get(blob.file)
        if file is None:
            file = self._files[blob.file] = self.builder.file(self.blobs.path(blob))
        return file
