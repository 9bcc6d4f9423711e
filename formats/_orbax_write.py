"""How is a tree laid out for Orbax, and what is written beside its arrays?

Arrays are zarr 3, a folder each, not compressed, cut in chunks of whole rows: so that a chunk is a
plain file which is copied to. What came from Orbax gets its own tree again, with typed keys; any
other checkpoint becomes ``{"params": {name: …}, "exp_avg": {name: …}, …}``, a level of keys for
the states and one for the names, dots and all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.box import Box, Shape
from reshard.builder import Builder, Placed
from reshard.commit import write_file
from reshard.dtypes import DType
from reshard.errors import UnsupportedError
from reshard.format import AS_WRITTEN, Draft, Loss, Request
from reshard.formats._orbax_files import (
    ARRAY,
    COMMITTED,
    EMPTY_FILE,
    JSON_ITEM,
    NUMPY,
    OBJECTS,
    SIDECAR,
    STRINGS,
)
from reshard.formats._orbax_tree import DICT, METADATA, Keys, Leaf, is_name
from reshard.layout import PARAM, Entry, TensorKey, key_text
from reshard.manifest import Manifest
from reshard.store import File

if TYPE_CHECKING:
    from reshard.execute import Result

CHUNK = 64 << 20
"""Bytes of a chunk, at most, where it has more than one row."""


@dataclass(frozen=True, slots=True)
class Item:
    """A tree that is written.

    Parameters
    ----------
    folder
        Where, below the target; ``""`` for itself.
    leaves
        Its leaves.
    keys
        The tensor of each leaf that is an array.
    strings, custom
        Texts, and the script's own metadata.
    """

    folder: str
    leaves: tuple[Leaf, ...]
    keys: Mapping[Keys, TensorKey]
    strings: Mapping[str, str]
    custom: Any

    def path(self, name: str) -> str:
        """Where something of it lies, below the target."""
        return f"{self.folder}/{name}" if self.folder else name


def draft(source: Manifest, request: Request, target: Path) -> Draft:
    """Lay a source's tensors out as arrays."""
    items, texts, losses = _items(source)
    drawing = _Drawing(source, request, target)
    for item in items:
        drawing.add(item)

    def finish(folder: Path, result: Result) -> None:
        for name, shape, chunk, dtype in drawing.arrays:
            write_file(folder / name / ARRAY, zarr_json(shape, chunk, dtype))
        for name, content in texts.items():
            write_file(folder / name / JSON_ITEM, _json(content))
        for item in items:
            write_item(folder, item, result.digests)

    return Draft(
        manifest=drawing.manifest(),
        finish=finish,
        casts=frozenset(drawing.casts),
        losses=losses,
    )


def _items(source: Manifest) -> tuple[list[Item], dict[str, Any], tuple[Loss, ...]]:
    """The trees to write, the items that are JSON, and what has no place."""
    others = {key: value for key, value in source.objects.items() if key != OBJECTS}
    losses = [Loss(n.where, n.text) for n in source.notes if n.kind == "left-out"]
    losses += [
        Loss(key, "Orbax's trees have no place for it")
        for key in others
        if not key.endswith(AS_WRITTEN)
    ]
    losses += [Loss(f"alias:{a}", f"it is tied to {n}") for a, n in source.aliases.items()]
    if source.groups:
        losses.append(Loss("groups", "Orbax's trees have no place for parameter groups"))
    given = source.objects.get(OBJECTS)
    if given is None:
        return [new_tree(source)], {}, tuple(losses)
    trees: list[Item] = []
    texts: dict[str, Any] = {}
    whole = isinstance(given, Mapping)
    for name, document in given.items() if isinstance(given, Mapping) else ():
        if isinstance(document, Mapping) and set(document) == {"json"} and is_name(name):
            texts[name] = document["json"]
        elif isinstance(document, Mapping) and (tree := old_tree(name, document, source)):
            trees.append(tree)
        else:
            whole = False
    keys = [key for tree in trees for key in tree.keys.values()]
    if whole and len(keys) == len(source.tensors) and set(keys) == set(source.tensors):
        return trees, texts, tuple(losses)
    losses.append(Loss(OBJECTS, "its tree isn't that of these tensors any more"))
    return [new_tree(source)], {}, tuple(losses)


