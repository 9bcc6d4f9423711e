"""How is a distributed checkpoint laid out for P ranks, so that torch's ``dcp.load`` reads it?

As FSDP2 saves one: dim 0 of each tensor is cut by ``torch.chunk``'s rule, and rank r's chunks are
blobs of ``__{r}_0.distcp``, each a ``torch.save`` file. What isn't cut (0-d tensors, values) is
rank 0's. ``.metadata`` is written last.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.box import Box, Shape
from reshard.commit import write_file
from reshard.dtypes import DType, from_numpy
from reshard.errors import RequestError
from reshard.format import Draft, Request
from reshard.formats._dcp_metadata import Blob, Path_
from reshard.formats._dcp_names import METADATA
from reshard.formats._dcp_write_keys import Contents, Item, contents
from reshard.formats._dcp_write_metadata import TensorRow, ValueRow, metadata
from reshard.formats._dcp_write_values import Small, small
from reshard.layout import Entry, FlatSpace, Layout
from reshard.manifest import Manifest
from reshard.partition import Explicit
from reshard.ruler import ints
from reshard.store import EntryStore, File, Regions, Store
from reshard.stored import StoredTensor
from reshard.targets import target_error
from reshard.torchfile_write import TorchZipLayout

if TYPE_CHECKING:
    from reshard.execute import Result

STAGE = 3
"""FSDP2 shards parameters and optimizer state alike, as ZeRO stage 3 does."""


def draft(source: Manifest, request: Request, target: Path, name: str) -> Draft:
    """Lay out files for the wanted world size; see :class:`~reshard.format.Format`.

    Raises
    ------
    RequestError
        If a stage other than 3 is asked for, or the weights that are asked for aren't there.
    UnsupportedError
        If torch has no such element type.
    """
    if request.stage not in (None, STAGE):
        raise RequestError(
            f"a distributed checkpoint of FSDP2 is of stage 3, not {request.stage}",
            hint="leave --stage out, or choose another --format",
        )
    world = request.world or source.layout.world
    found = contents(source, request)
    book = Book(world)
    book.write(found)
    manifest = book.manifest(name, target, found, source)
    kinds = {i.key: i for i in found.items}
    casts = {k for k, i in kinds.items() if i.dtype != source.tensors[i.source].dtype}
    return Draft(
        manifest=manifest,
        finish=book.finish,
        origin={i.key: i.source for i in found.items if i.key != i.source},
        casts=frozenset(casts),
        losses=tuple(found.losses),
    )


def rows(shape: Shape, world: int) -> Iterator[tuple[int, Box]]:
    """The owner and the box of each chunk that holds elements; of an empty tensor, the whole."""
    if not shape or 0 in shape:
        yield 0, Box.whole(shape)
        return
    step = -(-shape[0] // world)
    for owner, begin in enumerate(range(0, shape[0], step)):
        start = (begin, *(0 for _ in shape[1:]))
        yield owner, Box(start, (min(begin + step, shape[0]), *shape[1:]))


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk of a tensor that is copied: where its blob begins, and how that is laid out."""

    item: Item
    box: Box
    owner: int
    begin: int
    layout: TorchZipLayout

    @property
    def payload(self) -> int:
        """First byte of its elements in the file."""
        return self.begin + self.layout.offset("0")


