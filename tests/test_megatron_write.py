"""Is what is written for Megatron-Core the same state, in the form that it loads?"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reshard
from reshard.api import convert, open_manifest
from reshard.conversion import Wanted
from reshard.errors import RequestError
from reshard.execute import Options
from reshard.formats._dcp_metadata import read
from reshard.plain import encode
from tests import megatron_files as megatron

pytest.importorskip("torch")

FAST = Options(sync=False)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("name", [*megatron.GPT, *megatron.RAW])
def test_there_and_back_by_way_of_native(
    fixtures_dir: Path, tmp_path: Path, name: str, world: int
) -> None:
    source = open_manifest(megatron.ckpt(fixtures_dir, name))
    convert(source, tmp_path / "native", Wanted(world=2, format="native"), FAST)
    convert(tmp_path / "native", tmp_path / "out", Wanted(world=world, format="megatron"), FAST)
    found = reshard.open(tmp_path / "out")
    assert found.manifest.format == "megatron"
    assert found.world == world
    assert set(found.manifest.tensors) == set(source.tensors)
    for tensor, state, raw in megatron.truth(fixtures_dir / "megatron" / name):
        assert found[tensor, state].numpy().tobytes() == raw.tobytes(), (tensor, state)
    for key in ("client", "step", "scheduler"):
        assert encode(found.objects.get(key)) == encode(source.objects.get(key)), key
    assert encode([dict(g.settings) for g in found.groups]) == encode(
        [dict(g.settings) for g in source.groups]
    )
    assert [dict(g.scalars) for g in found.groups] == [dict(g.scalars) for g in source.groups]


def test_the_keys_are_those_of_fully_reshardable(fixtures_dir: Path, tmp_path: Path) -> None:
    real = fixtures_dir / "megatron" / megatron.GPT[1] / "ckpt"
    for name in megatron.GPT:
        source = fixtures_dir / "megatron" / name / "ckpt"
        target = tmp_path / name
        convert(source, target, Wanted(world=3, format="megatron"), FAST)
        ours, theirs = read(target), read(real)
        shapes = {key: (one.shape, one.dtype) for key, one in theirs.tensors.items()}
        assert {key: (one.shape, one.dtype) for key, one in ours.tensors.items()} == shapes
        extra = set(ours.values) ^ set(theirs.values)
        assert not extra or "singleton" in name, "its layers have objects of their own"


def test_each_file_torch_loads(fixtures_dir: Path, tmp_path: Path) -> None:
    import torch

    source = fixtures_dir / "megatron" / megatron.GPT[1] / "ckpt"
    convert(source, tmp_path / "out", Wanted(world=3, format="megatron"), FAST)
    common = torch.load(tmp_path / "out" / "common.pt", weights_only=True)
    assert common["iteration"] == 2
    assert [g["step"] for g in common["optimizer"]["optimizer"]["param_groups"]] == [2, 2]
    assert common["optimizer"]["param_state_sharding_type"] == "fully_reshardable"
    described = json.loads((tmp_path / "out" / "metadata.json").read_bytes())
    assert described["sharded_backend"] == "torch_dist"
    metadata = pickle.loads((tmp_path / "out" / ".metadata").read_bytes())
    stored = metadata.state_dict_metadata["decoder.layers.mlp.linear_fc1.weight"]
    assert stored.size == torch.Size((4, 80, 16))
    assert {tuple(c.sizes) for c in stored.chunks} == {(1, 27, 16), (1, 26, 16)}


def test_weights_are_cast_and_nothing_else(fixtures_dir: Path, tmp_path: Path) -> None:
    source = fixtures_dir / "megatron" / megatron.GPT[1] / "ckpt"
    wanted = Wanted(world=2, format="megatron", dtype="float32")
    convert(source, tmp_path / "out", wanted, FAST)
    before, after = reshard.open(source), reshard.open(tmp_path / "out")
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    assert after[name, "param"].dtype.name == "float32"
    assert np.array_equal(after[name].numpy(), before[name].numpy().astype(np.float32))
    assert after[name, "master"].numpy().tobytes() == before[name, "master"].numpy().tobytes()


def test_what_is_lost_is_listed(golden_dir: Path, tmp_path: Path) -> None:
    source = golden_dir / "z2_p4_bf16" / "ckpt"
    with pytest.raises(RequestError, match="deepspeed") as error:
        convert(source, tmp_path / "out", Wanted(format="megatron"), FAST)
    assert "which parameters are in which group" in str(error.value)
    with pytest.raises(RequestError, match="no ZeRO stage"):
        convert(source, tmp_path / "out", Wanted(format="megatron", stage=1, drop=("*",)), FAST)


# -- Megatron-Core --------------------------------------------------------------------------------


@megatron.needed
@pytest.mark.parametrize("name", [*megatron.GPT, *megatron.RAW])
def test_megatron_core_loads_it(fixtures_dir: Path, tmp_path: Path, name: str) -> None:
    source = megatron.ckpt(fixtures_dir, name)
    target = tmp_path / "out"
    convert(source, target, Wanted(world=3, format="megatron"), FAST)
    truth: dict[str, Any] = whole_keys(fixtures_dir / "megatron" / name)
    np.savez(tmp_path / "truth.npz", **truth)
    megatron.run("megatron_load.py", target, tmp_path / "truth.npz")


def whole_keys(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The truth under the keys of a checkpoint, layers joined."""
    found: dict[str, dict[int, np.ndarray[Any, Any]]] = {}
    for name, state, raw in megatron.truth(folder):
        key, layer = name, 0
        if name.startswith("decoder.layers."):
            _, _, number, rest = name.split(".", 3)
            key, layer = f"decoder.layers.{rest}", int(number)
        if state != "param":
            key = f"optimizer.state.{'param' if state == 'master' else state}.{key}"
        found.setdefault(key, {})[layer] = raw
    return {key: np.concatenate([some[i] for i in sorted(some)]) for key, some in found.items()}
