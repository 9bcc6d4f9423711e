"""Are differences found, measured and placed, and is everything else called equal?"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import Side

from reshard.api import consolidate, convert, open_manifest
from reshard.conversion import Wanted
from reshard.describe import numbers, simple
from reshard.difference import Difference, diff
from reshard.dtypes import BY_NAME, dtype
from reshard.errors import CorruptError, InconsistentError
from reshard.execute import Options
from reshard.layout import Entry, FlatSpace, Layout
from reshard.manifest import Manifest, ParamGroup
from reshard.partition import Contiguous, PerTensor, Replicated
from reshard.plain import TensorRef

FAST = Options(sync=False)
BYTE_TYPES = sorted(n for n, d in BY_NAME.items() if d.bits % 8 == 0)


@pytest.fixture(scope="module")
def deepspeed(golden_dir: Path) -> Path:
    return golden_dir / "z2_p4_bf16" / "ckpt"


@pytest.fixture(scope="module")
def native(deepspeed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("diff") / "native"
    convert(deepspeed, path, Wanted(format="native", world=3, stage=3), FAST)
    return path


def stored(root: Path, arrays: dict[str, np.ndarray], partition=None, copies: int = 1) -> Manifest:
    """A checkpoint of these tensors, one space a tensor."""
    spaces = []
    for name, array in arrays.items():
        kind = dtype(array.dtype.name)
        for copy in range(copies):
            spaces.append(
                FlatSpace(
                    f"{name}.{copy}",
                    (Entry(name, array.shape),),
                    partition or Replicated(1),
                    {"param": kind},
                    {"replicate": copy},
                )
            )
    side = Side(Layout(tuple(spaces), {"shard": 1})).lay_plainly()
    side.write(root, {(n, "param"): a for n, a in arrays.items()}, random.Random(0))
    return side.manifest(root)


# -- how far apart --------------------------------------------------------------------------------


def plainly(
    a: np.ndarray, b: np.ndarray, rtol: float, atol: float
) -> tuple[int, int, float, float]:
    """(differ, outside, largest absolute, largest relative), element by element."""
    differ = outside = 0
    largest = relative = 0.0
    for x, y in zip(a.reshape(-1), b.reshape(-1), strict=True):
        if a.dtype == b.dtype and x.tobytes() == y.tobytes():
            continue
        whole = a.dtype == b.dtype and a.dtype.kind in "iub"
        p, q = (int(x), int(y)) if whole else (complex(x), complex(y))
        if a.dtype != b.dtype and (p == q or (p != p and q != q)):
            continue
        differ += 1
        gap = 0.0 if p == q or (p != p and q != q) else float(abs(p - q))
        gap = np.inf if np.isnan(gap) else gap
        size = float(abs(q))
        near = gap <= atol + rtol * size
        outside += (not near) if rtol or atol else 1
        largest = max(largest, gap)
        share = 0.0 if gap == 0 else np.inf if size == 0 or np.isnan(size) else gap / size
        relative = max(relative, np.inf if np.isnan(share) else share)
    return differ, outside, largest, relative


def random_pair(rng: random.Random, kind_a: str, kind_b: str) -> tuple[np.ndarray, np.ndarray]:
    shape = tuple(rng.choice([1, 2, 3, 7]) for _ in range(rng.randint(0, 3)))
    count = int(np.prod(shape, dtype=int))
    found = []
    for kind in (kind_a, kind_b):
        raw = np.frombuffer(rng.randbytes(count * dtype(kind).itemsize), np.uint8)
        raw = raw & 1 if kind == "bool" else raw
        found.append(raw.view(dtype(kind).numpy).reshape(shape).copy())
    a, b = found
    same = np.array([rng.random() < 0.5 for _ in range(count)], bool).reshape(shape)
    values = a[same].real if a.dtype.kind == "c" and b.dtype.kind != "c" else a[same]
    if "float8" in kind_a and "float8" in kind_b:
        values = values.astype(np.float32)  # between some of them there is no cast
    with np.errstate(all="ignore"):
        b[same] = values.astype(b.dtype)
    return a, b


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(BYTE_TYPES),
    st.sampled_from([None, *BYTE_TYPES]),
    st.sampled_from([(0.0, 0.0), (0.1, 0.0), (0.0, 3.0), (1.0, 1.0)]),
)
def test_gaps_are_those_of_a_plain_loop(tmp_path_factory, seed, kind_a, kind_b, tolerances) -> None:
    a, b = random_pair(random.Random(seed), kind_a, kind_b or kind_a)
    root = tmp_path_factory.mktemp("gap")
    rtol, atol = tolerances
    found = diff(
        stored(root / "a", {"w": a}), stored(root / "b", {"w": b}), FAST, rtol=rtol, atol=atol
    )
    shutil.rmtree(root)
    differ, outside, largest, relative = plainly(a, b, rtol, atol)
    if not differ and a.dtype == b.dtype:
        assert (found.equal, found.same) == (1, True)
        return
    (changed,) = found.changed or found.close
    gap = changed.gap
    assert gap is not None
    assert (gap.numel, gap.differ, gap.outside) == (a.size, differ, outside)
    assert gap.max_abs == pytest.approx(largest, rel=1e-12, nan_ok=True)
    assert gap.max_rel == pytest.approx(relative, rel=1e-12, nan_ok=True)
    assert bool(found.close) == (a.dtype == b.dtype and outside == 0)
    json.dumps(found.to_json(), allow_nan=False)


@pytest.mark.parametrize("partition", [Replicated(1), PerTensor(3), Contiguous(4)])
def test_the_largest_gap_is_placed_across_chunks_and_shards(tmp_path: Path, partition) -> None:
    """1517 elements are compared in two portions, whatever shards they come from."""
    a = np.random.default_rng(0).standard_normal((37, 41)).astype(np.float32)
    b = a.copy()
    b[36, 40] += 8
    b[3, 5] = 0.25
    a[3, 5] = 0.125
    one, two = stored(tmp_path / "a", {"w": a}, partition), stored(tmp_path / "b", {"w": b})
    options = Options(max_memory=16 << 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("reshard.compare.BYTES_AN_ELEMENT", 16 << 10)
        (changed,) = diff(one, two, options).changed
    gap = changed.gap
    assert gap is not None
    assert gap.b is not None
    assert (gap.differ, gap.max_abs_at) == (2, (36, 40))
    assert (gap.a, gap.b) == (float(a[36, 40]), float(b[36, 40]))
    assert (gap.max_rel_at, gap.max_rel) == ((36, 40), pytest.approx(gap.max_abs / abs(gap.b)))


def test_minus_zero_differs_unless_it_is_tolerated(tmp_path: Path) -> None:
    one = stored(tmp_path / "a", {"w": np.array([0.0, 1.0], np.float32)})
    two = stored(tmp_path / "b", {"w": np.array([-0.0, 1.0], np.float32)})
    assert not diff(one, two, FAST).same
    found = diff(one, two, FAST, atol=1e-30)
    assert (found.same, len(found.close), found.equal) == (True, 1, 0)


def test_shapes_and_types_are_differences_whatever_is_tolerated(tmp_path: Path) -> None:
    one = stored(tmp_path / "a", {"w": np.zeros((2, 3), "f4"), "v": np.ones(2, "f4")})
    two = stored(tmp_path / "b", {"w": np.zeros((3, 2), "f4"), "v": np.ones(2, "f8")})
    found = diff(one, two, FAST, rtol=1, atol=1)
    by_name = {c.tensor: c for c in found.changed}
    assert by_name["param:w"].gap is None
    assert (by_name["param:w"].a, by_name["param:w"].b) == ("float32 [2, 3]", "float32 [3, 2]")
    gap = by_name["param:v"].gap
    assert gap is not None
    assert (by_name["param:v"].b, gap.differ, gap.max_abs) == ("float64 [2]", 0, 0.0)


def test_tensors_of_one_side(tmp_path: Path) -> None:
    one = stored(tmp_path / "a", {"w": np.zeros(2, "f4"), "v": np.ones(2, "f4")})
    two = stored(tmp_path / "b", {"w": np.zeros(2, "f4"), "u": np.ones(0, "f4")})
    found = diff(one, two, FAST)
    assert (found.equal, found.only_a, found.only_b) == (1, ("param:v",), ("param:u",))
    assert not found.same


# -- real checkpoints -----------------------------------------------------------------------------


def test_a_conversion_makes_no_difference(native: Path, deepspeed: Path) -> None:
    found = diff(open_manifest(native), open_manifest(deepspeed), FAST)
    assert found == Difference(126, (), (), (), (), ())
    assert found.same


def test_consolidated_weights_are_the_masters(native: Path, tmp_path: Path) -> None:
    consolidate(native, tmp_path / "model", Wanted(), FAST)
    found = diff(open_manifest(tmp_path / "model"), open_manifest(native), FAST, weights=True)
    assert (found.same, found.equal) == (True, 33)


def test_damage_is_an_error_and_no_difference(native: Path, tmp_path: Path) -> None:
    path = shutil.copytree(native, tmp_path / "copy")
    chunk = path / "group0.master" / "c" / "0"
    data = bytearray(chunk.read_bytes())
    data[0] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(CorruptError, match="has the checksum"):
        diff(open_manifest(native), open_manifest(path), FAST)
    # what was recorded is believed where that is asked for
    assert diff(open_manifest(native), open_manifest(path), FAST, recorded=True).same


def test_recorded_digests_tell_changed_tensors(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    arrays = {"w": rng.standard_normal(50).astype("f4"), "v": rng.standard_normal(9).astype("f4")}
    one = stored(tmp_path / "a", arrays)
    arrays["w"] = arrays["w"].copy()
    arrays["w"][7] = 0
    two = stored(tmp_path / "b", arrays)
    for path, manifest in (("na", one), ("nb", two)):
        convert(manifest, tmp_path / path, Wanted(format="native", world=2, stage=3), FAST)
    found = diff(
        open_manifest(tmp_path / "na"), open_manifest(tmp_path / "nb"), FAST, recorded=True
    )
    (changed,) = found.changed
    assert changed.gap is not None
    assert (changed.tensor, changed.gap.differ, changed.gap.max_abs_at) == ("param:w", 1, (7,))


def test_replicas_that_differ_cannot_be_compared(tmp_path: Path) -> None:
    one = stored(tmp_path / "a", {"w": np.zeros(4, "f4")}, copies=2)
    two = stored(tmp_path / "b", {"w": np.zeros(4, "f4")})
    assert diff(one, two, FAST).same
    one.path(1).write_bytes(np.ones(4, "<f4").tobytes())
    with pytest.raises(InconsistentError, match="is stored 2 times"):
        diff(one, two, FAST)


# -- what isn't a tensor --------------------------------------------------------------------------


def with_state(root: Path, **fields: Any) -> Manifest:
    return replace(stored(root, {"w": np.zeros(2, "f4")}), **fields)


def values_of(tmp_path: Path, a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    one, two = with_state(tmp_path / "a", **a), with_state(tmp_path / "b", **b)
    return {v.place: (v.a, v.b) for v in diff(one, two, FAST).values}


def group(step: Any, **settings: Any) -> tuple[ParamGroup, ...]:
    return (ParamGroup(settings, {"step": step}),)


def test_settings_and_steps(tmp_path: Path) -> None:
    found = values_of(
        tmp_path,
        {"groups": group(3, lr=0.1, betas=(0.9, 0.95), extra=None)},
        {"groups": group(np.array(4.0, "f4"), lr=0.1, betas=(0.9, 0.99), extra=None)},
    )
    assert found == {
        "/groups/0/settings/betas/$tuple/1": (0.95, 0.99),
        "/groups/0/scalars/step": (3, 4.0),
    }


def test_equal_values_of_other_kinds_are_no_difference(tmp_path: Path) -> None:
    """A step is 3, 3.0 or a 0-d array by the framework's version; NaN is NaN."""
    one = {"groups": group(3, eps=float("nan"))}
    two = {"groups": group(np.array(3.0, "f4"), eps=float("nan"))}
    assert values_of(tmp_path, one, two) == {}


