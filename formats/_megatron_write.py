"""How is a Megatron-Core checkpoint laid out for P ranks?

As one of torch's distributed checkpoints (:mod:`._dcp_write`): dim 0 of each tensor (of each layer)
is cut in P. Megatron-Core loads it at any tensor, pipeline and data parallelism, for its shards are
boxes of whole tensors. The common state is both a file, for releases up to 0.12, and a value.
``metadata.json`` is written last.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.commit import write_file
from reshard.errors import RequestError
from reshard.format import Draft, Request
from reshard.formats._dcp_write import Book
from reshard.formats._dcp_write_values import small
from reshard.formats._megatron_files import BACKEND, COMMON, METADATA
from reshard.formats._megatron_write_keys import contents
from reshard.manifest import Manifest
from reshard.targets import target_error

if TYPE_CHECKING:
    from reshard.execute import Result

_DESCRIBED = {
    BACKEND: "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def draft(source: Manifest, request: Request, target: Path, name: str) -> Draft:
    """Lay out files for the wanted world size; see :class:`~reshard.format.Format`.

    Raises
    ------
    RequestError
        If a ZeRO stage is asked for, or as :func:`._megatron_write_keys.contents`.
    UnsupportedError
        If torch has no such element type.
    """
    if request.stage is not None:
        raise RequestError(
            "a checkpoint of Megatron-Core has no ZeRO stage",
            hint="leave --stage out, or choose another --format",
        )
    world = request.world or source.layout.world
    found, common = contents(source, request)
    book = Book(world, {"mcore_data": {}, "all_local_plans": [None] * world})
    book.write(found)

    def finish(folder: Path, result: Result) -> None:
        book.finish(folder, result)
        _write_common(folder / COMMON, common)
        write_file(folder / METADATA, json.dumps(_DESCRIBED).encode())

    kinds = {item.key: item for item in found.items}
    return Draft(
        manifest=book.manifest(name, target, found, source),
        finish=finish,
        origin={item.key: item.source for item in found.items if item.key != item.source},
        casts=frozenset(k for k, i in kinds.items() if i.dtype != source.tensors[i.source].dtype),
        losses=tuple(found.losses),
    )


def _write_common(path: Path, common: dict[str, Any]) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            small(common).write(fd, 0)
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise target_error(error, path) from error
