"""What is in a Megatron-Core checkpoint of the backend ``torch_dist``?

On disk it is one of torch's distributed checkpoints (:mod:`._dcp_metadata`), whose values are
shards of objects (``<key>/shard_<offset>_<shape>``). The common state is ``common.pt`` up to
Megatron-Core 0.12, and a value of its own from 0.13 on. Tensors of which ranks hold flat ranges
are put right (:func:`._megatron_parts.unflattened`). ``integrity.json``, where it was written, has
the SHA-256 of each file; those of the small files are compared, and the payload has the CRC-32 of
torch's zip.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from reshard.box import Shape
from reshard.builder import Builder
from reshard.errors import CorruptError, IncompleteError, UnsafeError
from reshard.formats._dcp_blobs import Blobs, check_files, orphans
from reshard.formats._dcp_metadata import Index, Stored, read
from reshard.formats._dcp_names import METADATA
from reshard.formats._dcp_spaces import full_chunks
from reshard.formats._megatron_files import COMMON
from reshard.formats._megatron_parts import Contents, Objects, Part, Piece, unflattened
from reshard.stored import brief
from reshard.torchfile import TorchFile, open_torch_file

COMMON_STATE = "common_state"
_INTEGRITY = "integrity.json"
_SHARD = re.compile(r"(.+)/shard_((?:\d{1,9}\.)*\d{1,9})_((?:\d{1,9}\.)*\d{1,9})", re.DOTALL)
_SMALL = 64 << 20
"""Bytes of the largest file whose SHA-256 is compared when a checkpoint is opened."""


def read_torch_dist(builder: Builder) -> Contents:
    """Read the metadata, and where in the files tensors begin.

    Raises
    ------
    ReshardError
        If anything is damaged, missing or unsafe.
    """
    root = builder.root
    if not (root / METADATA).is_file():
        raise IncompleteError("is missing", where=root / METADATA, hint="copy it too")
    index = read(root)
    check_files(root, index)
    _check_integrity(builder)
    reader = _Reader(builder, index)
    tensors = {key: reader.part(stored) for key, stored in index.tensors.items()}
    if left := orphans(root, index):
        some = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        text = f"files of an earlier save that aren't part of this one: {some}"
        builder.note("note", text, root.name)
    ranks = [blob.rank for _, blob in index.blobs() if blob.rank is not None]
    blobs = reader.blobs
    openers: dict[str, Callable[[], TorchFile]] = {
        key: partial(blobs.open, found[0]) for key, found in index.values.items()
    }
    objects = dict(grids(openers, root))
    return Contents(
        tensors=tensors,
        objects=objects,
        common=_common(root, objects),
        world=max(index.plans, *(rank + 1 for rank in ranks), 1),
        paths=reader.paths,
    )


class _Reader:
    """Finds the bytes of tensors."""

    def __init__(self, builder: Builder, index: Index) -> None:
        self._builder = builder
        self._index = index
        self.blobs = Blobs(builder.root)
        self.paths: dict[int, Path] = {}

    def part(self, stored: Stored) -> Part:
        """A tensor with its pieces."""
        pieces = []
        for chunk in full_chunks(stored):
            blob = chunk.blobs[0]
            found = self.blobs.payload(blob, chunk.box.shape, stored.dtype)
            file = self._builder.file(self.blobs.path(blob))
            self.paths[file] = self.blobs.path(blob)
            label = f"{blob.file} at byte {blob.offset}"
            self._builder.region(file, found.begin, found.nbytes, found.crc32, label)
            pieces.append(Piece(chunk.box, blob.rank or 0, file, found.offset, found.strides))
        part = Part(stored.key, stored.shape, stored.dtype, tuple(pieces))
        shape = self._index.flattened.get(stored.key)
        return part if shape is None else unflattened(part, shape, self._builder.root)


def _common(root: Path, objects: dict[str, Objects]) -> TorchFile:
    """The common state: a file, or a value (a list, of which the first is meant)."""
    found = objects.pop(COMMON_STATE, None)
    if (root / COMMON).is_file():
        return open_torch_file(root / COMMON)
    if found is None or len(found.shards) != 1:
        raise IncompleteError(
            f"has neither {COMMON} nor a value {COMMON_STATE}: the state that all ranks share "
            "is missing",
            where=root,
            hint="copy the checkpoint again",
        )
    return found.shards[0]()


def grids(openers: Mapping[str, Callable[[], TorchFile]], where: Path) -> Mapping[str, Objects]:
    """Put the shards of objects in their order.

    Parameters
    ----------
    openers
        ``<key>/shard_<offset>_<shape>`` to what opens it.
    where
        What errors name.

    Raises
    ------
    CorruptError
        If a name makes no sense, or two don't fit together.
    IncompleteError
        If a shard is missing.
    """
    found: dict[tuple[str, Shape], dict[int, Callable[[], TorchFile]]] = {}
    for name, opener in openers.items():
        match = _SHARD.fullmatch(name)
        offset, shape = (_numbers(match[2]), _numbers(match[3])) if match else ((), ())
        inside = len(offset) == len(shape) and all(
            o < n for o, n in zip(offset, shape, strict=True)
        )
        if match is None or not inside:
            raise CorruptError(f"has a value {brief(name)} that is no shard", where=where)
        number = 0
        for o, n in zip(offset, shape, strict=True):
            number = number * n + o
        found.setdefault((match[1], shape), {})[number] = opener
    grids: dict[str, Objects] = {}
    for (key, shape), shards in found.items():
        if key in grids:
            raise CorruptError(
                f"{key} has shards of {list(shape)} and of {list(grids[key].shape)}", where=where
            )
        if len(shards) != math.prod(shape):
            missing = next(i for i in range(len(shards) + 1) if i not in shards)
            raise IncompleteError(
                f"{key} has {math.prod(shape)} shards, and number {missing} is missing",
                where=where,
                hint="copy the checkpoint again",
            )
        grids[key] = Objects(shape, tuple(shards[i] for i in sorted(shards)))
    return grids


def _numbers(text: str) -> Shape:
    return tuple(map(int, text.split(".")))


def _check_integrity(builder: Builder) -> None:
    """Compare the files with the list of them, where there is one.

    DCP's own metadata that were changed after the save are told of and not refused: all that they
    say of shapes, types and places is compared with the data files, whose payload has checksums.
    """
    root = builder.root
    path = root / _INTEGRITY
    if not path.is_file():
        return
    for name, expected in _listed(path).items():
        steps = PurePosixPath(name).parts
        if name.startswith("/") or ".." in steps or "\0" in name:
            raise UnsafeError(f"names a file outside of its folder: {brief(name)}", where=path)
        file = root / name
        if not file.is_file():
            raise IncompleteError(f"is missing; {_INTEGRITY} lists it", where=file)
        if file.suffix == ".distcp" or file.stat().st_size > _SMALL:
            continue
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        if digest != expected and name == METADATA:
            text = (
                f"has the SHA-256 {digest[:16]}..., and {_INTEGRITY} says {expected[:16]}...: "
                "it was changed after the save"
            )
            builder.note("note", text, name)
        elif digest != expected:
            raise CorruptError(
                f"has the SHA-256 {digest[:16]}..., and {_INTEGRITY} says {expected[:16]}...",
                where=file,
                hint="it was damaged, or is of another save",
            )


def _listed(path: Path) -> Mapping[str, str]:
    try:
        found: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptError("isn't JSON", where=path) from error
    files = found.get("files") if isinstance(found, dict) else None
    if (
        not isinstance(files, dict)
        or found.get("algorithm") != "sha256"
        or not all(isinstance(value, str) for value in files.values())
    ):
        raise CorruptError("doesn't list the SHA-256 of files", where=path)
    return files
