"""Megatron-Core's distributed checkpoints (``torch_dist`` and ``zarr``).

A folder with ``metadata.json``, which is written last and names the backend. Neither Megatron-Core
nor torch is imported, and no code from a file runs. The parts: what each backend stores
(``_megatron_torch_dist``, ``_megatron_zarr``), as tensors in pieces (``_megatron_parts``); what
their keys mean (``_megatron_names``); whose state lies where in buckets (``_megatron_buckets``,
``_megatron_gathered``, ``_megatron_match``); how all that becomes spaces (``_megatron_spaces``),
groups and objects (``_megatron_state``). Writing begins in ``_megatron_write``.

The rules are those of Megatron-Core 0.8 to 0.19.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from reshard.builder import Builder
from reshard.collector import collector_paused
from reshard.errors import CorruptError, IncompleteError, UnsupportedError
from reshard.format import Draft, Found, Request
from reshard.formats import _megatron_write as writing
from reshard.formats._megatron_buckets import collect
from reshard.formats._megatron_gathered import gathered
from reshard.formats._megatron_match import match
from reshard.formats._megatron_names import check_states, named
from reshard.formats._megatron_parts import Contents
from reshard.formats._megatron_spaces import Spaces
from reshard.formats._megatron_state import State, assign
from reshard.formats._megatron_torch_dist import COMMON, read_torch_dist
from reshard.formats._megatron_write import METADATA
from reshard.formats._megatron_zarr import read_zarr
from reshard.layout import PARAM
from reshard.manifest import Manifest
from reshard.stored import brief

LATEST = "latest_checkpointed_iteration.txt"
_BACKEND = "sharded_backend"
_LARGEST = 1 << 16
_ITERATION = re.compile(r"iter_\d{7,}|release")
_READERS: Mapping[str, Callable[[Builder], Contents]] = {
    "torch_dist": read_torch_dist,
    "zarr": read_zarr,
}


class Megatron:
    """The format of Megatron-Core's checkpoints; see the module."""

    name = "megatron"
    title = "Megatron-Core's distributed checkpoints (torch_dist, and the older zarr)"
    writes = True
    sharded = True

    def detect(self, path: Path) -> Found | None:
        """A folder with Megatron's metadata, or one of iterations (the latest counts)."""
        if not path.is_dir():
            return None
        if _is_one(path):
            return Found(path, parts=frozenset(("dcp",)))
        if not (path / LATEST).is_file():
            return None
        some = [p for p in path.iterdir() if _ITERATION.fullmatch(p.name) and _is_one(p)]
        latest = _latest(path)
        found = next((p for p in some if p.name == latest), None)
        if found is None:
            return None
        return Found(found, tuple(sorted(p for p in some if p != found)))

    @collector_paused()
    def open(self, root: Path) -> Manifest:
        """Read the metadata, the pickles of all values, and where in the files tensors begin.

        Where the optimizer's state was stored without names, weights and masters are read and
        compared (see :mod:`._megatron_match`).
        """
        builder = Builder(self.name, root, algorithm="crc32")
        contents = _reader(root)(builder)
        buckets, rest = collect(contents.tensors, root)
        found, paths = gathered(builder, contents)
        tensors = named(rest, root)
        if buckets or found:
            tensors |= match((*buckets, *found), tensors, {**contents.paths, **paths}, root)
        if not tensors:
            raise IncompleteError("has no tensors", where=root)
        if bare := check_states(tensors, root):
            some = ", ".join(bare[:5]) + (f" and {len(bare) - 5} more" if len(bare) > 5 else "")
            builder.note("note", f"the optimizer has no state of {some}", "optimizer")
        State(builder, contents).add()
        shapes = {name: part.shape for (name, state), part in tensors.items() if state != PARAM}
        Spaces(builder, contents.world).add(tensors, assign(builder, shapes))
        return builder.build({"shard": contents.world}, None)

    def draft(self, source: Manifest, request: Request, target: Path) -> Draft:
        """Lay out ``torch_dist`` in the optimizer format ``fully_reshardable``."""
        return writing.draft(source, request, target, self.name)


FORMAT = Megatron()


def _is_one(path: Path) -> bool:
    """Whether this is a checkpoint, or what a save that wasn't finished left."""
    if (path / METADATA).is_file():
        return _BACKEND in (_described(path) or {})
    if not (path / COMMON).is_file():
        return False
    return (path / ".metadata").is_file() or any(path.glob("*/.zarray"))


def _described(path: Path) -> dict[str, Any] | None:
    try:
        with (path / METADATA).open("rb") as file:
            found = json.loads(file.read(_LARGEST))
    except (OSError, ValueError, RecursionError):
        return None  # some other program's file
    return found if isinstance(found, dict) else None


def _latest(path: Path) -> str:
    with (path / LATEST).open("rb") as file:
        text = file.read(64).decode("ascii", "replace").strip()
    return f"iter_{int(text):07d}" if text.isdecimal() else text


def _reader(root: Path) -> Callable[[Builder], Contents]:
    if not (root / METADATA).is_file():
        raise IncompleteError(
            f"has no {METADATA}, which Megatron-Core writes last: the save wasn't finished",
            where=root,
            hint="take an earlier checkpoint",
        )
    found = _described(root)
    if found is None or _BACKEND not in found:
        raise CorruptError("doesn't say which backend wrote the checkpoint", where=root / METADATA)
    backend, version = found[_BACKEND], found.get("sharded_backend_version")
    if backend not in _READERS or version != 1:
        raise UnsupportedError(
            f"was written by the backend {brief(backend)}, version {brief(version)}; this reads "
            f"{' and '.join(_READERS)}, version 1",
            where=root,
        )
    return _READERS[backend]
