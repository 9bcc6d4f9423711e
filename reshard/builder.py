"""How does a reader put a manifest together, piece by piece?

A reader meets tensors in the order in which files name them. The builder numbers the files,
gathers the checksums of byte ranges, and turns lists of placed boxes into spaces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from reshard.box import Shape
from reshard.decoded import Decoder
from reshard.dtypes import DType
from reshard.errors import NotFoundError
from reshard.layout import Entry, FlatSpace, Layout
from reshard.manifest import Manifest, Note, ParamGroup
from reshard.partition import Partition, Replicated
from reshard.store import EntryStore, File, Regions, Store


class Placed(NamedTuple):
    """A box and the extent that holds it.

    Parameters
    ----------
    entry
        The tensor and box.
    dtype
        Element type.
    file, offset
        Index of the file, byte of the first element.
    strides
        In elements; ``None`` for row-major without holes.
    """

    entry: Entry
    dtype: DType
    file: int
    offset: int
    strides: Shape | None = None


@dataclass(slots=True)
class Builder:
    """Collects what a manifest is made of.

    Parameters
    ----------
    format
        Name of the format.
    root
        The checkpoint's root.
    algorithm
        Of the checksums that the format stores.
    """

    format: str
    root: Path
    algorithm: str = "crc64nvme"
    spaces: list[FlatSpace] = field(default_factory=list)
    stores: dict[tuple[str, str], Store] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    groups: list[ParamGroup] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    _index: dict[str, int] = field(default_factory=dict)
    _files: list[File] = field(default_factory=list)
    _regions: dict[tuple[int, int], tuple[int, int, int, int | None, str]] = field(
        default_factory=dict
    )

    def file(self, path: Path) -> int:
        """The index of a file below the root (or of the root itself)."""
        name = "" if path == self.root else path.relative_to(self.root).as_posix()
        index = self._index.get(name)
        if index is None:
            index = self._index[name] = len(self._files)
            try:
                self._files.append(File(name, path.stat().st_size))
            except OSError as error:
                raise NotFoundError(f"can't be read: {error.strerror}", where=path) from error
        return index

    def encoded(self, path: str, nbytes: int, decoder: Decoder) -> int:
        """The index of an encoded file, a new one each time (see :class:`~reshard.store.File`)."""
        self._files.append(File(path, nbytes, decoder))
        return len(self._files) - 1

    def region(self, file: int, offset: int, nbytes: int, value: int | None, label: str) -> None:
        """A byte range of a file with its checksum; the same one may come again."""
        if nbytes:
            self._regions[file, offset] = (file, offset, nbytes, value, label)

    def add(self, space: FlatSpace, stores: Mapping[str, Store]) -> None:
        """A space and the stores of its states."""
        self.spaces.append(space)
        for state, store in stores.items():
            self.stores[space.name, state] = store

    def add_placed(
        self,
        name: str,
        state: str,
        placed: Sequence[Placed],
        *,
        coords: Mapping[str, int] | None = None,
        group: int | None = None,
        partition: Partition | None = None,
    ) -> None:
        """Boxes of one state, as one space an element type (named ``<name>.<type>``)."""
        kinds: dict[str, list[Placed]] = {}
        for one in placed:
            kinds.setdefault(one.dtype.name, []).append(one)
        for some in kinds.values():
            dtype = some[0].dtype
            store = EntryStore.of((p.file, p.offset, p.strides) for p in some)
            space = FlatSpace(
                name=f"{name}.{dtype}",
                entries=tuple(p.entry for p in some),
                partition=partition or Replicated(1),
                states={state: dtype},
                coords=dict(coords or {}),
                group=group,
            )
            self.add(space, {state: store})

    def note(self, kind: str, text: str, where: str) -> None:
        """Something that the user should know."""
        self.notes.append(Note(kind, text, where))

    def build(self, mesh: Mapping[str, int], stage: int | None) -> Manifest:
        """The manifest."""
        return Manifest(
            format=self.format,
            root=self.root,
            layout=Layout(tuple(self.spaces), dict(mesh), stage),
            files=tuple(self._files),
            stores=self.stores,
            groups=tuple(self.groups),
            aliases=self.aliases,
            objects=self.objects,
            regions=Regions.of(self.algorithm, list(self._regions.values())),
            notes=tuple(self.notes),
        )
