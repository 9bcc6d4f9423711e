"""What are the files of an Orbax checkpoint called, and what do we note beside a tree?

``_zreshard.json`` says which tensor each array is, and its digest. Orbax doesn't read it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from reshard.errors import CorruptError, UnsupportedError
from reshard.formats._orbax_tree import Keys, Tree
from reshard.layout import TensorKey

OBJECTS = "orbax"
"""Name of the format, and the key of the manifest's objects that holds its trees."""

SIDECAR = "_zreshard.json"
STRINGS = "_strings.json"
COMMITTED = "commit_success.txt"
JSON_ITEM = "metadata"
ARRAY = "zarr.json"
EMPTY_FILE = ".empty"
NUMPY = "np.ndarray"


@dataclass(frozen=True, slots=True)
class Sidecar:
    """What ``_zreshard.json`` says of a tree.

    Parameters
    ----------
    tree
        With the kinds that leaves had before they were written.
    keys, digests
        Which tensor each array is, and their digests; nothing where there is no such file.
    """

    tree: Tree
    keys: Mapping[Keys, TensorKey] = field(default_factory=dict)
    digests: Mapping[TensorKey, int] = field(default_factory=dict)


def read_sidecar(folder: Path, tree: Tree) -> Sidecar:
    """Read what was noted beside a tree.

    Raises
    ------
    CorruptError
        If it makes no sense, or isn't of this tree.
    """
    path = folder / SIDECAR
    if not path.is_file():
        return Sidecar(tree)
    try:
        document = json.loads(path.read_bytes())
        kinds = {name: str(row["kind"]) for name, row in document["tensors"].items()}
        rows = {
            name: ((str(row["name"]), str(row["state"])), int(row["crc64nvme"], 16))
            for name, row in document["tensors"].items()
        }
        version = document["zreshard"]
    except OSError as error:
        raise CorruptError(f"can't be read: {error.strerror}", where=path) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(f"isn't what zreshard writes: {error!r}", where=path) from error
    if version != 1:
        raise UnsupportedError(f"is of version {version!r}", where=path)
    stored = {leaf.path: leaf.keys for leaf in tree.leaves if leaf.stored}
    if stored.keys() != rows.keys() or len({key for key, _ in rows.values()}) != len(rows):
        raise CorruptError(
            "isn't of this tree: it lists other arrays",
            where=path,
            hint="files of another checkpoint were copied into this one",
        )
    leaves = tuple(replace(leaf, kind=kinds.get(leaf.path, leaf.kind)) for leaf in tree.leaves)
    keys = {stored[name]: key for name, (key, _) in rows.items()}
    return Sidecar(replace(tree, leaves=leaves), keys, dict(rows.values()))
