"""Are the golden checkpoints still read bit for bit, and do they come back from everywhere?

``tests/golden/`` holds two real ZeRO checkpoints with what the live ranks held. They are small and
in the repository, so this runs on a plain clone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import reshard
from reshard.api import consolidate, convert, open_manifest
from reshard.checkpoint import Checkpoint
from reshard.conversion import Wanted
from reshard.digest import CRC64NVME
from reshard.execute import Options
from reshard.layout import TensorKey
from reshard.manifest import Manifest
from reshard.plain import encode
from tests import deepspeed_truth as real

pytest.importorskip("torch")

FAST = Options(sync=False)
CASES = ("z2_p4_bf16", "z3_p2_bf16_frozen_tied")
STORED = {"z2_p4_bf16": 126, "z3_p2_bf16_frozen_tied": 90}
"""How many tensors of the truth are stored: 4 x 31 + 2, and 3 x 29 + 1 frozen + 2."""


def digests(checkpoint: Checkpoint) -> dict[TensorKey, int]:
    """The digest of every tensor, by reading it."""
    return {
        key: CRC64NVME.of(np.ascontiguousarray(checkpoint[key].numpy()).reshape(-1).view(np.uint8))
        for key in checkpoint.manifest.tensors
    }


def rest(manifest: Manifest) -> object:
    """Everything that isn't a tensor."""
    groups = [encode((dict(g.settings), dict(g.scalars), g.optimizer)) for g in manifest.groups]
    return encode(dict(manifest.objects)), groups, dict(manifest.aliases)


def test_the_files_are_those_that_were_made(golden_dir: Path) -> None:
    sums = (golden_dir / "SHA256SUMS").read_text(encoding="ascii").splitlines()
    expected = {name: value for value, name in (line.split("  ") for line in sums)}
    found = {
        path.relative_to(golden_dir).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in golden_dir.rglob("*")
        if path.is_file() and path.parent != golden_dir
    }
    assert {name: found.get(name) for name in expected} == expected
    assert set(found) == set(expected), "a new golden file needs its line in SHA256SUMS"


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_is_the_truth(golden_dir: Path, name: str) -> None:
    checkpoint = reshard.open(golden_dir / name / "ckpt")
    equal, missing = real.compare(checkpoint, golden_dir / name)
    assert equal == STORED[name]
    # DeepSpeed stores neither buffers that aren't persistent nor, at stage 3, the 16-bit weights
    # of what is trained.
    trained = {n for n, state in checkpoint.manifest.tensors if state == "master"}
    derived = {f"lp.{n}" for n in trained} if checkpoint.stage == 3 else set()
    assert set(missing) == {"buffer.mask"} | derived


def test_what_stage_2_says_of_itself(golden_dir: Path) -> None:
    checkpoint = reshard.open(golden_dir / "z2_p4_bf16" / "ckpt")
    assert (checkpoint.world, checkpoint.stage) == (4, 2)
    assert sorted(checkpoint.states) == ["buffer", "exp_avg", "exp_avg_sq", "master", "param"]
    assert [g.settings["weight_decay"] for g in checkpoint.groups] == [0.1, 0.0]
    assert checkpoint.objects["step"] == checkpoint.objects["client"]["my_iteration"] == 3
    assert checkpoint["tok.weight"].dtype.name == "bfloat16"
    assert checkpoint["tok.weight", "master"].dtype.name == "float32"


def test_what_stage_3_says_of_itself(golden_dir: Path) -> None:
    checkpoint = reshard.open(golden_dir / "z3_p2_bf16_frozen_tied" / "ckpt")
    assert (checkpoint.world, checkpoint.stage) == (2, 3)
    assert dict(checkpoint.manifest.aliases) == {"head.weight": "tok.weight"}
    assert np.array_equal(checkpoint["head.weight"][:3], checkpoint["tok.weight"][:3])
    assert ("pos.weight", "param") in checkpoint.manifest.tensors
    assert ("pos.weight", "master") not in checkpoint.manifest.tensors


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("format_name", ["native", "deepspeed"])
@pytest.mark.parametrize(("world", "stage"), [(1, 1), (3, 3), (8, 2), (32, 3)])
def test_there_and_back(
    golden_dir: Path, tmp_path: Path, name: str, format_name: str, world: int, stage: int
) -> None:
    source = reshard.open(golden_dir / name / "ckpt")
    expected = digests(source)
    # At stage 3 DeepSpeed has no place for 16-bit weights: they are made of the masters again.
    held = {k for k in expected if format_name == "native" or k[1] != "param" or stage != 3}
    there, back = tmp_path / "there", tmp_path / "back"

    convert(source.manifest, there, Wanted(world=world, stage=stage, format=format_name), FAST)
    on_the_way = reshard.open(there)
    assert (on_the_way.manifest.format, on_the_way.world) == (format_name, world)
    _holds(digests(on_the_way), expected, held)

    home = Wanted(from_world=world, world=source.world, stage=source.stage, format="native")
    convert(there, back, home, FAST)
    returned = open_manifest(back)
    _holds(returned.digests, expected, held)
    assert (returned.layout.world, returned.layout.stage) == (source.world, source.stage)
    if format_name == "native":
        assert rest(returned) == rest(source.manifest)


def _holds(
    found: Mapping[TensorKey, int], expected: Mapping[TensorKey, int], least: set[TensorKey]
) -> None:
    """Everything of ``least`` is there, and whatever is there is as it was."""
    assert least <= set(found)
    assert {k: expected[k] for k in found if k in expected} == {
        k: v for k, v in found.items() if k in expected
    }


@pytest.mark.parametrize("name", CASES)
def test_whole_weights_are_read_by_the_safetensors_library(
    golden_dir: Path, tmp_path: Path, name: str
) -> None:
    from safetensors import safe_open

    consolidate(golden_dir / name / "ckpt", tmp_path / "model.safetensors", options=FAST)
    truth = {key: array for _, key, array in real.truth(golden_dir / name)}
    with safe_open(tmp_path / "model.safetensors", "pt") as model:
        names = set(model.keys())
        for key in names:
            kind = next(k for k in ("fp32", "buffer", "lp") if f"{k}.{key}" in truth)
            found = real.as_numpy(model.get_tensor(key))
            expected = truth[f"{kind}.{key}"]
            assert found.dtype == expected.dtype
            assert found.tobytes() == expected.tobytes(), key
    weights = {k.partition(".")[2] for k in truth if k.startswith("lp.")}
    assert names == weights | {"ema", "seen"}
