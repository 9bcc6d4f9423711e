"""Orbax checkpoints: the trees of arrays that JAX programs save.

A tree is a folder with ``_METADATA`` (the leaves, with typed keys: :mod:`._orbax_tree`) and its
arrays: zarr, version 2 or 3, each in a folder or all in an OCDBT database
(:mod:`._orbax_store`). A ``CheckpointManager`` keeps ``<step>/<item>/``, an item being a tree, or
JSON. Every chunk of an array's grid is a box, and has to be there: where one is missing, others
read zeros.

Neither Orbax nor JAX is imported. The rules are those of Orbax 0.12.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from reshard.box import Box, strides_of
from reshard.builder import Builder, Placed
from reshard.errors import CorruptError, IncompleteError, InconsistentError
from reshard.format import Draft, Found, Request
from reshard.formats import _orbax_tree as trees
from reshard.formats._orbax_files import COMMITTED, JSON_ITEM, OBJECTS, STRINGS, read_sidecar
from reshard.formats._orbax_store import DATABASE, Chunk, Database, Files, Values, check_chunks
from reshard.formats._orbax_tree import METADATA, Keys
from reshard.formats._zarr import V2, V3, Array, parse
from reshard.layout import Entry, TensorKey, key_text
from reshard.manifest import Manifest

UNFINISHED = ".orbax-checkpoint-tmp"

_STEP = re.compile(r"(?:.*[_-])?([0-9]+)")


class Orbax:
    """The Orbax format; see the module."""

    name = "orbax"
    title = "Orbax: a tree of arrays that a JAX program saved, or a manager's folder of steps"
    writes = True
    sharded = False

    def detect(self, path: Path) -> Found | None:
        """A tree, a step with items, or a manager's folder (the newest step counts)."""
        if _is_tree(path) or _items(path):
            return Found(path)
        steps = [p for p in _folders(path) if _STEP.fullmatch(p.name)]
        steps = [p for p in steps if _is_tree(p) or _items(p)]
        if not steps:
            return None
        steps.sort(key=lambda p: (_step(p), p.name))
        return Found(steps[-1], tuple(steps[:-1]))

    def open(self, root: Path) -> Manifest:
        """Read what the metadata say, and see that every chunk is there."""
        if UNFINISHED in root.name:
            raise IncompleteError(
                "was never finished: Orbax renames the folder when it is whole", where=root
            )
        reading = _Reading(root)
        items = {"": root} if _is_tree(root) else _items(root)
        for name, folder in items.items():
            if _is_tree(folder):
                reading.tree(name, folder, alone=sum(map(_is_tree, items.values())) == 1)
            else:
                reading.json(name, folder / JSON_ITEM)
        return reading.finish()

    def draft(self, source: Manifest, request: Request, target: Path) -> Draft:
        """Lay the tensors out as arrays of a tree."""
        from reshard.formats import _orbax_write

        return _orbax_write.draft(source, request, target)


FORMAT = Orbax()


def _is_tree(path: Path) -> bool:
    return (path / METADATA).is_file()


