"""zreshard's own checkpoint: a zarr v3 group beside one manifest.

One 1-D array a (flat space, state), shape [chunks * chunk], little-endian ``bytes`` codec, not
compressed: **chunk r is shard r's partition**, a plain file that can be read by byte range, and
that zarr-python and tensorstore open. A shard above 256 MiB is cut in chunks of 64 MiB.
``zreshard.json`` lists every chunk with its checksum and every tensor with its digest (see
:mod:`reshard.manifest_json`). The checkpoint exists when that file does: it is written last.

An array's path is the space's name and the state, percent-encoded (``group0.master``, see
:mod:`reshard.array_path`); names of tensors never become paths. The normative text is
``docs/native-format.md``.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from reshard.array_path import SPACE_NAME, array_path
from reshard.collector import collector_paused
from reshard.commit import write_file
from reshard.dtypes import DType
from reshard.errors import CorruptError, IncompleteError, UnsupportedError
from reshard.format import Draft, Found, Loss, Request
from reshard.layout import PARAM, Layout, TensorKey
from reshard.manifest import Manifest, ParamGroup
from reshard.manifest_json import (
    KEY,
    VERSION,
    checksums_to_json,
    digests_from_json,
    digests_to_json,
    dumps,
    groups_from_json,
    groups_to_json,
    layout_from_json,
    layout_to_json,
    listed,
    loads,
)
from reshard.plain import decode, encode
from reshard.problems import problems
from reshard.relayout import relayout
from reshard.ruler import ints
from reshard.store import File, Regions, ShardStore, Store

if TYPE_CHECKING:
    from reshard.execute import Result

MANIFEST = "zreshard.json"
SPLIT_ABOVE = 256 << 20
"""Bytes of a shard above which it is cut in several chunks."""
CHUNK = 64 << 20
"""Bytes of a chunk of a shard that is cut."""


class Native:
    """The native format; see the module."""

    name = "native"
    title = "zreshard's own: a zarr v3 group, one chunk a rank, with a manifest of digests"
    writes = True
    sharded = True

    def detect(self, path: Path) -> Found | None:
        """A folder with a manifest, or a folder of such folders (the newest step counts)."""
        if (path / MANIFEST).is_file():
            return Found(path)
        if path.is_file() and path.name == MANIFEST:
            return Found(path.parent)
        if not path.is_dir():
            return None
        inside = [
            p
            for p in sorted(path.iterdir())
            # a staging folder that was never renamed begins with a dot: it is no checkpoint
            if not p.name.startswith(".") and (p / MANIFEST).is_file()
        ]
        if not inside:
            return None
        inside.sort(key=lambda p: _step(p.name))
        return Found(inside[-1], tuple(inside[:-1]))

    @collector_paused()
    def open(self, root: Path) -> Manifest:
        """Read the manifest, and check that every chunk is there at its full length."""
        document = loads(_read(root / MANIFEST), root / MANIFEST)
        layout = layout_from_json(document)
        files, stores, rows = _arrays(layout, document["arrays"])
        check_files(root, files)
        return Manifest(
            format=self.name,
            root=root,
            layout=layout,
            files=tuple(files),
            stores=stores,
            groups=groups_from_json(document["groups"]),
            aliases=dict(document["aliases"]),
            objects=decode(document["objects"], "/objects"),
            digests=digests_from_json(layout, document["digests"]),
            regions=Regions.of("crc64nvme", rows),
        )

    def draft(self, source: Manifest, request: Request, target: Path) -> Draft:
        """Lay the source's tensors out for the wanted world size and stage."""
        stage = source.layout.stage if request.stage is None else request.stage
        world = source.layout.world if request.world is None else request.world
        layout = _safe_names(
            relayout(
                source.layout,
                world,
                1 if stage is None else stage,
                lambda name, state, own: request.casts.of(name, own) if state == PARAM else own,
            )
        )
        manifest = new_manifest(
            layout,
            target,
            groups=source.groups,
            aliases=source.aliases,
            objects=source.objects,
        )
        check_fits(manifest)
        casts = {k for k, t in manifest.tensors.items() if t.dtype != source.tensors[k].dtype}
        return Draft(
            manifest=manifest,
            finish=lambda folder, result: write_metadata(folder, manifest, result),
            casts=frozenset(casts),
            losses=tuple(Loss(n.where, n.text) for n in source.notes if n.kind == "left-out"),
        )


FORMAT = Native()