def test_a_group_more(tmp_path: Path) -> None:
    found = values_of(tmp_path, {"groups": group(3) + group(3)}, {"groups": group(3)})
    assert list(found) == ["/groups"]


def test_ties_and_other_state(tmp_path: Path) -> None:
    found = values_of(
        tmp_path,
        {"aliases": {"h": "w"}, "objects": {"step": 3, "client": {"a/b": [1, 2], "r": b"x"}}},
        {"aliases": {}, "objects": {"step": True, "client": {"a/b": [1, 3], "r": b"x"}}},
    )
    assert found == {
        "/aliases/h": ("w", None),
        "/objects/step": (3, True),
        "/objects/client/a~1b/1": (2, 3),
    }


def test_one_is_not_true(tmp_path: Path) -> None:
    assert values_of(tmp_path, {"objects": {"x": 1}}, {"objects": {"x": True}}) == {
        "/objects/x": (1, True)
    }


def test_plain_data_is_simple_in_json() -> None:
    value = {
        "betas": (0.9, float("inf")),
        "step": np.array(3.0, "f4"),
        "n": np.int64(7),
        "z": complex(1, float("nan")),
        "ref": TensorRef("a", "client"),
        "a": np.arange(2, dtype="u1"),
    }
    assert simple(value) == {
        "betas": [0.9, "inf"],
        "step": 3.0,
        "n": 7,
        "z": [1.0, "nan"],
        "ref": {"$tensor": ["a", "client"]},
        "a": {"$array": {"dtype": "uint8", "shape": [2], "data": "AAE="}},
    }
    assert numbers((np.array(2), [np.float32(0.5)])) == (2, [0.5])