@dataclass(slots=True)
class _Drawing:
    """A target in the making."""

    source: Manifest
    request: Request
    target: Path
    arrays: list[tuple[str, Shape, Shape, DType]] = field(default_factory=list)
    casts: set[TensorKey] = field(default_factory=set)
    _files: list[File] = field(default_factory=list)
    _placed: dict[str, list[Placed]] = field(default_factory=dict)

    def add(self, item: Item) -> None:
        """Lay out the arrays of a tree."""
        for keys, key in item.keys.items():
            tensor = self.source.tensors[key]
            dtype = tensor.dtype
            if key[1] == PARAM:
                dtype = self.request.casts.of(key[0], dtype)
            if dtype.bits % 8:
                raise UnsupportedError(f"Orbax can't hold {dtype}: {key_text(key)} is of it")
            if dtype != tensor.dtype:
                self.casts.add(key)
            name = item.path(".".join(k for k, _ in keys))
            chunk = chunk_of(tensor.shape, dtype, self.request.max_shard_bytes or CHUNK)
            self.arrays.append((name, tensor.shape, chunk, dtype))
            nbytes = dtype.nbytes(math.prod(chunk))
            places = chunks(tensor.shape, chunk)
            for path, box in places:
                self._place(
                    key, File(f"{name}/{path}", nbytes), Entry(key[0], tensor.shape, box), dtype
                )
            if not places:  # without elements: an array without chunks
                self._place(
                    key, File(f"{name}/{EMPTY_FILE}", 0), Entry(key[0], tensor.shape), dtype
                )

    def _place(self, key: TensorKey, file: File, entry: Entry, dtype: DType) -> None:
        self._placed.setdefault(key[1], []).append(Placed(entry, dtype, len(self._files), 0))
        self._files.append(file)

    def manifest(self) -> Manifest:
        """The target."""
        builder = Builder(OBJECTS, self.target)
        for state, placed in self._placed.items():
            builder.add_placed(state, state, placed)
        return replace(builder.build({"shard": 1}, None), files=tuple(self._files))


def new_tree(source: Manifest) -> Item:
    """The tree of a checkpoint that didn't come from Orbax.

    Raises
    ------
    UnsupportedError
        If a name can't be that of a folder, or two are the same one.
    """
    keys: dict[Keys, TensorKey] = {}
    paths: dict[str, TensorKey] = {}
    for key in source.tensors:
        name, state = key
        top = "params" if state == PARAM else state
        leaf = Leaf(((top, DICT), (name, DICT)), NUMPY)
        if not is_name(leaf.path) or len(leaf.path.encode()) > 200:
            raise UnsupportedError(f"Orbax can't hold a tensor called {key_text(key)[:220]!r}")
        if (other := paths.setdefault(leaf.path.lower(), key)) != key:
            raise UnsupportedError(
                f"Orbax would store {key_text(key)} and {key_text(other)} under one name"
            )
        keys[leaf.keys] = key
    return Item("", tuple(Leaf(k, NUMPY) for k in keys), keys, {}, None)


def old_tree(item: str, document: Mapping[str, Any], source: Manifest) -> Item | None:
    """The tree that a source had when it was read from Orbax; ``None`` if it isn't that any more.

    Parameters
    ----------
    item
        Its name; ``""`` for a tree by itself.
    document
        What the manifest's objects hold of it.
    """
    try:
        rows = [
            (Leaf(tuple((str(k), int(t)) for k, t in keys), str(kind)), tuple(key))
            for keys, kind, key in document["tree"]
        ]
        strings, custom = dict(document["strings"]), document["custom"]
    except (KeyError, TypeError, ValueError):
        return None
    found: dict[Keys, TensorKey] = {}
    for leaf, key in rows:
        if leaf.stored and (key not in source.tensors or not is_name(leaf.path)):
            return None
        if leaf.stored:
            found[leaf.keys] = (key[0], key[1])
    if item and not is_name(item):
        return None
    return Item(item, tuple(leaf for leaf, _ in rows), found, strings, custom)


