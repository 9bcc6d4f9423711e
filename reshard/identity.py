"""Is it the same conversion of the same source?

What an earlier run has done counts for another one only if both would do the same to the same
bytes. An **identity** says what a conversion depends on, part by part, so that a mismatch can be
named: the release, the place of the source, what the source says of itself, the marks that its
files bear, and what is to be made of it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import reshard
from reshard import record
from reshard.errors import UnsupportedError
from reshard.manifest import Manifest
from reshard.manifest_json import groups_to_json, layout_to_json
from reshard.plain import encode
from reshard.plan import Plan
from reshard.source import source_error
from reshard.store import ShardStore

VERSION = 1
"""Of what is written down; a change of it makes everything earlier void."""

Mark = tuple[int, int, int, int]
"""Of a file: bytes, inode, times of the last change of its bytes and of its status, in ns."""


def identity(plan: Plan, marks: Iterable[Mark], *, verify: bool) -> dict[str, str]:
    """What a conversion depends on, as digests by part.

    Parameters
    ----------
    plan
        The conversion.
    marks
        Of the source's files, taken before anything of them was read.
    verify
        Whether checksums of the source are summed.
    """
    source, target = plan.source, plan.target
    rules = [
        sorted([*key, *origin] for key, origin in plan.origin.items()),
        sorted(plan.casts),
        plan.join.equal,
        verify,
        [(m.key, m.nbytes, m.dtype.name, m.written, m.counts, m.twin) for m in plan.messages],
        plan.derived,
    ]
    return {
        "release": f"{reshard.__version__} (journal {VERSION}, units of {record.UNIT})",
        "root": os.path.realpath(source.root),
        "source": _digest(_parts_of(source)),
        "files": _digest([list(marks)]),
        "target": _digest(_parts_of(target)),
        "plan": _digest(rules),
    }


def stored_files(manifest: Manifest) -> list[Path]:
    """Every file on the disk that a checkpoint's payload depends on, once."""
    found = dict.fromkeys(
        manifest.path(index) for index, file in enumerate(manifest.files) if file.decoder is None
    )
    decoders = [file.decoder for file in manifest.files if file.decoder is not None]
    shared = {id(paths): paths for paths in [decoder.stored for decoder in decoders]}
    for paths in shared.values():
        found.update(dict.fromkeys(manifest.root / path for path in paths))
    return list(found)


def marks(manifest: Manifest) -> list[Mark]:
    """The marks that a checkpoint's files bear, in the order of :func:`stored_files`.

    The time of the last change of the status is among them: no program can set it back.

    Raises
    ------
    ReshardError
        If a file is gone.
    """
    found: list[Mark] = []
    for path in stored_files(manifest):
        try:
            status = os.stat(path)
        except OSError as error:
            raise source_error(error, path) from error
        found.append((status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns))
    return found


def _parts_of(manifest: Manifest) -> Iterable[Any]:
    """All that a manifest says, its place aside."""
    yield manifest.format
    yield layout_to_json(manifest.layout)
    yield [(f.path, f.nbytes) for f in manifest.files]
    for (space, state), store in manifest.stores.items():
        if isinstance(store, ShardStore):
            yield space, state, store.part, store.chunk
        else:
            yield space, state, store.strides
        yield store.files.tobytes()
        yield store.offsets.tobytes()
    yield groups_to_json(manifest.groups)
    yield dict(manifest.aliases)
    yield _objects(manifest)
    yield sorted([*key, value] for key, value in manifest.digests.items())
    regions = manifest.regions
    yield regions.algorithm
    for column in (regions.files, regions.offsets, regions.sizes, regions.values):
        yield None if column is None else column.tobytes()


def _objects(manifest: Manifest) -> Any:
    try:
        return encode(dict(manifest.objects))
    except UnsupportedError:  # more than JSON holds: the marks of its files vouch for the rest
        return repr(manifest.objects)


def _digest(parts: Iterable[Any]) -> str:
    found = hashlib.sha256()
    for part in parts:
        if not isinstance(part, bytes):
            part = json.dumps(part, sort_keys=True).encode()
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()
