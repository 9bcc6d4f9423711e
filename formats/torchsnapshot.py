"""Snapshots of torchsnapshot: what each rank saved, listed in ``.snapshot_metadata``.

The list (:mod:`._torchsnapshot_manifest`) is written last. Each rank has a nested dict of its own
below each key of the program's state. What looks like a torch optimizer (``state`` and
``param_groups``) gives tensors by parameter. Where parameters are numbered nothing says what they
are called: their state is kept as the program's own, such as ``optim.state.0.exp_avg``. All other
tensors are weights, called by their way in the state dict.

A tensor that several ranks stored is stored several times: the copies are compared. torchsnapshot
keeps no checksum. Neither it nor torch is imported. The rules are those of version 0.1.0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reshard.builder import Builder, Placed
from reshard.errors import CorruptError, IncompleteError, InconsistentError, UnsupportedError
from reshard.format import Draft, Found, Request
from reshard.formats._pieces import Pieces
from reshard.formats._torch import Values
from reshard.formats._torchsnapshot_manifest import (
    METADATA,
    Container,
    InFile,
    Listing,
    Part,
    Tensor,
    Value,
    read,
)
from reshard.layout import CLIENT, PARAM, Entry, TensorKey, key_text
from reshard.manifest import Manifest
from reshard.torchfile import open_torch_file

OBJECTS = "torchsnapshot"

Way = tuple[str, ...]
"""The way to an entry: the key of the program's state, and the keys below it."""


class TorchSnapshot:
    """The torchsnapshot format; see the module."""

    name = "torchsnapshot"
    title = "torchsnapshot: a list of every rank's tensors with their files and byte ranges"
    writes = False
    sharded = False

    def detect(self, path: Path) -> Found | None:
        """A folder with a list."""
        return Found(path) if (path / METADATA).is_file() else None

    def open(self, root: Path) -> Manifest:
        """Read the list, and see that all that it names lies in the files."""
        return _Reading(root, read(root / METADATA)).run()

    def draft(self, source: Manifest, request: Request, target: Path) -> Draft:
        """Not written."""
        raise UnsupportedError("snapshots of torchsnapshot can be read, but not written")


FORMAT = TorchSnapshot()


