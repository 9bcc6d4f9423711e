"""Which leaves has the tree of an Orbax checkpoint, and what are they to us?

``_METADATA`` lists every leaf with its typed keys; arrays are stored under the keys joined with
dots, which is ambiguous: the typed keys tell. They are kept in the manifest's objects, so that a
tree can be written again.

A leaf below ``params`` is a weight. A leaf below ``mu`` or ``nu``, as optax calls its moments, is
``exp_avg`` or ``exp_avg_sq`` of the one weight that has the keys that follow, and its shape. All
others, where there is ``params``, are ``client`` tensors under their own names; where there is
none, everything is a weight.

Source: Orbax 0.12, ``_src/metadata/tree.py`` (key types 1 sequence, 2 dict).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.box import Shape
from reshard.errors import CorruptError, InconsistentError, UnsupportedError
from reshard.layout import CLIENT, PARAM, TensorKey

METADATA = "_METADATA"
SEQUENCE, DICT = 1, 2

MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}
"""What optax calls the moments of Adam and its relatives, and what they are called here."""

EMPTY = frozenset(("Dict", "List", "Tuple", "NamedTuple", "None"))
"""Kinds of leaves without a value: an empty container, or nothing."""

Keys = tuple[tuple[str, int], ...]
"""The way to a leaf: keys with their types."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of the tree.

    Parameters
    ----------
    keys
        The way to it.
    kind
        What it was: ``jax.Array``, ``np.ndarray``, ``scalar``, ``string``, ``None``, ``Dict``.
    """

    keys: Keys
    kind: str

    @property
    def path(self) -> str:
        """Its name, and what its array is stored under."""
        return ".".join(key for key, _ in self.keys)

    @property
    def stored(self) -> bool:
        """Whether it is an array."""
        return not self.empty and self.kind != "string"

    @property
    def empty(self) -> bool:
        """Whether it has no value."""
        return self.kind in EMPTY


@dataclass(frozen=True, slots=True)
class Tree:
    """What ``_METADATA`` says.

    Parameters
    ----------
    leaves
        In its order.
    ocdbt, version
        Whether arrays lie in a database, and of which version of zarr they are.
    custom
        The script's own words.
    """

    leaves: tuple[Leaf, ...]
    ocdbt: bool
    version: int
    custom: Any


def read(path: Path) -> Tree:
    """Read ``_METADATA``.

    Raises
    ------
    CorruptError
        If it makes no sense.
    InconsistentError
        If two arrays would be stored under one name.
    """
    try:
        document = json.loads(path.read_bytes())
        leaves = tuple(map(_leaf, document["tree_metadata"].values()))
        tree = Tree(
            leaves,
            bool(document.get("use_ocdbt", False)),
            3 if document.get("use_zarr3", False) else 2,
            document.get("custom_metadata"),
        )
    except OSError as error:
        raise CorruptError(f"can't be read: {error.strerror}", where=path) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(f"isn't the metadata of a tree: {error!r}", where=path) from error
    paths: set[str] = set()
    for leaf in leaves:
        if leaf.stored and leaf.path in paths:
            raise InconsistentError(
                f"two leaves are stored as {leaf.path}: their keys have dots in them", where=path
            )
        paths.add(leaf.path)
        if leaf.stored and not is_name(leaf.path):
            raise UnsupportedError(f"a leaf is called {leaf.path[:80]!r}", where=path)
    return tree


def _leaf(entry: Mapping[str, Any]) -> Leaf:
    keys = []
    for key in entry["key_metadata"]:
        if not isinstance(key["key"], str) or key["key_type"] not in (SEQUENCE, DICT):
            raise ValueError(f"a key {key!r}")
        if key["key_type"] == SEQUENCE and not key["key"].isdecimal():
            raise ValueError(f"an index {key!r}")
        keys.append((key["key"], key["key_type"]))
    kind = entry["value_metadata"]["value_type"]
    if not keys or not isinstance(kind, str):
        raise ValueError(f"a leaf {entry!r}")
    return Leaf(tuple(keys), kind)


def is_name(path: str) -> bool:
    """Whether it can be the name of one folder, inside of the checkpoint."""
    return path not in ("", ".", "..") and "/" not in path and "\0" not in path


def keys_of(shapes: Mapping[Keys, Shape]) -> dict[Keys, TensorKey]:
    """What each array is called: name and state.

    Parameters
    ----------
    shapes
        The way to each array, and its shape.
    """
    weights: dict[Keys, list[Keys]] = {}  # by what follows "params"
    for keys in shapes:
        if (at := _index(keys, ("params",))) is not None:
            weights.setdefault(keys[at + 1 :], []).append(keys)
    names = {keys: ".".join(key for key, _ in keys) for keys in shapes}
    if not weights:
        return {keys: (name, PARAM) for keys, name in names.items()}
    found: dict[Keys, TensorKey] = {}
    taken: set[TensorKey] = set()
    of_weights = {keys for some in weights.values() for keys in some}
    for keys, shape in shapes.items():
        key = (names[keys], PARAM if keys in of_weights else CLIENT)
        at = _index(keys, tuple(MOMENTS))
        of = [] if at is None or keys in of_weights else weights.get(keys[at + 1 :], [])
        if at is not None and len(of) == 1 and shapes[of[0]] == shape:
            moment = (names[of[0]], MOMENTS[keys[at][0]])
            key = key if moment in taken else moment
        taken.add(key)
        found[keys] = key
    return found


def _index(keys: Keys, wanted: Sequence[str]) -> int | None:
    """Where the first of some names stands among keys, before the last one."""
    at = (i for i, (key, _) in enumerate(keys[:-1]) if key in wanted)
    return next(at, None)


def to_objects(leaves: Sequence[Leaf], found: Mapping[Keys, TensorKey]) -> list[Any]:
    """The tree as plain data: for each leaf its keys, its kind, and its tensor's key or nothing."""
    return [
        [[list(key) for key in leaf.keys], leaf.kind, list(found.get(leaf.keys, ()))]
        for leaf in leaves
    ]
