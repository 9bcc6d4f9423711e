"""Random models through DeepSpeed's files at random world sizes and stages, and back.

Sizes 0 and 1, odd sizes, more ranks than elements, several last ranks that are all padding, 12
ranks and more (whose names sort differently as text and as numbers).
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reshard.api import convert, open_manifest
from reshard.builder import Builder, Placed
from reshard.checkpoint import Checkpoint
from reshard.conversion import Wanted
from reshard.dtypes import dtype
from reshard.execute import Options
from reshard.layout import Entry
from reshard.manifest import Manifest, ParamGroup
from tests.oracle import MEMORY

FAST = Options(sync=False, workers=2)
STATES = ("master", "exp_avg", "exp_avg_sq")

shapes = st.lists(
    st.one_of(
        st.just(()),
        st.tuples(st.sampled_from([0, 1, 2, 3, 7, 33, 64])),
        st.tuples(st.integers(0, 9), st.integers(1, 9)),
        st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5)),
    ),
    min_size=1,
    max_size=6,
).filter(lambda some: any(math.prod(s) for s in some))
worlds = st.one_of(st.integers(1, 8), st.sampled_from([12, 13, 31, 64]))
stages = st.sampled_from([1, 2, 3])

Arrays = dict[tuple[str, str], NDArray[Any]]


@st.composite
def models(draw: st.DrawFn) -> tuple[list[list[tuple[str, tuple[int, ...]]]], int]:
    """Parameter groups of named shapes, none of them empty of elements, and a seed."""
    groups = draw(st.lists(shapes, min_size=1, max_size=3))
    named = [
        [(f"g{g}.p{i}", shape) for i, shape in enumerate(some)] for g, some in enumerate(groups)
    ]
    return named, draw(st.integers(0, 2**32 - 1))


def whole(root: Path, model: tuple[list[list[tuple[str, tuple[int, ...]]]], int]) -> Any:
    """A checkpoint of one rank with whole tensors in one file, and its arrays."""
    groups, seed = model
    rng = np.random.default_rng(seed)
    arrays: Arrays = {}
    builder = Builder("test", root)
    data = bytearray()
    path = root / "data"
    path.write_bytes(b"")
    builder.file(path)

    def put(name: str, state: str, array: NDArray[Any]) -> Placed:
        arrays[name, state] = array
        offset = len(data)
        data.extend(array.tobytes())
        return Placed(Entry(name, array.shape), dtype(array.dtype.name), 0, offset)

    weights = []
    for number, group in enumerate(groups):
        builder.groups.append(ParamGroup({"lr": 0.1 * (number + 1)}, {"step": np.float32(3)}))
        rows: dict[str, list[Placed]] = {s: [] for s in STATES}
        for name, shape in group:
            for state in STATES:
                array = np.asarray(rng.standard_normal(shape), np.float32)
                rows[state].append(put(name, state, array))
            weights.append(put(name, "param", arrays[name, "master"].astype(ml_dtypes.bfloat16)))
        for state, some in rows.items():
            builder.add_placed(f"g{number}.{state}", state, some, group=number)
    builder.add_placed("weights", "param", weights)
    buffers = [
        put("count", "buffer", np.array(7, np.int64)),
        put("mask", "buffer", rng.random(11) < 0.5),
    ]
    builder.add_placed("buffers", "buffer", buffers)
    builder.objects.update(step=3, deepspeed={"dtype": "bfloat16", "tag": "t3"})
    path.write_bytes(data)
    built = builder.build({"shard": 1}, 1)
    return _with_sizes(built, len(data)), arrays


def _with_sizes(manifest: Manifest, nbytes: int) -> Manifest:
    from dataclasses import replace

    from reshard.store import File

    return replace(manifest, files=(File("data", nbytes),))


def equal(found: Checkpoint, arrays: Arrays, *, weights: bool) -> None:
    for key, array in arrays.items():
        if key[1] == "param" and not weights:
            continue
        read = found[key].numpy()
        assert read.shape == array.shape, key
        assert read.tobytes() == array.tobytes(), key


@settings(max_examples=max(1, settings().max_examples // 3))
@given(model=models(), first=worlds, second=worlds, one=stages, two=stages)
def test_there_and_on_and_back(model: Any, first: int, second: int, one: int, two: int) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        root = Path(name)
        source, arrays = whole(root, model)
        place: Path | Manifest = source
        for index, (world, stage, kind) in enumerate(
            ((first, one, "deepspeed"), (second, two, None), (first, 1, "native"), (1, 1, None))
        ):
            target = root / str(index)
            convert(place, target, Wanted(format=kind, world=world, stage=stage), FAST)
            found = Checkpoint(open_manifest(target))
            assert found.world == world
            # stage 3 keeps no 16-bit weights in DeepSpeed's files
            equal(found, arrays, weights=(one if index == 0 else two) != 3)
            place = target
