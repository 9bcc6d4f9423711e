"""ByteCheckpoint's checkpoints: ``model/`` and ``optimizer/``, raw bytes beside a pickled list.

Each of the two folders has ``.metadata`` (:mod:`._bytecheckpoint_metadata`) and a ``.distcp`` file
a rank; ``extra_state/`` has a ``torch.save`` file a rank. Pieces are boxes. An optimizer's state
is found by the names of the parameters, or by their numbers where the program saved those: then
its tensors are called ``optimizer.0`` and so on, for no name is stored.

ByteCheckpoint and torch aren't imported. The rules are those of ByteCheckpoint 0.0.2.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from reshard.builder import Builder, Placed
from reshard.errors import CorruptError, IncompleteError, UnsupportedError
from reshard.format import Draft, Found, Request
from reshard.formats import _bytecheckpoint_metadata as metadata
from reshard.formats._bytecheckpoint_metadata import METADATA, Metadata, Piece, Place
from reshard.formats._pieces import Pieces
from reshard.formats._torch import Values
from reshard.layout import CLIENT, PARAM, Entry, TensorKey
from reshard.manifest import Manifest
from reshard.torchfile import open_torch_file

MODEL, OPTIMIZER, EXTRA = "model", "optimizer", "extra_state"
OBJECTS = "bytecheckpoint"
_RANK_FILE = re.compile(r"extra_state_rank_([0-9]+)\.pt")


class ByteCheckpoint:
    """The ByteCheckpoint format; see the module."""

    name = "bytecheckpoint"
    title = "ByteCheckpoint: model and optimizer in raw pieces, for DDP, FSDP and FSDP2"
    writes = False
    sharded = False

    def detect(self, path: Path) -> Found | None:
        """A folder whose ``model`` or ``optimizer`` has ByteCheckpoint's metadata."""
        folders = (path / MODEL, path / OPTIMIZER)
        return Found(path) if any(metadata.looks_like(f / METADATA) for f in folders) else None

    def open(self, root: Path) -> Manifest:
        """Read what the metadata list, and see that all of it lies in the files."""
        reading = _Reading(root)
        for part in (MODEL, OPTIMIZER):
            if (root / part).exists():
                reading.part(part)
        world = reading.extra()
        return reading.finish(world)

    def draft(self, source: Manifest, request: Request, target: Path) -> Draft:
        """Not written."""
        raise UnsupportedError("ByteCheckpoint's checkpoints can be read, but not written")


FORMAT = ByteCheckpoint()


class _Reading:
    """A manifest in the making."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._builder = Builder(FORMAT.name, root)
        self._pieces = Pieces()
        self._objects: dict[str, Any] = {}

    def part(self, part: str) -> None:
        """Take a folder's tensors and values."""
        folder = self._root / part
        found = metadata.read(folder / METADATA)
        for name, pieces in found.tensors.items():
            key = self._key(part, name, found)
            for piece in pieces:
                self._pieces.add(key[1], self._placed(folder, key, piece))
        values = {name: self._value(folder, name, at) for name, at in found.values.items()}
        if values:
            self._objects[part] = values

    def _key(self, part: str, name: str, found: Metadata) -> TensorKey:
        if part == MODEL:
            return name, PARAM
        keys = found.paths.get(name, ())
        if len(keys) != 3 or keys[0] != "state":
            raise UnsupportedError(
                f"has a tensor {name} that isn't a parameter's state",
                where=self._root / part / METADATA,
            )
        numbered = keys[1].isdecimal()
        return (f"{OPTIMIZER}.{keys[1]}" if numbered else keys[1]), keys[2]

    def _placed(self, folder: Path, key: TensorKey, piece: Piece) -> Placed:
        entry = Entry(key[0], piece.shape, piece.box)
        file = self._file(folder, piece.place)
        return Placed(entry, piece.dtype, file, piece.place.offset + piece.skip, piece.strides)

    def _file(self, folder: Path, place: Place) -> int:
        path = folder / place.file
        if not path.is_file():
            raise IncompleteError("is missing", where=path, hint="copy the checkpoint again")
        if (size := path.stat().st_size) < place.offset + place.nbytes:
            raise CorruptError(
                f"has {size} bytes; a piece ends at byte {place.offset + place.nbytes}",
                where=path,
            )
        return self._builder.file(path)

    def _value(self, folder: Path, name: str, place: Place) -> Any:
        self._file(folder, place)
        file = open_torch_file(folder / place.file, offset=place.offset, length=place.nbytes)
        return self._plain(Values(self._builder, file, f"{folder.name}/"), file.value, name)

    def _plain(self, values: Values, value: Any, *path: str) -> Any:
        found = values.plain(value, *path)
        for tensor in values.tensors:
            self._pieces.add(CLIENT, tensor)
        return found

    def extra(self) -> int:
        """Take the ranks' own states; returns how many ranks there were."""
        folder = self._root / EXTRA
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        ranks = {int(m[1]): p for p in files if (m := _RANK_FILE.fullmatch(p.name))}
        if not ranks:
            self._builder.note("note", "has no extra state: how many ranks is unknown", EXTRA)
            return 1
        for rank in range(max(ranks) + 1):
            if rank not in ranks:
                raise IncompleteError(
                    f"the state of rank {rank} is missing",
                    where=folder,
                    hint="copy the checkpoint again",
                )
        states = []
        for rank, path in sorted(ranks.items()):
            file = open_torch_file(path)
            values = Values(self._builder, file, f"{EXTRA}.rank{rank}/")
            states.append(self._plain(values, file.value))
        self._objects[EXTRA] = states
        return len(ranks)

    def finish(self, world: int) -> Manifest:
        """The manifest of everything that was taken."""
        self._pieces.build(self._builder, world)
        self._builder.objects[OBJECTS] = self._objects
        return self._builder.build({"shard": world}, None)
