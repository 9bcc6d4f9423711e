"""What is a checkpoint, in a few figures: one side of a conversion?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard.layout import FlatSpace, Layout
from reshard.manifest import Manifest
from reshard.ruler import Ints


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a conversion.

    Parameters
    ----------
    path, format
        Where and what.
    world, stage, mesh
        Size of the shard axis, ZeRO stage, all axes.
    tensors, nbytes
        How many tensors (one a name and state), and their bytes.
    files, file_bytes
        How many files hold payload, and their sizes.
    rank_bytes
        (least, most) bytes of payload that a rank holds.
    """

    path: str
    format: str
    world: int
    stage: int | None
    mesh: dict[str, int]
    tensors: int
    nbytes: int
    files: int
    file_bytes: int
    rank_bytes: tuple[int, int]


def side(manifest: Manifest) -> Side:
    """Describe a checkpoint."""
    layout = manifest.layout
    return Side(
        path=str(manifest.root),
        format=manifest.format,
        world=layout.world,
        stage=layout.stage,
        mesh=dict(layout.mesh),
        tensors=len(manifest.tensors),
        nbytes=sum(manifest.nbytes.values()),
        files=len(manifest.files),
        file_bytes=sum(f.nbytes for f in manifest.files),
        rank_bytes=rank_bytes(layout),
    )


def rank_bytes(layout: Layout) -> tuple[int, int]:
    """The least and the most bytes of payload that one rank of the mesh holds."""
    places: dict[tuple[tuple[str, int], ...], Ints] = {}
    common = np.zeros(layout.world, np.int64)
    for space in layout.spaces:
        held = _held(space, layout.world)
        at = tuple(sorted((a, i) for a, i in space.coords.items() if a in ("pipeline", "tensor")))
        if space.coords.get("replicate", 0):
            continue
        if at:
            places[at] = places.get(at, np.zeros(layout.world, np.int64)) + held
        else:
            common += held
    totals = [common + held for held in places.values()] or [common]
    return min(int(t.min()) for t in totals), max(int(t.max()) for t in totals)


def _held(space: FlatSpace, world: int) -> Ints:
    """Bytes of a space that each index of the shard axis holds."""
    width = sum(d.bits for d in space.states.values())
    held = np.zeros(world, np.int64)
    kept = space.kept() * width // 8
    if space.shards == 1 and space.partition.world != 1:
        return np.full(world, kept[0], np.int64)
    ranks = space.shard_start + np.arange(len(kept)) * space.shard_step
    held[ranks % world] += kept
    return held