def new_manifest(
    layout: Layout,
    root: Path,
    *,
    groups: Sequence[ParamGroup] = (),
    aliases: Mapping[str, str] | None = None,
    objects: Mapping[str, Any] | None = None,
) -> Manifest:
    """The manifest of a checkpoint that is to be written: its files with their sizes."""
    files, stores, rows = _new_arrays(layout)
    return Manifest(
        format=FORMAT.name,
        root=root,
        layout=layout,
        files=tuple(files),
        stores=stores,
        groups=tuple(groups),
        aliases=dict(aliases or {}),
        objects=dict(objects or {}),
        regions=Regions.of("crc64nvme", rows),
    )


def _safe_names(layout: Layout) -> Layout:
    """The layout with names of spaces that folders can have (states go into them unchanged)."""
    taken: set[str] = set()
    spaces = []
    for space in layout.spaces:
        name = stem = space.name
        if not SPACE_NAME.fullmatch(name):
            name = stem = "space." + re.sub(r"[^A-Za-z0-9._-]", "-", name)
        number = 1
        while name in taken:
            number += 1
            name = f"{stem}.{number}"
        taken.add(name)
        spaces.append(space if name == space.name else replace(space, name=name))
    return Layout(tuple(spaces), layout.mesh, layout.stage)


def check_fits(manifest: Manifest) -> None:
    """Refuse, before a byte is written, what couldn't be read again.

    Raises
    ------
    UnsupportedError
        If a native checkpoint can't hold this state.
    """
    nothing = np.zeros(len(manifest.regions), np.uint64)
    found = problems({**_document(manifest, nothing, {}), "crc64nvme": "0" * 16})
    if found:
        raise UnsupportedError(
            f"a native checkpoint can't hold this state:\n{listed(found)}",
            where=manifest.root,
        )


def _step(name: str) -> tuple[int, str]:
    digits = "".join(c if c.isdecimal() else " " for c in name).split()
    return (int(digits[-1]) if digits else -1, name)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CorruptError(f"can't be read: {error.strerror}", where=path) from error


def _new_arrays(
    layout: Layout,
) -> tuple[list[File], dict[tuple[str, str], Store], list[tuple[int, int, int, int | None, str]]]:
    """Files, stores and regions of a layout that is to be written."""
    arrays = []
    for space in layout.spaces:
        for dtype in space.states.values():
            chunk, each = _chunking(space.ruler.part, dtype)
            arrays.append({"chunk": chunk, "part": chunk * each})
    return _lay(layout, arrays, None)


