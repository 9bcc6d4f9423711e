"""Megatron-Core's distributed checkpoints (``torch_dist`` and ``zarr``).

A folder with ``metadata.json``, which is written last and names the backend. Neither Megatron-Core
nor torch is imported, and no code from a file runs. The parts: what each backend stores
(``_megatron_torch_dist``, ``_megatron_zarr``), as tensors in pieces (``_megatron_parts``); what
their keys mean (``_megatron_names``); whose state lies where in buckets (``_megatron_buckets``,
``_megatron_gathered``, ``_megatron_match``); how all that becomes spaces (``_megatron_spaces``),
groups and objects (``_megatron_state``); ``_megatron_read`` joins them. Writing begins in
``_megatron_write``.

The rules are those of Megatron-Core 0.8 to 0.19.
"""

from __future__ import annotations

import re
from pathlib import Path

from reshard.format import Draft, Found, Request
from reshard.formats._megatron_files import BACKEND, COMMON, LATEST, METADATA, described
from reshard.manifest import Manifest

_ITERATION = re.compile(r"iter_\d{7,}|release")


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

    def open(self, root: Path) -> Manifest:
        """Read the metadata, the pickles of all values, and where in the files tensors begin."""
        from reshard.formats._megatron_read import read_checkpoint

        return read_checkpoint(root, self.name)

    def draft(self, source: Manifest, request: Request, target: Path) -> Draft:
        """Lay out ``torch_dist`` in the optimizer format ``fully_reshardable``."""
        from reshard.formats import _megatron_write

        return _megatron_write.draft(source, request, target, self.name)


FORMAT = Megatron()


def _is_one(path: Path) -> bool:
    """Whether this is a checkpoint, or what a save that wasn't finished left."""
    if (path / METADATA).is_file():
        return BACKEND in (described(path) or {})
    if not (path / COMMON).is_file():
        return False
    return (path / ".metadata").is_file() or any(path.glob("*/.zarray"))


def _latest(path: Path) -> str:
    with (path / LATEST).open("rb") as file:
        text = file.read(64).decode("ascii", "replace").strip()
    return f"iter_{int(text):07d}" if text.isdecimal() else text
