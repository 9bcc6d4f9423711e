"""Real ZeRO checkpoints read bit-equal to what the live ranks held."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from reshard.api import open_manifest
from reshard.checkpoint import Checkpoint
from reshard.errors import IncompleteError, NotFoundError
from tests import deepspeed_truth as real

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parent


def _names() -> list[str]:
    import os

    place = os.environ.get("ZRESHARD_FIXTURES")
    fixtures = Path(place) if place else ROOT.parent.parent / "shared" / "fixtures"
    return real.cases(fixtures) if fixtures.is_dir() else ["z2_p4_bf16"]


@pytest.mark.parametrize("name", _names())
def test_reads_equal_to_the_truth(fixtures_dir: Path, name: str) -> None:
    case = fixtures_dir / "deepspeed" / name
    checkpoint = real.open_case(case)
    if checkpoint.stage == 0:
        pytest.skip("plain data parallelism, no ZeRO: see test_stage_0_gives_the_model")
    equal, missing = real.compare(checkpoint, case)
    # what isn't stored: buffers that aren't persistent, and the 16-bit weights of stage 3
    allowed = {"buffer.mask"}
    if checkpoint.stage == 3:
        frozen = {n for n, s in checkpoint.manifest.tensors if s == "param"}
        allowed |= {k for k in missing if k.startswith("lp.") and k[3:] not in frozen}
    assert set(missing) <= allowed
    assert equal >= 80


@pytest.mark.parametrize("name", _names())
def test_keeps_what_is_not_a_tensor(fixtures_dir: Path, name: str) -> None:
    case = fixtures_dir / "deepspeed" / name
    meta = json.loads((case / "meta.json").read_text())
    checkpoint = real.open_case(case)
    assert checkpoint.world == _dp(meta)
    assert checkpoint.objects["step"] == meta["args"]["steps"]
    assert checkpoint.objects["deepspeed"]["config"] == meta["ds_config"]
    decay = [g.settings.get("weight_decay") for g in checkpoint.groups if g.settings]
    if name.startswith(("z1", "z2", "z3")) and "elastic" not in name:
        expected = [0.1] if meta["args"].get("groups") == 1 else [0.1, 0.0]
        assert decay == expected
    if name.startswith("z"):
        assert checkpoint.objects["client"]["my_iteration"] == meta["args"]["steps"]
        assert checkpoint.objects["client"]["rng"].dtype == np.uint8
    assert dict(checkpoint.manifest.aliases) == meta.get("shared", {})


def _dp(meta: dict[str, object]) -> int:
    """Data-parallel world size: all ranks, less those of tensor and pipeline parallelism."""
    args = meta["args"]
    assert isinstance(args, dict)
    world = meta["world"]
    assert isinstance(world, int)
    return world // (args.get("pp") or args.get("tp") or 1)


def test_stage_0_gives_the_model(fixtures_dir: Path) -> None:
    case = fixtures_dir / "deepspeed" / "z0_p2_bf16"
    checkpoint = real.open_case(case)
    equal, missing = real.compare(checkpoint, case)
    assert equal == 33  # 31 weights and 2 buffers
    assert {k.split(".")[0] for k in missing} <= {"fp32", "exp_avg", "exp_avg_sq", "buffer"}
    (note,) = [n for n in checkpoint.manifest.notes if n.kind == "left-out"]
    assert "by numbers" in note.text


@pytest.mark.parametrize("name", [n for n in _names() if not n.startswith(("z0", "moe"))])
def test_universal_reads_equal_to_the_truth(fixtures_dir: Path, name: str) -> None:
    case = fixtures_dir / "deepspeed" / name
    folder = case / "ckpt" / "global_step3_universal"
    if not folder.is_dir():
        pytest.skip("the converter made no universal checkpoint of this case")
    checkpoint = Checkpoint(open_manifest(folder))
    equal, missing = real.compare(checkpoint, case)
    assert all(k.startswith("lp.") or k == "buffer.mask" for k in missing)
    assert equal >= 48


def test_universal_that_broke_off_is_refused(fixtures_dir: Path) -> None:
    folder = fixtures_dir / "deepspeed" / "moe_z2_p4_ep2_bf16" / "ckpt" / "global_step3_universal"
    with pytest.raises(IncompleteError, match="no model file"):
        open_manifest(folder)


def test_latest_names_the_checkpoint(fixtures_dir: Path, tmp_path: Path) -> None:
    case = fixtures_dir / "deepspeed" / "z2_p2_bf16"
    assert open_manifest(case / "ckpt").root.name == "global_step3"
    (tmp_path / "latest").write_text("global_step9")
    (tmp_path / "global_step3").symlink_to(case / "ckpt" / "global_step3")
    with pytest.raises(NotFoundError, match="global_step9"):
        open_manifest(tmp_path)


def test_slices_read_only_their_bytes(fixtures_dir: Path) -> None:
    checkpoint = real.open_case(fixtures_dir / "deepspeed" / "z3_p4_bf16")
    weight = checkpoint["tok.weight", "master"]
    whole = weight.numpy()
    for index in (np.s_[3], np.s_[10:20, ::3], np.s_[-1, -1], np.s_[..., 5], np.s_[50:10:-7]):
        assert np.array_equal(weight[index], whole[index])
