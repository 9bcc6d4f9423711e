"""ZeRO checkpoints come back bit-equal from any world size and stage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reshard.api import convert, open_manifest
from reshard.checkpoint import Checkpoint
from reshard.conversion import Wanted
from reshard.digest import CRC64NVME
from reshard.execute import Options
from reshard.manifest import Manifest
from reshard.plain import encode
from tests import deepspeed_truth as real
from tests.test_deepspeed_read import _names

pytest.importorskip("torch")

FAST = Options(sync=False)
TARGETS = ((1, 1), (3, 3), (5, 2), (8, 3), (32, 1))
"""World size and stage on the way."""


def digests(checkpoint: Checkpoint) -> dict[Any, int]:
    """Digest of every tensor, by reading it."""
    found = {}
    for key in checkpoint.manifest.tensors:
        data = np.ascontiguousarray(checkpoint[key].numpy()).reshape(-1).view(np.uint8)
        found[key] = CRC64NVME.of(data.data)
    return found


def rest(manifest: Manifest) -> object:
    """Everything that isn't a tensor."""
    groups = [encode((dict(g.settings), dict(g.scalars), g.optimizer)) for g in manifest.groups]
    return encode(dict(manifest.objects)), groups, dict(manifest.aliases)


@pytest.mark.parametrize("name", _names())
def test_native_there_and_back(fixtures_dir: Path, tmp_path: Path, name: str) -> None:
    source = real.open_case(fixtures_dir / "deepspeed" / name)
    manifest = source.manifest
    expected = digests(source)
    for world, stage in TARGETS:
        there, back = tmp_path / f"{world}", tmp_path / f"{world}.back"
        report = convert(
            manifest, there, Wanted(format="native", world=world, stage=stage, drop=("*",)), FAST
        )
        assert report.target.world == world
        assert digests(Checkpoint(open_manifest(there))) == expected
        home = Wanted(world=source.world, stage=source.stage, from_world=world)
        convert(there, back, home, FAST)
        returned = open_manifest(back)
        assert dict(returned.digests) == expected
        assert rest(returned) == rest(manifest)


@pytest.mark.parametrize("known", [True, False])
def test_clipping_is_not_guessed(golden_dir: Path, tmp_path: Path, known: bool) -> None:
    """The norm in a file replaces that of the resuming run: an unknown one is left out."""
    source = open_manifest(golden_dir / "z3_p2_bf16_frozen_tied" / "ckpt")
    engine = dict(source.objects["deepspeed"])
    assert "clip_grad" not in engine, "stage 3 stores none"
    if not known:
        engine["config"] = {k: v for k, v in engine["config"].items() if "clipping" not in k}
    changed = replace(source, objects={**source.objects, "deepspeed": engine})
    convert(changed, tmp_path / "two", Wanted(world=3, stage=2), FAST)
    found = open_manifest(tmp_path / "two").objects["deepspeed"]
    assert found.get("clip_grad") == (1.0 if known else None)