def chunk_of(shape: Shape, dtype: DType, most: int) -> Shape:
    """The shape of an array's chunks: as many whole rows as fit."""
    if not shape:
        return ()
    whole = tuple(max(1, n) for n in shape)
    row = dtype.itemsize
    for n in whole[1:]:
        row *= n
    return (min(whole[0], max(1, most // row)), *whole[1:])


def chunks(shape: Shape, chunk: Shape) -> list[tuple[str, Box | None]]:
    """The name of each chunk and the box that it holds (``None`` for the whole array)."""
    if not shape:
        return [("c", None)]
    tail = "/0" * (len(shape) - 1)
    if 0 in shape:
        return []
    if chunk[0] == shape[0]:
        return [(f"c/0{tail}", None)]
    found: list[tuple[str, Box | None]] = []
    for index, start in enumerate(range(0, shape[0], chunk[0])):
        first = (start, *(0 for _ in shape[1:]))
        stop = (min(start + chunk[0], shape[0]), *shape[1:])
        found.append((f"c/{index}{tail}", Box(first, stop)))
    return found


def zarr_json(shape: Shape, chunk: Shape, dtype: DType) -> bytes:
    """An array's metadata (zarr core specification, version 3, "Array metadata")."""
    codec: dict[str, Any] = {"name": "bytes"}
    if dtype.itemsize > 1:
        codec["configuration"] = {"endian": "little"}
    return _json(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": shape,
            "data_type": dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": _fill(dtype),
            "codecs": [codec],
            "attributes": {},
        }
    )


def _fill(dtype: DType) -> Any:
    if dtype.name == "bool":
        return False
    if dtype.name.startswith("complex"):
        return [0.0, 0.0]
    return 0.0 if "float" in dtype.name else 0


def write_item(folder: Path, item: Item, digests: Mapping[TensorKey, int]) -> None:
    """Write what stands beside the arrays; ``_METADATA``, which makes it a tree, last."""
    tensors = {
        leaf.path: {
            "name": item.keys[leaf.keys][0],
            "state": item.keys[leaf.keys][1],
            "kind": leaf.kind,
            "crc64nvme": f"{digests[item.keys[leaf.keys]]:016x}",
        }
        for leaf in item.leaves
        if leaf.stored
    }
    write_file(folder / item.path(SIDECAR), _json({"zreshard": 1, "tensors": tensors}))
    if any(leaf.kind == "string" for leaf in item.leaves):
        write_file(folder / item.path(STRINGS), _json(dict(item.strings)))
    write_file(folder / item.path(COMMITTED), b"Checkpoint commit was successful\n")
    tree = {
        str(tuple(key for key, _ in leaf.keys)): {
            "key_metadata": [{"key": key, "key_type": kind} for key, kind in leaf.keys],
            "value_metadata": {
                # as a jax.Array it couldn't be restored without being told devices
                "value_type": NUMPY if leaf.kind == "jax.Array" else leaf.kind,
                "skip_deserialize": leaf.empty,
            },
        }
        for leaf in item.leaves
    }
    write_file(
        folder / item.path(METADATA),
        _json(
            {
                "tree_metadata": tree,
                "use_ocdbt": False,
                "use_zarr3": True,
                "store_array_data_equal_to_fill_value": True,
                "custom_metadata": item.custom,
            }
        ),
    )


def _json(document: Any) -> bytes:
    return json.dumps(document, indent=1).encode()