def _folders(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    return [p for p in sorted(path.iterdir()) if UNFINISHED not in p.name and p.is_dir()]


def _items(path: Path) -> dict[str, Path]:
    """The items of a step by their names; none where none of them is a tree."""
    folders = _folders(path)
    if not any(map(_is_tree, folders)) or any(_STEP.fullmatch(p.name) for p in folders):
        return {}
    return {p.name: p for p in folders if _is_tree(p) or (p / JSON_ITEM).is_file()}


def _step(path: Path) -> int:
    found = _STEP.fullmatch(path.name)
    assert found is not None
    return int(found[1])


class _Reading:
    """A manifest in the making."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._builder = Builder(FORMAT.name, root)
        self._placed: dict[str, list[Placed]] = {}
        self._objects: dict[str, Any] = {}
        self._digests: dict[TensorKey, int] = {}

    def tree(self, item: str, folder: Path, *, alone: bool) -> None:
        """Take the arrays and texts of a tree; its name goes before theirs if it isn't alone."""
        tree = trees.read(folder / METADATA)
        inside = folder.relative_to(self._root).as_posix()
        where = "" if inside == "." else inside
        if tree.ocdbt and not (folder / DATABASE).is_file():
            raise IncompleteError("the database's manifest is missing", where=folder / DATABASE)
        values: Values = (Database if tree.ocdbt else Files)(self._root, where)
        arrays = {
            leaf.keys: self._array(values, leaf.path, tree.version, folder)
            for leaf in tree.leaves
            if leaf.stored
        }
        noted = read_sidecar(folder, tree)
        found = noted.keys or trees.keys_of({k: array.shape for k, array in arrays.items()})
        if taken := self._digests.keys() & noted.digests.keys():
            raise InconsistentError(
                f"{key_text(min(taken))} is in two trees of the step", where=folder
            )
        self._digests.update(noted.digests)
        if not alone and not noted.keys:
            found = {keys: (f"{item}.{name}", state) for keys, (name, state) in found.items()}
        for keys, array in arrays.items():
            self._place(values, folder, keys, array, found[keys])
        if not (folder / COMMITTED).is_file():
            self._builder.note("note", "has no commit marker", COMMITTED)
        self._objects[item] = {
            "tree": trees.to_objects(noted.tree.leaves, found),
            "strings": self._strings(tree, folder),
            "custom": tree.custom,
        }

    def json(self, item: str, path: Path) -> None:
        """Take an item that is JSON."""
        self._objects[item] = {"json": _json(path)}

    def _array(self, values: Values, name: str, version: int, folder: Path) -> Array:
        label = V2 if version == 2 else V3
        raw = values.read(f"{name}/{label}")
        if raw is None:
            raise IncompleteError(
                f"the array {name} is missing: the tree lists it, and there is no {label} of it",
                where=folder,
                hint="copy the checkpoint again",
            )
        array = parse(raw, version, f"{folder}/{name}/{label}")
        check_chunks(array, values.names(name), name, folder)
        return array

    def _place(
        self, values: Values, folder: Path, keys: Keys, array: Array, key: tuple[str, str]
    ) -> None:
        name, state = key
        path = ".".join(part for part, _ in keys)
        placed = self._placed.setdefault(state, [])
        if not array.chunks:
            file = self._builder.file(folder / METADATA)
            placed.append(Placed(Entry(name, array.shape), array.dtype, file, 0))
        for chunk, box in array.boxes():
            file = self._file(values, f"{path}/{chunk}", array)
            strides = None if box.shape == array.chunk else strides_of(array.chunk)
            entry = Entry(name, array.shape, None if _whole(box, array) else box)
            placed.append(Placed(entry, array.dtype, file, 0, strides))

    def _file(self, values: Values, name: str, array: Array) -> int:
        """The file of a chunk: as it is, where its bytes are the elements."""
        nbytes = array.chunk_nbytes
        if isinstance(values, Files):
            path = self._root / values.path(name)
            if array.raw:
                if (size := path.stat().st_size) != nbytes:
                    raise CorruptError(f"has {size} bytes and should have {nbytes}", where=path)
                return self._builder.file(path)
            return self._builder.encoded(values.path(name), nbytes, Chunk(values, name, array))
        assert isinstance(values, Database)
        path_in = f"{values.folder}/{DATABASE}" if values.folder else DATABASE
        return self._builder.encoded(f"{path_in}:{name}", nbytes, Chunk(values, name, array))

    def _strings(self, tree: trees.Tree, folder: Path) -> dict[str, str]:
        wanted = {leaf.path for leaf in tree.leaves if leaf.kind == "string"}
        if not wanted:
            return {}
        found = _json(folder / STRINGS)
        if not isinstance(found, dict) or not all(isinstance(found.get(n), str) for n in wanted):
            raise IncompleteError("lacks texts that the tree lists", where=folder / STRINGS)
        return {name: found[name] for name in sorted(wanted)}

    def finish(self) -> Manifest:
        """The manifest of everything that was taken."""
        for state, placed in self._placed.items():
            self._builder.add_placed(state, state, placed)
        self._builder.objects[OBJECTS] = self._objects
        return replace(self._builder.build({"shard": 1}, None), digests=self._digests)


def _whole(box: Box, array: Array) -> bool:
    return box.shape == array.shape


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise IncompleteError(f"can't be read: {error.strerror}", where=path) from error
    except (ValueError, RecursionError) as error:
        raise CorruptError("isn't JSON", where=path) from error
