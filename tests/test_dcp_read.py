"""Are torch's distributed checkpoints read bit for bit, whatever sharded them?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reshard
from reshard.api import convert, open_manifest
from reshard.conversion import Wanted
from reshard.execute import Options
from tests import dcp_files as dcp

pytest.importorskip("torch")

from tests.dcp_ranks import save_without_collectives
from tests.ranks import run_ranks

FAST = Options(sync=False)


@pytest.fixture(scope="module")
def real(fixtures_dir: Path) -> Path:
    return fixtures_dir / "dcp"


@pytest.mark.parametrize("name", dcp.GOOD)
def test_reads_equal_to_the_truth(real: Path, name: str) -> None:
    checkpoint = reshard.open(real / name / "ckpt")
    count = 0
    for tensor, state, raw in dcp.truth(real / name):
        assert dcp.held(checkpoint, tensor, state) == raw.tobytes(), (tensor, state)
        count += 1
    tensors = checkpoint.manifest.tensors
    steps = {n for n, s in tensors if s == "exp_avg"}
    assert count == len(tensors) + len(steps), "something is there that isn't in the truth"


@pytest.mark.parametrize("name", dcp.GOOD)
def test_native_at_another_world_size(real: Path, tmp_path: Path, name: str) -> None:
    convert(real / name / "ckpt", tmp_path / "native", Wanted(world=8, format="native"), FAST)
    checkpoint = reshard.open(tmp_path / "native")
    assert checkpoint.world == 8
    # the chunks of the mesh are gone: tensors are whole again before they are cut anew
    assert all(e.box is None for s in checkpoint.manifest.layout.spaces for e in s.entries)
    for tensor, state, raw in dcp.truth(real / name):
        assert dcp.held(checkpoint, tensor, state) == raw.tobytes(), (tensor, state)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("fsdp2_p3", {"shard": 3}),
        ("fsdp2_p4", {"shard": 4}),
        ("fsdp2_p4_perfile", {"shard": 4}),
        ("fsdp2tp_2x2", {"shard": 4}),
        ("fsdp1_p2_sharded_flat", {"shard": 2}),
        ("fsdp1_hsdp_2x2", {"shard": 2, "replicate": 2}),
    ],
)
def test_who_held_what(real: Path, name: str, mesh: dict[str, int]) -> None:
    layout = open_manifest(real / name / "ckpt").layout
    assert dict(layout.mesh) == mesh
    assert layout.stage == 3
    owners = {o for s in layout.spaces if s.partition.kind == "explicit"
              for o in getattr(s.partition, "owners")}  # fmt: skip  # noqa: B009
    assert owners == set(range(mesh["shard"]))


def test_settings_of_the_groups(real: Path) -> None:
    checkpoint = reshard.open(real / "fsdp2_p4" / "ckpt")
    assert [g.settings["weight_decay"] for g in checkpoint.groups] == [0.1, 0.0]
    assert checkpoint.groups[0].settings["betas"] == (0.9, 0.999)
    assert all("params" not in g.settings for g in checkpoint.groups)
    step = checkpoint.groups[1].scalars["step"]
    assert (step.dtype.name, step.shape, float(step)) == ("float32", (), 3.0)
    groups = [s for s in checkpoint.manifest.layout.spaces if s.group is not None]
    assert [s.group for s in groups] == [0, 1]
    assert list(dict.fromkeys(e.name for e in groups[0].entries))[:2] == [
        "tok.weight",
        "pos.weight",
    ]


def test_an_empty_group_keeps_its_settings(real: Path) -> None:
    groups = reshard.open(real / "fsdp1_hsdp_2x2" / "ckpt").groups
    assert [g.settings["weight_decay"] for g in groups] == [0.1, 0.0]
    assert dict(groups[0].scalars) == {}


def test_a_flattened_dict_has_groups_again(real: Path) -> None:
    checkpoint = reshard.open(real / "fsdp2_p4_flatopt" / "ckpt")
    assert sorted(g.settings["weight_decay"] for g in checkpoint.groups) == [0.0, 0.1]
    assert checkpoint.groups[0].settings["betas"] == (0.9, 0.999)
    assert any("flattened" in note.text for note in checkpoint.manifest.notes)


def test_what_the_script_stored(real: Path) -> None:
    manifest = open_manifest(real / "fsdp2_p4" / "ckpt")
    client = manifest.objects["client"]
    assert client["sched"] == {"last_epoch": 3, "name": "cos", "lrs": [0.1, 0.2], "cfg": None}
    assert manifest.objects["step"] == 3
    assert client["rng"].shape == (5056,)
    (note,) = [n for n in manifest.notes if n.where == "client"]
    assert "one rank's value" in note.text, "that other ranks' values are gone must be told"
    assert "rng (rank 3)" in note.text


def test_every_element_type_and_stride(real: Path) -> None:
    folder = real / "dtypes_p1"
    checkpoint = reshard.open(folder / "ckpt")
    manifest = checkpoint.manifest
    kinds = {t.dtype.name for t in manifest.tensors.values()}
    assert {"float8_e4m3fn", "float8_e5m2", "bool", "complex64", "uint64", "bfloat16"} <= kinds
    assert checkpoint["t_0d"].shape == ()
    assert checkpoint["t_empty"].shape == (0, 5)
    strides = {
        entry.name: manifest.stores[space.name, "param"].strides_of(i)  # type: ignore[union-attr]
        for space in manifest.layout.spaces
        for i, entry in enumerate(space.entries)
    }
    assert strides["t_transposed"] == (1, 6), "torch keeps the strides of a transposed tensor"
    for name, state, raw in dcp.truth(folder):
        assert dcp.held(checkpoint, name, state) == raw.tobytes(), name
    values = manifest.objects["client"]["py"]
    assert (values["tuple"], values["bytes"], values["7"]) == ((1, 2), b"abc", "intkey")
    assert values["dtype"] == "bfloat16"


def test_strides_survive_a_conversion(real: Path, tmp_path: Path) -> None:
    folder = real / "dtypes_p1"
    convert(folder / "ckpt", tmp_path / "native", Wanted(world=3, format="native"), FAST)
    checkpoint = reshard.open(tmp_path / "native")
    for name, state, raw in dcp.truth(folder):
        assert dcp.held(checkpoint, name, state) == raw.tobytes(), name


def test_nothing_of_torch_is_imported(real: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys, reshard; c = reshard.open(sys.argv[1]); c['scale'].numpy();"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(real / "fsdp2_p4" / "ckpt")], check=True)


# -- metadata of each rank ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def per_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("nocoll") / "ckpt"
    return folder, run_ranks(save_without_collectives, 2, str(folder))[0]


def test_metadata_of_each_rank_are_joined(per_rank: tuple[Path, dict[str, Any]]) -> None:
    folder, weights = per_rank
    assert not (folder / ".metadata").exists()
    checkpoint = reshard.open(folder)
    assert checkpoint.world == 2
    for name, expected in weights.items():
        assert np.array_equal(checkpoint[name].numpy(), expected), name
    assert {"exp_avg", "exp_avg_sq"} <= set(checkpoint.states)
    assert int(checkpoint["seen"].numpy()) == 7
    objects = checkpoint.objects
    assert objects["per_rank"] == {"client": {"cursor": [10, 11]}}, "only what differs"
    assert objects["client"]["same"] == 4


def test_replicas_of_ranks_are_proved_equal(
    per_rank: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, _ = per_rank
    target = tmp_path / "native"
    report = convert(folder, target, Wanted(world=3, format="native"), FAST)
    assert report.done
    places = open_manifest(folder).tensors["seen", "param"].places
    assert len(places) == 2


def test_a_missing_rank_s_metadata(per_rank: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    for rank, error in ((0, "is missing"), (1, "hole")):
        folder = dcp.copy(per_rank[0], tmp_path / f"without{rank}")
        (folder / f"__{rank}.metadata").unlink()
        with pytest.raises(reshard.ReshardError, match=error):
            reshard.open(folder)
