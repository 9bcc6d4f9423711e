"""What is in a Megatron-Core checkpoint of the older backend ``zarr``?

A folder a key, each a zarr array of version 2 that isn't compressed, with a chunk a shard; its
element type may be ``"bfloat16"``, which zarr itself hasn't. Sharded objects are
``<key>/shard_<offset>_<shape>.pt``. Folders ``<key>.sync`` were locks. Every chunk has to be
there: others read zeros, or what was in memory, where one is missing.

Source: Megatron-Core 0.8, ``dist_checkpointing/strategies/zarr.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from reshard.builder import Builder
from reshard.errors import CorruptError, IncompleteError, UnsupportedError
from reshard.formats._megatron_files import COMMON
from reshard.formats._megatron_parts import Contents, Objects, Part, Piece
from reshard.formats._megatron_torch_dist import grids
from reshard.formats._orbax_store import check_chunks
from reshard.formats._zarr import V2, parse
from reshard.torchfile import TorchFile, open_torch_file

LOCK = ".sync"


def read_zarr(builder: Builder) -> Contents:
    """Read the metadata of all arrays, and see that every chunk is there.

    Raises
    ------
    ReshardError
        If anything is damaged or missing.
    """
    root = builder.root
    if not (root / COMMON).is_file():
        raise IncompleteError("is missing", where=root / COMMON, hint="copy it too")
    tensors: dict[str, Part] = {}
    openers: dict[str, Callable[[], TorchFile]] = {}
    paths: dict[int, Path] = {}
    for folder in sorted(p for p in root.iterdir() if p.is_dir()):
        if folder.name.endswith(LOCK):
            continue
        shards = sorted(folder.glob("shard_*.pt"))
        if (folder / V2).is_file():
            tensors[folder.name] = _part(builder, folder, paths)
        elif shards:
            for path in shards:
                openers[f"{folder.name}/{path.stem}"] = partial(open_torch_file, path)
        elif any(folder.iterdir()):
            raise IncompleteError(f"has neither {V2} nor shards of an object", where=folder)
    objects: dict[str, Objects] = dict(grids(openers, root))
    return Contents(tensors, objects, open_torch_file(root / COMMON), 1, paths)


def _part(builder: Builder, folder: Path, paths: dict[int, Path]) -> Part:
    array = parse((folder / V2).read_bytes(), 2, folder / V2)
    if not array.raw or array.separator != ".":
        raise UnsupportedError(
            "is compressed, or in column-major order, which Megatron-Core doesn't write",
            where=folder / V2,
        )
    check_chunks(array, (p.name for p in folder.iterdir()), folder.name, builder.root)
    pieces = []
    for name, box in array.boxes():
        path = folder / name
        if (size := path.stat().st_size) != array.chunk_nbytes:
            raise CorruptError(f"has {size} bytes and should have {array.chunk_nbytes}", where=path)
        if box.shape != array.chunk:
            raise UnsupportedError(
                f"has chunks {list(array.chunk)}, which don't divide {list(array.shape)}",
                where=folder / V2,
            )
        file = builder.file(path)
        paths[file] = path
        pieces.append(Piece(box, 0, file, 0))
    if not pieces:
        raise UnsupportedError("is an array without elements", where=folder / V2)
    return Part(folder.name, array.shape, array.dtype, tuple(pieces))
