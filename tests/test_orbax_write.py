"""Is what is written for Orbax what was given, and does Orbax restore it?

Orbax and JAX aren't needed: the last tests call a Python that has them, where
``ZRESHARD_ORBAX_PYTHON`` names one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import reshard
from reshard import Options, Wanted
from reshard.api import open_manifest
from reshard.checkpoint import Checkpoint
from reshard.errors import CorruptError, RequestError, UnsupportedError
from reshard.manifest import Manifest

REPO = Path(__file__).resolve().parent.parent
FAST = Options(sync=False)


def convert(source: Path | Manifest, target: Path, **wanted: Any) -> reshard.Report:
    return reshard.convert(source, target, Wanted(format="orbax", **wanted), FAST)


def arrays_of(root: Path) -> dict[tuple[str, str], np.ndarray]:
    checkpoint = Checkpoint(open_manifest(root))
    return {key: checkpoint[key].numpy() for key in checkpoint.manifest.tensors}


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@pytest.fixture
def weights(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """Every kind of array there is: types, 0-d, empty, odd shapes."""
    rng = np.random.default_rng(3)
    arrays = {
        "model.layers.0.weight": rng.normal(size=(37, 5, 2)).astype(np.float32),
        "bf16": rng.normal(size=(64, 6)).astype(ml_dtypes.bfloat16),
        "fp8": rng.normal(size=(8, 8)).astype(ml_dtypes.float8_e4m3fn),
        "bool": rng.random((3, 3)) < 0.5,
        "int": rng.integers(-(1 << 60), 1 << 60, (11,)),
        "zero-d": np.array(2.5, np.float64),
        "empty": np.zeros((0, 7), np.float32),
        "nan": np.array([np.nan, -0.0, np.inf], np.float16),
        "zeros": np.zeros((9, 2), np.int8),
    }
    save_file(arrays, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors", arrays


@pytest.mark.parametrize("most", [None, 1, 100, 1 << 30])
def test_every_kind_of_array_comes_back(
    weights: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, most: int | None
) -> None:
    source, arrays = weights
    convert(source, tmp_path / "out", max_shard_bytes=most, drop=("safetensors",))
    found = arrays_of(tmp_path / "out")
    assert found.keys() == {(name, "param") for name in arrays}
    for name, expected in arrays.items():
        assert same(found[name, "param"], expected), name


@pytest.mark.parametrize("most", [None, 100])
def test_tensorstore_opens_each_array(
    weights: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, most: int | None
) -> None:
    import tensorstore

    source, arrays = weights
    convert(source, tmp_path / "out", max_shard_bytes=most, drop=("safetensors",))
    for name, expected in arrays.items():
        base = {"driver": "file", "path": f"{tmp_path}/out/params.{name}/"}
        found = tensorstore.open({"driver": "zarr3", "kvstore": base}, open=True).result()
        assert same(np.asarray(found.read().result()), expected), name


def test_states_are_levels_of_the_tree(golden_dir: Path, tmp_path: Path) -> None:
    source = open_manifest(golden_dir / "z2_p4_bf16" / "ckpt")
    convert(source, tmp_path / "out", drop=("*",))
    tops = {
        keys[0][0] for keys, _, _ in open_manifest(tmp_path / "out").objects["orbax"][""]["tree"]
    }
    assert tops == {"params", *source.states} - {"param"}


def test_what_has_no_place_is_told(golden_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"can't hold all(?s:.*)parameter groups"):
        convert(golden_dir / "z2_p4_bf16" / "ckpt", tmp_path / "out")


def test_weights_are_cast_and_nothing_else(golden_dir: Path, tmp_path: Path) -> None:
    source = open_manifest(golden_dir / "z2_p4_bf16" / "ckpt")
    convert(source, tmp_path / "out", dtype="fp32", drop=("*",))
    for key, tensor in open_manifest(tmp_path / "out").tensors.items():
        own = source.tensors[key].dtype
        assert tensor.dtype.name == ("float32" if key[1] == "param" else own.name), key


CASES = ("default_ocdbt", "ocdbt_zarr3", "zarr2_noocdbt", "mp2_ocdbt", "manager_composite")


@pytest.mark.parametrize("case", CASES)
def test_a_tree_of_orbax_stays_what_it_was(fixtures_dir: Path, tmp_path: Path, case: str) -> None:
    """Typed keys, kinds, texts and items; directly, and by way of native."""
    source = open_manifest(fixtures_dir / "orbax" / case / "ckpt")
    convert(source, tmp_path / "direct")
    reshard.convert(source, tmp_path / "native", Wanted(world=2, format="native"), FAST)
    convert(tmp_path / "native", tmp_path / "back")
    for path in (tmp_path / "direct", tmp_path / "back"):
        after = open_manifest(path)
        assert after.objects == source.objects
        assert set(after.tensors) == set(source.tensors)
        expected = Checkpoint(source)
        for key, array in arrays_of(path).items():
            assert same(array, expected[key].numpy()), key


def test_a_tree_that_is_no_longer_that_of_the_tensors(fixtures_dir: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    source = open_manifest(fixtures_dir / "orbax" / "zarr2_noocdbt" / "ckpt")
    tree = source.objects["orbax"][""]
    for rows in (tree["tree"][:-1], [*tree["tree"], [[["x", 2]], "np.ndarray", ["x", "param"]]]):
        objects = {"orbax": {"": {**tree, "tree": rows}}}
        with pytest.raises(RequestError, match="its tree isn't that of these tensors any more"):
            convert(replace(source, objects=objects), tmp_path / "out")


@pytest.mark.parametrize("names", [("a/b",), ("x" * 250,), ("A", "a")])
def test_names_that_no_folder_can_have(tmp_path: Path, names: tuple[str, ...]) -> None:
    save_file({name: np.zeros(2, np.float32) for name in names}, tmp_path / "w.safetensors")
    with pytest.raises(UnsupportedError, match="Orbax"):
        convert(tmp_path / "w.safetensors", tmp_path / "out", drop=("*",))


def test_a_flipped_bit_is_noticed_by_the_digest(
    weights: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    convert(weights[0], tmp_path / "out", drop=("safetensors",))
    path = tmp_path / "out" / "params.bf16" / "c" / "0" / "0"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptError, match="bf16"):
        reshard.convert(tmp_path / "out", tmp_path / "copy", Wanted(format="native"), FAST)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["tensors"].popitem(),
        lambda d: d["tensors"].update({"params.x": d["tensors"]["params.bf16"]}),
        lambda d: d.pop("tensors"),
        lambda d: d["tensors"]["params.bf16"].update(crc64nvme="xyz"),
        lambda d: d["tensors"]["params.bf16"].update(name="bool"),
        lambda d: d.update(zreshard=2),
    ],
)
def test_a_sidecar_that_does_not_fit(
    weights: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, change: Any
) -> None:
    convert(weights[0], tmp_path / "out", drop=("safetensors",))
    path = tmp_path / "out" / "_zreshard.json"
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises((CorruptError, UnsupportedError), match=r"_zreshard\.json"):
        open_manifest(tmp_path / "out")


# -- by Orbax itself ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def orbax_python() -> str:
    """A Python that has Orbax and JAX."""
    python = os.environ.get("ZRESHARD_ORBAX_PYTHON", sys.executable)
    probe = "from importlib.util import find_spec as f; assert f('orbax') and f('jax')"
    if subprocess.run([python, "-c", probe], check=False, capture_output=True).returncode:
        pytest.skip("needs Orbax: let ZRESHARD_ORBAX_PYTHON name a Python that has it")
    return python


def restores(python: str, root: Path, truth: Path) -> None:
    manifest = open_manifest(root)
    (item,) = (i for i in manifest.objects["orbax"].values() if "tree" in i)
    checkpoint = Checkpoint(manifest)
    rows = {}
    for keys, kind, key in item["tree"]:
        if key and kind != "scalar":
            array = checkpoint[key[0], key[1]].numpy()
            way = [int(k) if t == 1 else k for k, t in keys]
            row = {"keys": way, "dtype": str(array.dtype), "shape": list(array.shape)}
            rows[json.dumps(row)] = np.frombuffer(array.tobytes(), np.uint8)
    np.savez(truth, **rows)
    script = REPO / "interop" / "orbax_restore.py"
    done = subprocess.run(
        [python, script, root, truth], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.count(f"{len(rows)} of {len(rows)} leaves are equal") == 3


def test_orbax_restores_a_model(
    orbax_python: str, weights: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    convert(weights[0], tmp_path / "out", max_shard_bytes=200, drop=("safetensors",))
    restores(orbax_python, tmp_path / "out", tmp_path / "truth.npz")


def test_orbax_restores_a_deepspeed_checkpoint(
    orbax_python: str, golden_dir: Path, tmp_path: Path
) -> None:
    source = golden_dir / "z2_p4_bf16" / "ckpt"
    convert(source, tmp_path / "out", max_shard_bytes=3000, drop=("*",))
    restores(orbax_python, tmp_path / "out", tmp_path / "truth.npz")


@pytest.mark.parametrize("case", ["default_ocdbt", "mp2_ocdbt"])
def test_orbax_restores_its_own_tree(
    orbax_python: str, fixtures_dir: Path, tmp_path: Path, case: str
) -> None:
    convert(fixtures_dir / "orbax" / case / "ckpt", tmp_path / "out")
    restores(orbax_python, tmp_path / "out", tmp_path / "truth.npz")