@dataclass(slots=True)
class Book:
    """What stands in which file.

    Parameters
    ----------
    world
        How many ranks.
    extra
        What else the metadata say.
    """

    world: int
    extra: Mapping[str, object] = field(default_factory=dict)
    chunks: list[_Chunk] = field(default_factory=list)
    small: list[tuple[Path_, Small, int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    _layouts: dict[tuple[Shape, DType], TorchZipLayout] = field(default_factory=dict)
    _regions: Regions = field(default_factory=lambda: Regions.of("crc32", []))

    def write(self, found: Contents) -> None:
        """Give everything its place: values first, as torch does."""
        self.sizes = [0] * self.world
        for path, value in (*found.values.items(), *found.arrays.items()):
            one = small(value)
            self.small.append((path, one, self._take(0, one.layout.nbytes)))
        for item in found.items:
            for owner, box in rows(item.shape, self.world):
                layout = self._layout(item.stored(box).shape, item.dtype)
                begin = self._take(owner, layout.nbytes)
                self.chunks.append(_Chunk(item, box, owner, begin, layout))

    def _take(self, file: int, nbytes: int) -> int:
        begin = self.sizes[file]
        self.sizes[file] += nbytes
        return begin

    def _layout(self, shape: Shape, dtype: DType) -> TorchZipLayout:
        """How a blob of that shape and type is laid out: the same for all of them."""
        found = self._layouts.get((shape, dtype))
        if found is None:
            tensor = StoredTensor.whole("0", str(dtype.torch), shape)
            sizes = [("0", tensor.nbytes)]
            found = self._layouts[shape, dtype] = TorchZipLayout(tensor, sizes)
        return found

    def manifest(self, name: str, root: Path, found: Contents, source: Manifest) -> Manifest:
        """The target: a space for each state and element type."""
        kinds: dict[tuple[str, DType], list[_Chunk]] = {}
        for chunk in self.chunks:
            kinds.setdefault((chunk.item.key[1], chunk.item.dtype), []).append(chunk)
        spaces, stores = [], dict[tuple[str, str], Store]()
        for (state, dtype), some in kinds.items():
            space = FlatSpace(
                name=f"{state}.{dtype}",
                entries=tuple(_entry(chunk) for chunk in some),
                partition=Explicit(self.world, tuple(chunk.owner for chunk in some)),
                states={state: dtype},
            )
            spaces.append(space)
            stores[space.name, state] = EntryStore(
                ints([chunk.owner for chunk in some]), ints([chunk.payload for chunk in some])
            )
        rows: list[tuple[int, int, int, int | None, str]] = [
            (c.owner, c.payload, n, None, file_name(c.owner))
            for c in self.chunks
            if (n := c.item.dtype.nbytes(c.box.numel))
        ]
        self._regions = Regions.of("crc32", rows)
        files = tuple(File(file_name(i), size) for i, size in enumerate(self.sizes))
        return Manifest(
            format=name,
            root=root,
            layout=Layout(tuple(spaces), {"shard": self.world}, STAGE),
            files=files,
            stores=stores,
            groups=source.groups,
            regions=self._regions,
        )

    def finish(self, folder: Path, result: Result) -> None:
        """Write everything but the payload, the metadata last."""
        places = zip(self._regions.files.tolist(), self._regions.offsets.tolist(), strict=True)
        crcs = dict(zip(places, result.regions.tolist(), strict=True))
        of_file: list[list[_Chunk]] = [[] for _ in range(self.world)]
        for chunk in self.chunks:
            of_file[chunk.owner].append(chunk)
        for file, chunks in enumerate(of_file):
            self._finish_file(folder / file_name(file), file, chunks, crcs)
        write_file(folder / METADATA, metadata(self._rows(), self.extra))

    def _finish_file(
        self, path: Path, file: int, chunks: list[_Chunk], crcs: Mapping[tuple[int, int], int]
    ) -> None:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                for _, one, begin in self.small if file == 0 else ():
                    one.write(fd, begin)
                for chunk in chunks:
                    crc = crcs.get((file, chunk.payload), 0)
                    chunk.layout.finish(fd, {"0": crc}, at=chunk.begin)
            finally:
                os.close(fd)
        except OSError as error:
            raise target_error(error, path) from error

    def _rows(self) -> Iterator[TensorRow | ValueRow]:
        of_path: dict[Path_, list[_Chunk]] = {}
        for chunk in self.chunks:
            of_path.setdefault(chunk.item.path, []).append(chunk)
        for path, some in of_path.items():
            item = some[0].item
            placed = tuple((c.item.stored(c.box), _blob(c.owner, c.begin, c.layout)) for c in some)
            yield TensorRow(path, item.stored_shape, item.dtype, placed)
        for path, one, begin in self.small:
            blob = _blob(0, begin, one.layout)
            if one.array is None:
                yield ValueRow(path, blob)
            else:
                shape = one.array.shape
                chunks = ((Box.whole(shape), blob),)
                yield TensorRow(path, shape, from_numpy(one.array.dtype), chunks)


def file_name(rank: int) -> str:
    """What torch calls a rank's file."""
    return f"__{rank}_0.distcp"


def _blob(file: int, begin: int, layout: TorchZipLayout) -> Blob:
    return Blob(file_name(file), begin, layout.nbytes)


def _entry(chunk: _Chunk) -> Entry:
    whole = chunk.box.covers(chunk.item.shape)
    return Entry(chunk.item.key[0], chunk.item.shape, None if whole else chunk.box)
