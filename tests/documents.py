"""Layouts and manifest documents for tests, small ones and random ones."""

from __future__ import annotations

import functools
import json
import math
import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from reshard.box import Box
from reshard.dtypes import BY_NAME, DType, dtype
from reshard.formats import native
from reshard.layout import Entry, FlatSpace, Layout
from reshard.manifest import Manifest, ParamGroup
from reshard.manifest_json import dumps
from reshard.partition import (
    Contiguous,
    Explicit,
    Partition,
    PerTensor,
    Replicated,
    Rows,
    Whole,
)
from reshard.plain import LeftOut, NumpyArray, TensorRef
from reshard.store import Regions
from reshard.stored import Device, DTypeName

F32, BF16 = dtype("float32"), dtype("bfloat16")
ADAM = {"master": F32, "exp_avg": F32, "exp_avg_sq": F32}
WHOLE_BYTES = [d for d in BY_NAME.values() if d.bits % 8 == 0]

OBJECTS: dict[str, Any] = {
    "step": 12,
    "lr": float("nan"),
    "client": {"epoch": (1, 2), 3: b"\x00\xff", "$odd": {1, 2}, "none": [None, True, -0.0]},
    "rng": np.arange(5, dtype=np.uint8),
    "ref": TensorRef("a", "client"),
    "args": Namespace(dtype=DTypeName("bfloat16"), device=Device("cuda:0"), loss=np.float32(0.5)),
    "history": np.arange(3).view(NumpyArray),
    "scheduler": LeftOut("torch.optim.lr_scheduler.LambdaLR"),
}
GROUPS = (
    ParamGroup({"lr": 1e-4, "betas": (0.9, 0.95), "maximize": False}, {"step": 12}),
    ParamGroup({"lr": 0.0, "fused": None}, {}, 1),
)


def everything() -> Layout:
    """A layout in which every key of the document occurs."""
    a, b = Entry("a", (4, 6)), Entry("b.weight", (3,))
    halves = (
        Entry("cut", (4, 6), Box((0, 0), (4, 3))),
        Entry("cut", (4, 6), Box((0, 3), (4, 6))),
        Entry("scalar", ()),
    )
    spaces = (
        FlatSpace("group0", (a, b), Contiguous(4, align=2, multiple=2), ADAM, group=0),
        FlatSpace(
            "group1.expert1",
            (Entry("expert", (5, 2)), Entry("empty", (0, 3))),
            PerTensor(2),
            {"master": F32, "exp/avg": BF16, "..": F32},
            {"expert": 1, "pipeline": 0},
            1,
            1,
            2,
        ),
        FlatSpace("param.bfloat16", (a, b), Replicated(4), {"param": BF16}),
        FlatSpace("explicit", halves, Explicit(4, (0, 3, 3)), {"param": F32}),
        FlatSpace("whole", (Entry("c", (2, 2)), Entry("d", (1,))), Whole(4, (2, 0)), {"x": F32}),
        FlatSpace("rows", (Entry("e", (5, 2)),), Rows(4), {"param": F32}, group=(1,)),
    )
    return Layout(spaces, {"shard": 4, "expert": 2, "pipeline": 3}, 2)


def document(layout: Layout, seed: int = 0, **parts: Any) -> dict[str, Any]:
    """A good document of a layout, with checksums and digests of nothing in particular."""
    files, stores, rows = native._new_arrays(layout)
    manifest = Manifest(
        format="native",
        root=Path("nowhere"),
        layout=layout,
        files=tuple(files),
        stores=stores,
        groups=parts.get("groups", GROUPS),
        aliases=parts.get("aliases", {}),
        objects=parts.get("objects", OBJECTS),
        regions=Regions.of("crc64nvme", rows),
    )
    rng = random.Random(seed)
    digests = {
        (entry.name, state): rng.getrandbits(64)
        for space in layout.spaces
        for state in space.states
        for entry in space.entries
        if rng.random() < 0.8
    }
    checksums = np.array([rng.getrandbits(64) for _ in rows], np.uint64)
    made = native._document(manifest, checksums, digests)
    return json.loads(dumps(made))


@functools.cache
def _good_text() -> str:
    return json.dumps(document(everything(), aliases={"tied": "a", "tied.again": "b.weight"}))


def good() -> dict[str, Any]:
    """A fresh copy of a good document in which every key occurs."""
    return json.loads(_good_text())


# -- random ones ----------------------------------------------------------------------------------

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box | None:
    """A box of a tensor, or none."""
    if draw(st.booleans()):
        return None
    pairs = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


@st.composite
def partitions(draw: st.DrawFn, world: int, count: int) -> Partition:
    """Any rule for a space of ``count`` entries."""
    kind = draw(st.sampled_from((Contiguous, PerTensor, Rows, Replicated, Whole, Explicit)))
    if kind is Contiguous:
        return Contiguous(world, draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    if issubclass(kind, Whole):
        owners = st.lists(st.integers(0, world - 1), min_size=count, max_size=count)
        return kind(world, tuple(draw(owners)))
    return kind(world)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any small layout; each tensor has one shape and each state of it one element type."""
    world = draw(st.integers(1, 5))
    experts = draw(st.sampled_from([n for n in (1, 2, 3) if n <= world]))
    shape_of: dict[str, tuple[int, ...]] = {}
    type_of: dict[str, DType] = {}
    spaces = []
    for index in range(draw(st.integers(0, 3))):
        entries = []
        for name in draw(st.lists(st.text(max_size=4), max_size=4)):
            shape = shape_of.setdefault(name, draw(shapes))
            entries.append(Entry(name, shape, draw(boxes(shape))))
        states = draw(st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=3))
        spaces.append(
            FlatSpace(
                name=f"s{index}" + draw(st.text("aZ09._-", max_size=3)),
                entries=tuple(entries),
                partition=draw(partitions(world // experts, len(entries))),
                states={s: type_of.setdefault(s, draw(st.sampled_from(WHOLE_BYTES)))
                        for s in states},
                coords=draw(st.sampled_from(({}, {"expert": experts - 1}, {"tensor": 1}))),
                group=draw(st.sampled_from((None, 0, 1, (1, *[0] * len(entries))[: len(entries)]))),
                shard_start=experts - 1,
                shard_step=experts,
            )
        )  # fmt: skip
    mesh = {"shard": world, "expert": experts, "tensor": 2}
    return Layout(tuple(spaces), mesh, draw(st.sampled_from((None, 0, 1, 2, 3))))


def values(tensor_shape: tuple[int, ...], kind: DType, seed: int) -> np.ndarray[Any, Any]:
    """Random bytes as an array of any type."""
    count = math.prod(tensor_shape)
    raw = np.random.default_rng(seed).integers(0, 256, kind.nbytes(count), np.uint8)
    if kind.name == "bool":
        raw &= 1
    return raw.view(kind.numpy).reshape(tensor_shape)