def _chunking(part: int, dtype: DType) -> tuple[int, int]:
    """Elements of a chunk, and chunks of a shard."""
    _zarr_name(dtype)
    if dtype.nbytes(part) <= SPLIT_ABOVE:
        return part, 1
    chunk = CHUNK // dtype.itemsize
    return chunk, -(-part // chunk)


def _arrays(
    layout: Layout, arrays: list[Mapping[str, Any]]
) -> tuple[list[File], dict[tuple[str, str], Store], list[tuple[int, int, int, int | None, str]]]:
    """Files, stores and regions of a layout that was written."""
    of = {(a["space"], a["state"]): a for a in arrays}
    ordered = [of[space.name, state] for space in layout.spaces for state in space.states]
    checksums = [[int(c, 16) for c in a["crc64nvme"]] for a in ordered]
    return _lay(layout, ordered, checksums)


def _lay(
    layout: Layout, arrays: list[Any], checksums: list[list[int]] | None
) -> tuple[list[File], dict[tuple[str, str], Store], list[tuple[int, int, int, int | None, str]]]:
    files: list[File] = []
    stores: dict[tuple[str, str], Store] = {}
    rows: list[tuple[int, int, int, int | None, str]] = []
    index = 0
    for space in layout.spaces:
        for state, dtype in space.states.items():
            part, chunk = arrays[index]["part"], arrays[index]["chunk"]
            count = space.shards * (part // chunk)
            numbers = np.arange(len(files), len(files) + count)
            stores[space.name, state] = ShardStore(part, chunk, numbers, ints(np.zeros(count)))
            folder, nbytes = array_path(space.name, state), dtype.nbytes(chunk)
            paths = [f"{folder}/c/{c}" for c in range(count)]
            values = repeat(None, count) if checksums is None else checksums[index]
            rows += [
                (file, 0, nbytes, value, path)
                for file, value, path in zip(numbers.tolist(), values, paths, strict=True)
            ]
            files += [File(path, nbytes) for path in paths]
            index += 1
    return files, stores, rows


def check_files(root: Path, files: Sequence[File]) -> None:
    """Every chunk there, none short, none that the manifest doesn't know."""
    sizes: dict[str, int] = {}
    for folder in dict.fromkeys(f.path.rpartition("/")[0] for f in files):
        sizes.update(_chunks_in(root, folder))
    if sizes == {file.path: file.nbytes for file in files}:
        return
    for file in files:
        size = sizes.pop(file.path, None)
        if size is None:
            raise IncompleteError(
                "the chunk is missing (the manifest lists it)",
                where=root / file.path,
                hint="copy the checkpoint again; read without it, zarr would give zeros",
            )
        if size != file.nbytes:
            raise CorruptError(
                f"has {size} bytes and should have {file.nbytes}", where=root / file.path
            )
    raise CorruptError(
        "isn't listed in the manifest",
        where=root / min(sizes),
        hint="files of another checkpoint were copied into this one",
    )


def _chunks_in(root: Path, folder: str) -> dict[str, int]:
    """The sizes of an array's chunks: the files whose names are numbers."""
    sizes: dict[str, int] = {}
    try:
        with os.scandir(root / folder) as entries:
            for entry in entries:
                if not (entry.name.isascii() and entry.name.isdecimal()):
                    continue
                found = entry.stat()
                if not stat.S_ISREG(found.st_mode):
                    raise CorruptError("isn't a file", where=root / folder / entry.name)
                sizes[f"{folder}/{entry.name}"] = found.st_size
    except (FileNotFoundError, NotADirectoryError):
        return sizes
    except OSError as error:
        raise CorruptError(f"can't be read: {error.strerror}", where=root / folder) from error
    return sizes


def write_metadata(folder: Path, manifest: Manifest, result: Result) -> None:
    """Write zarr's metadata and, last, the manifest."""
    for space in manifest.layout.spaces:
        for state, dtype in space.states.items():
            store = manifest.stores[space.name, state]
            assert isinstance(store, ShardStore)
            length = store.chunk * len(store.files)
            names = {"space": space.name, "state": state}
            document = zarr_array(dtype, length, store.chunk, names)
            write_file(folder / array_path(space.name, state) / "zarr.json", document)
    write_file(folder / "zarr.json", zarr_group())
    write_file(folder / MANIFEST, dumps(_document(manifest, result.regions, result.digests)))


def _document(
    manifest: Manifest, checksums: NDArray[np.uint64], digests: Mapping[TensorKey, int]
) -> dict[str, Any]:
    """The manifest as JSON, with the checksum of each of its regions."""
    layout = manifest.layout
    assert not manifest.regions.offsets.any()  # a region is a chunk, and a chunk is a file
    of_file = np.empty(len(manifest.files), np.uint64)
    of_file[manifest.regions.files] = checksums
    arrays = []
    for space in layout.spaces:
        for state in space.states:
            store = manifest.stores[space.name, state]
            assert isinstance(store, ShardStore)
            arrays.append(
                {
                    "path": array_path(space.name, state),
                    "space": space.name,
                    "state": state,
                    "part": store.part,
                    "chunk": store.chunk,
                    "crc64nvme": checksums_to_json(of_file[store.files]),
                }
            )
    return {
        KEY: VERSION,
        **layout_to_json(layout),
        "arrays": arrays,
        "digests": digests_to_json(layout, digests),
        "groups": groups_to_json(manifest.groups),
        "aliases": dict(manifest.aliases),
        "objects": encode(dict(manifest.objects)),
    }


def zarr_group() -> bytes:
    """The metadata of the group."""
    attributes = {"zreshard": {"manifest": MANIFEST}}
    return _json({"zarr_format": 3, "node_type": "group", "attributes": attributes})


def zarr_array(dtype: DType, length: int, chunk: int, names: Mapping[str, str]) -> bytes:
    """The metadata of one array (zarr v3 core specification, section "Array metadata")."""
    codec: dict[str, Any] = {"name": "bytes"}
    if dtype.itemsize > 1:
        codec["configuration"] = {"endian": "little"}
    return _json(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [length],
            "data_type": _zarr_name(dtype),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [chunk]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": _fill(dtype),
            "codecs": [codec],
            "attributes": {"zreshard": dict(names)},
        }
    )


def _fill(dtype: DType) -> Any:
    if dtype.name == "bool":
        return False
    if dtype.name.startswith("complex"):
        return [0.0, 0.0]
    return 0.0 if "float" in dtype.name else 0


def _zarr_name(dtype: DType) -> str:
    """What zarr calls the type: our names are its names, but it has none below a byte."""
    if dtype.bits % 8:
        raise UnsupportedError(
            f"zarr has no {dtype} elements",
            hint="write these tensors to safetensors instead (--format safetensors)",
        )
    return dtype.name


def _json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode("ascii")
