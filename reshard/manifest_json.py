"""How is a layout with its digests written as JSON, version 1?

The schema is ``reshard/schema/manifest-1.schema.json`` and the normative text is
``docs/layout-schema.md``. The document is O(tensors + chunks): partitions are written as rules,
names and shapes stand once in a table, and spaces refer to its rows. Its own checksum stands
under ``crc64nvme``: the CRC-64/NVME of the document without that key, as canonical JSON (sorted
keys, no blanks, ASCII only).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reshard.box import Box
from reshard.digest import CRC64NVME
from reshard.dtypes import dtype
from reshard.errors import CorruptError, UnsupportedError
from reshard.layout import Entry, FlatSpace, Layout, TensorKey
from reshard.manifest import ParamGroup
from reshard.partition import partition
from reshard.plain import decode, encode
from reshard.problems import VERSION as VERSION
from reshard.problems import Problem, problems

KEY = "zreshard"
"""The key that holds the version: a document without it is none of ours."""


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """A layout as plain JSON data: the keys ``mesh``, ``stage``, ``tensors`` and ``spaces``."""
    rows: dict[tuple[str, tuple[int, ...]], int] = {}
    spaces = [_space_to_json(space, rows) for space in layout.spaces]
    return {
        "mesh": dict(layout.mesh),
        "stage": layout.stage,
        "tensors": {
            "names": [name for name, _ in rows],
            "shapes": [list(shape) for _, shape in rows],
        },
        "spaces": spaces,
    }


def _space_to_json(
    space: FlatSpace, rows: dict[tuple[str, tuple[int, ...]], int]
) -> dict[str, Any]:
    index = [rows.setdefault((e.name, e.shape), len(rows)) for e in space.entries]
    boxes = {
        str(i): [list(e.box.start), list(e.box.stop)]
        for i, e in enumerate(space.entries)
        if e.box is not None
    }
    rule = space.partition.to_json()
    data: dict[str, Any] = {
        "name": space.name,
        "partition": {k: list(v) if isinstance(v, tuple) else v for k, v in rule.items()},
        "states": {s: d.name for s, d in space.states.items()},
        "entries": index,
    }
    if boxes:
        data["boxes"] = boxes
    if space.coords:
        data["coords"] = dict(space.coords)
    if space.group is not None:
        data["group"] = list(space.group) if isinstance(space.group, tuple) else space.group
    if (space.shard_start, space.shard_step) != (0, 1):
        data["shards"] = [space.shard_start, space.shard_step]
    return data


def layout_from_json(data: Mapping[str, Any]) -> Layout:
    """The layout of a document that :func:`~reshard.problems.problems` found nothing wrong with."""
    names, shapes = data["tensors"]["names"], [tuple(s) for s in data["tensors"]["shapes"]]
    spaces = tuple(_space_from_json(s, names, shapes) for s in data["spaces"])
    return Layout(spaces, dict(data["mesh"]), data.get("stage"))


def _space_from_json(
    data: Mapping[str, Any], names: list[str], shapes: list[tuple[int, ...]]
) -> FlatSpace:
    boxes = {int(k): Box(tuple(a), tuple(b)) for k, (a, b) in data.get("boxes", {}).items()}
    entries = tuple(
        Entry(names[row], shapes[row], boxes.get(i)) for i, row in enumerate(data["entries"])
    )
    start, step = data.get("shards", (0, 1))
    group = data.get("group")
    return FlatSpace(
        name=data["name"],
        entries=entries,
        partition=partition(data["partition"]),
        states={s: dtype(d) for s, d in data["states"].items()},
        coords=dict(data.get("coords", {})),
        group=tuple(group) if isinstance(group, list) else group,
        shard_start=start,
        shard_step=step,
    )


def groups_to_json(groups: Sequence[ParamGroup]) -> list[dict[str, Any]]:
    """Parameter groups as plain JSON data."""
    return [
        {
            "settings": encode(dict(g.settings)),
            "scalars": encode(dict(g.scalars)),
            "optimizer": g.optimizer,
        }
        for g in groups
    ]


def groups_from_json(data: Sequence[Mapping[str, Any]]) -> tuple[ParamGroup, ...]:
    """Parameter groups of plain JSON data."""
    return tuple(
        ParamGroup(
            decode(g["settings"], f"/groups/{i}/settings"),
            decode(g["scalars"], f"/groups/{i}/scalars"),
            g.get("optimizer", 0),
        )
        for i, g in enumerate(data)
    )


def digests_to_json(
    layout: Layout, digests: Mapping[TensorKey, int]
) -> dict[str, dict[str, list[str | None]]]:
    """Digests as a column a space and state, in the order of the entries."""
    found: dict[str, dict[str, list[str | None]]] = {}
    for space in layout.spaces:
        found[space.name] = {}
        for state in space.states:
            values = (digests.get((e.name, state)) for e in space.entries)
            found[space.name][state] = [None if v is None else CRC64NVME.hex(v) for v in values]
    return found


def digests_from_json(
    layout: Layout, data: Mapping[str, Mapping[str, Sequence[str | None]]]
) -> dict[TensorKey, int]:
    """Digests by tensor."""
    found: dict[TensorKey, int] = {}
    for space in layout.spaces:
        for state, column in data.get(space.name, {}).items():
            for entry, value in zip(space.entries, column, strict=True):
                if value is not None:
                    found[entry.name, state] = int(value, 16)
    return found


def checksums_to_json(values: np.ndarray) -> list[str]:
    """A column of CRC-64 values as hexadecimal digits."""
    return [CRC64NVME.hex(v) for v in values.tolist()]


def canonical(document: Mapping[str, Any]) -> bytes:
    """The bytes that a document's checksum is taken of."""
    rest = {k: v for k, v in document.items() if k != "crc64nvme"}
    return json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def dumps(document: Mapping[str, Any]) -> bytes:
    """A document with its checksum, as it is written to a file."""
    sealed = {**document, "crc64nvme": CRC64NVME.hex(CRC64NVME.of(canonical(document)))}
    return (json.dumps(sealed, separators=(",", ":"), allow_nan=False) + "\n").encode("ascii")


def loads(data: bytes, where: Path) -> dict[str, Any]:
    """Read and check a document.

    Raises
    ------
    UnsupportedError
        If a newer release wrote it in a version that this one doesn't know.
    CorruptError
        If it isn't a manifest, with every problem and its place.
    """
    try:
        text = data.decode("utf-8")
        document = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"is not JSON: {error}", where=where) from error
    if not isinstance(document, dict) or KEY not in document:
        raise CorruptError(f"is not a manifest: it has no {KEY!r} key", where=where)
    version = document[KEY]
    if isinstance(version, int) and not isinstance(version, bool) and version > VERSION:
        raise UnsupportedError(
            f"is written in version {version}; this release reads up to {VERSION}",
            where=where,
            hint="a newer zreshard reads it",
        )
    found = problems(document)
    if found:
        raise CorruptError(f"has {len(found)} problem(s):\n{listed(found)}", where=where)
    stored = document["crc64nvme"]
    actual = CRC64NVME.hex(CRC64NVME.of(canonical(document)))
    if stored != actual:
        raise CorruptError(
            f"has the checksum {actual}, but says {stored}",
            where=where,
            hint="it was changed after it was written",
        )
    return document


def listed(found: Sequence[Problem]) -> str:
    """Problems for a message, one a line."""
    lines = [f"  {p.place or '/'}: {p.text}" for p in found[:50]]
    if len(found) > 50:
        lines.append(f"  and {len(found) - 50} more")
    return "\n".join(lines)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key!r} stands twice")
            seen.add(key)
    return found
