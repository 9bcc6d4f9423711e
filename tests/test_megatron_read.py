"""Are Megatron-Core's checkpoints read bit for bit, whatever sharded them?"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import reshard
from reshard.api import convert, open_manifest
from reshard.conversion import Wanted
from reshard.errors import NotFoundError
from reshard.execute import Options
from reshard.formats import detect
from reshard.plain import encode
from tests import megatron_files as megatron

pytest.importorskip("torch")

FAST = Options(sync=False)
ALL = (*megatron.GPT, *megatron.RAW)


@pytest.mark.parametrize("name", ALL)
def test_reads_equal_to_the_truth(fixtures_dir: Path, tmp_path: Path, name: str) -> None:
    checkpoint = reshard.open(megatron.ckpt(fixtures_dir, name))
    assert checkpoint.manifest.format == "megatron"
    count = 0
    for tensor, state, raw in megatron.truth(fixtures_dir / "megatron" / name):
        assert checkpoint[tensor, state].numpy().tobytes() == raw.tobytes(), (tensor, state)
        count += 1
    assert count == len(checkpoint.manifest.tensors), "something is there that isn't in the truth"


@megatron.needed
def test_what_the_installed_version_writes(tmp_path: Path) -> None:
    megatron.run("megatron_save.py", tmp_path)
    checkpoint = reshard.open(tmp_path / "ckpt")
    assert checkpoint.manifest.format == "megatron"
    truth = np.load(tmp_path / "truth.npz")
    for key in truth.files:
        state, _, name = key.partition(":")
        assert checkpoint[name, state].numpy().tobytes() == truth[key].tobytes(), key
    assert len(truth.files) == len(checkpoint.manifest.tensors)
    assert checkpoint.manifest.objects["step"] == 7


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("world", [1, 3])
def test_native_at_another_world_size(
    fixtures_dir: Path, tmp_path: Path, name: str, world: int
) -> None:
    source = megatron.ckpt(fixtures_dir, name)
    convert(source, tmp_path / "native", Wanted(world=world, format="native"), FAST)
    checkpoint = reshard.open(tmp_path / "native")
    assert checkpoint.world == world
    for tensor, state, raw in megatron.truth(fixtures_dir / "megatron" / name):
        assert checkpoint[tensor, state].numpy().tobytes() == raw.tobytes(), (tensor, state)
    assert encode(dict(checkpoint.objects)) == encode(dict(open_manifest(source).objects))


@pytest.mark.parametrize("name", ALL)
def test_how_many_ranks_there_were(fixtures_dir: Path, tmp_path: Path, name: str) -> None:
    layout = open_manifest(megatron.ckpt(fixtures_dir, name)).layout
    assert layout.world == (1 if "zarr" in name else 4), "the zarr backend doesn't tell"


def test_layers_are_tensors_of_their_own(fixtures_dir: Path, tmp_path: Path) -> None:
    stacked, single = (
        reshard.open(fixtures_dir / "megatron" / name / "ckpt").manifest.tensors
        for name in (megatron.GPT[1], megatron.GPT[2])
    )
    assert {key: t.shape for key, t in stacked.items()} == {k: t.shape for k, t in single.items()}
    assert stacked["decoder.layers.3.mlp.linear_fc1.weight", "param"].shape == (80, 16)


def test_settings_of_the_groups(fixtures_dir: Path) -> None:
    for name in megatron.GPT:
        manifest = open_manifest(fixtures_dir / "megatron" / name / "ckpt")
        assert [g.settings["wd_mult"] for g in manifest.groups] == [1.0, 0.0]
        assert [dict(g.scalars) for g in manifest.groups] == [{"step": 2}, {"step": 2}]
        assert manifest.groups[0].settings["betas"] == (0.9, 0.999)
        assert manifest.objects["step"] == 2
        members = {
            group: {e.name for s in manifest.layout.spaces for e in s.in_groups().get(group, ())}
            for group in (0, 1)
        }
        assert len(members[0]) == 18
        assert all(name.endswith("norm.weight") or "layer_norm" in name for name in members[1])
        assert len(members[1]) == 9
        (note,) = manifest.notes
        assert "isn't stored" in note.text, "that groups were told by a rule must be said"


def test_what_the_script_and_the_ranks_stored(fixtures_dir: Path, tmp_path: Path) -> None:
    for name in megatron.RAW:
        objects = open_manifest(megatron.ckpt(fixtures_dir, name)).objects
        client = objects["client"]
        assert objects["step"] == 100
        assert client["args"] == {"tp": 2, "dp": 2, "lr": 1e-3}
        assert [one["rank"] for one in client["rng_state"]] == [0, 1, 2, 3]
        assert [one["state"].tolist() for one in client["rng_state"]][3] == [3, 4, 5, 6]
        assert client["mlp._extra_state"] == [None]


def test_kinds_of_tensors(fixtures_dir: Path, tmp_path: Path) -> None:
    checkpoint = reshard.open(megatron.ckpt(fixtures_dir, "raw_tp2dp2_v019"))
    assert checkpoint["scalar"].shape == ()
    assert checkpoint["row.weight"].dtype.name == "bfloat16"
    assert checkpoint["ints"].numpy().tolist() == list(range(10))
    assert checkpoint["bucket.exp_avg"].shape == (26,), "cut at 9, 11 and 20"
    assert not checkpoint["emb.weight"].numpy()[10:].any(), "a padded vocabulary stays padded"


def test_a_flat_range_is_boxes(fixtures_dir: Path) -> None:
    manifest = open_manifest(fixtures_dir / "megatron" / "raw_tp2dp2_v012_flat" / "ckpt")
    tensor = manifest.tensors["row.weight", "exp_avg"]
    boxes = [manifest.space(s).entries[i].region for s, i in tensor.places]
    # ranks hold 7 and 17 elements of [6, 4]: a row and 3 of the next, 1 of it and 4 rows
    assert [box.shape for box in boxes] == [(1, 4), (1, 3), (1, 1), (4, 4)] * 2
    assert sum(box.numel for box in boxes) == 48


def test_a_folder_of_iterations(fixtures_dir: Path, tmp_path: Path) -> None:
    source = fixtures_dir / "megatron" / megatron.GPT[0] / "ckpt"
    for step in (2, 10):
        shutil.copytree(source, tmp_path / f"iter_{step:07d}")
    latest = tmp_path / "latest_checkpointed_iteration.txt"
    latest.write_text("10\n", encoding="ascii")
    _, found = detect(tmp_path)
    assert found.root == tmp_path / "iter_0000010"
    assert found.others == (tmp_path / "iter_0000002",)
    latest.write_text("11\n", encoding="ascii")
    with pytest.raises(NotFoundError):
        detect(tmp_path)


def test_the_second_of_two_halves_lies_below(fixtures_dir: Path) -> None:
    checkpoint = reshard.open(fixtures_dir / "megatron" / megatron.GPT[2] / "ckpt")
    gate = checkpoint["decoder.layers.0.mlp.linear_fc1.weight"]
    assert np.array_equal(gate[38:42].view(np.uint16), gate.numpy()[38:42].view(np.uint16))


def test_nothing_of_megatron_or_torch_is_imported(fixtures_dir: Path) -> None:
    code = (
        "import sys, reshard; c = reshard.open(sys.argv[1]);"
        "c['decoder.final_layernorm.weight', 'master'].numpy();"
        "assert not {'torch', 'megatron', 'apex'} & set(sys.modules)"
    )
    folder = fixtures_dir / "megatron" / megatron.GPT[5] / "ckpt"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