class _Reading:
    """A manifest in the making."""

    def __init__(self, root: Path, listing: Listing) -> None:
        self._root = root
        self._listing = listing
        self._builder = Builder(FORMAT.name, root)
        self._pieces = Pieces()
        self._tensors: dict[Way, list[Tensor]] = {}
        for entries in listing.ranks:
            for way, entry in entries.items():
                if isinstance(entry, Tensor):
                    self._tensors.setdefault(way, []).append(entry)
        self._replicated: dict[Way, Any] = {}
        children: dict[Way, dict[str, None]] = {}
        for entries in listing.ranks:
            for way, entry in entries.items():
                if isinstance(entry, Tensor) or getattr(entry, "replicated", False):
                    self._replicated.setdefault(way, entry)
                children.setdefault(way[:-1], {})[way[-1]] = None
        self._children = {way: tuple(names) for way, names in children.items()}
        self._optimizers = {
            way[0]
            for entries in listing.ranks
            for way in entries
            if len(way) == 2 and way[1] == "param_groups" and (way[0], "state") in entries
        }

    def run(self) -> Manifest:
        """Take everything."""
        for way, tensors in self._tensors.items():
            self._tensor(self._key(way), tensors)
        states = [self._objects(rank) for rank in range(self._listing.world)]
        same = all(state == states[0] for state in states)
        self._builder.objects[OBJECTS] = {"all": states[0]} if same else {"ranks": states}
        self._pieces.build(self._builder, self._listing.world)
        return self._builder.build({"shard": self._listing.world}, None)

    def _key(self, way: Way) -> TensorKey:
        top, *rest = way
        if top in self._optimizers and len(rest) == 3 and rest[0] == "state":
            numbered = rest[1].isdecimal()
            return (".".join(way), CLIENT) if numbered else (rest[1], rest[2])
        if top in self._optimizers:
            return ".".join(way), CLIENT
        tops = {other[0] for other in self._tensors} - self._optimizers
        return ".".join(rest if len(tops) == 1 and rest else way), PARAM

    def _tensor(self, key: TensorKey, tensors: list[Tensor]) -> None:
        shapes = {tensor.shape for tensor in tensors}
        if len(shapes) > 1:
            found = " and ".join(str(None if s is None else list(s)) for s in shapes)
            raise InconsistentError(
                f"{key_text(key)} has the shapes {found} on different ranks", where=self._root
            )
        parts = [part for tensor in tensors for part in tensor.parts]
        if (shape := shapes.pop()) is None:  # of shards: as far as they reach
            stops = [part.box.stop for part in parts]
            if not stops or len({len(stop) for stop in stops}) > 1:
                raise CorruptError(f"{key_text(key)} has shards of several ranks", where=self._root)
            shape = tuple(map(max, zip(*stops, strict=True)))
        for part in parts:
            if not part.box.within(shape):
                raise CorruptError(
                    f"a piece of {key_text(key)} is outside of its shape {list(shape)}",
                    where=self._root / METADATA,
                )
            file = self._file(part)
            entry = Entry(key[0], shape, part.box)
            self._pieces.add(key[1], Placed(entry, part.dtype, file, part.begin))

    def _file(self, part: Part) -> int:
        path = self._root / part.file
        if not path.is_file():
            raise IncompleteError("is missing", where=path, hint="copy the snapshot again")
        size, end = path.stat().st_size, part.begin + part.nbytes
        if size < end or (part.end is None and size != end):
            raise CorruptError(f"has {size} bytes; a tensor ends at byte {end}", where=path)
        return self._builder.file(path)

    def _objects(self, rank: int) -> dict[str, Any]:
        """What a rank saved that isn't tensors, as nested dicts and lists."""
        found = {}
        for top in dict.fromkeys(way[0] for way in self._listing.ranks[rank]):
            value = self._value(rank, (top,))
            if value is not _TENSORS_ONLY:
                found[top] = value
        return found

    def _value(self, rank: int, way: Way) -> Any:
        """What a rank has at a way; what is replicated may be listed by another rank alone."""
        entry = self._listing.ranks[rank].get(way) or self._replicated.get(way)
        if isinstance(entry, Value):
            return entry.value
        if isinstance(entry, Tensor):
            return _TENSORS_ONLY
        if isinstance(entry, InFile):
            return self._from_file(rank, way, entry)
        if isinstance(entry, Container) and entry.keys is not None:
            below: dict[Any, Any] = {k: self._value(rank, (*way, str(k))) for k in entry.keys}
        else:
            below = {name: self._value(rank, (*way, name)) for name in self._children.get(way, ())}
            if entry is None and not below:
                raise IncompleteError(
                    f"lists a key {'/'.join(way)} of rank {rank} and no entry of it",
                    where=self._root / METADATA,
                )
        kept = {name: value for name, value in below.items() if value is not _TENSORS_ONLY}
        if below and not kept:
            return _TENSORS_ONLY
        if not isinstance(entry, Container) or entry.keys is not None or len(kept) != len(below):
            return kept  # a list with tensors in it keeps the others' indices
        if kept.keys() != {str(i) for i in range(len(kept))}:
            raise CorruptError(f"a list {'/'.join(way)} lacks items", where=self._root / METADATA)
        return [kept[str(i)] for i in range(len(kept))]

    def _from_file(self, rank: int, way: Way, entry: InFile) -> Any:
        path = self._root / entry.file
        if not path.is_file():
            raise IncompleteError("is missing", where=path, hint="copy the snapshot again")
        file = open_torch_file(path)
        values = Values(self._builder, file, f"rank{rank}/{'/'.join(way)}")
        found = values.plain(file.value)
        for tensor in values.tensors:
            self._pieces.add(CLIENT, tensor)
        return found


class _TensorsOnly:
    """Stands for what holds nothing but tensors."""


_TENSORS_ONLY = _TensorsOnly()
