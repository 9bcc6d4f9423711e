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


WRITABLE = [n for n in _names() if not n.startswith("z0") and "elastic" not in n]


def ways(name: str) -> tuple[tuple[int, int], ...]:
    """World sizes and stages that DeepSpeed has for such a model."""
    if name.startswith("moe"):
        return ((2, 1), (6, 2), (12, 1))
    return ((1, 1), (3, 1), (12, 1)) if name.startswith("pp") else ((1, 2), (3, 3), (12, 1))


@pytest.mark.parametrize("name", WRITABLE)
def test_deepspeed_there_and_back(fixtures_dir: Path, tmp_path: Path, name: str) -> None:
    source = real.open_case(fixtures_dir / "deepspeed" / name)
    home = Wanted(format="deepspeed", world=source.world, stage=source.stage)
    convert(source.manifest, tmp_path / "home", home, FAST)
    expected = digests(Checkpoint(open_manifest(tmp_path / "home")))
    given = digests(source)
    assert {k: v for k, v in given.items() if k in expected} == expected
    for world, stage in ways(name):
        there, back = tmp_path / f"{world}", tmp_path / f"{world}.back"
        wanted = Wanted(format="deepspeed", world=world, stage=stage)
        convert(source.manifest, there, wanted, FAST)
        convert(there, back, replace(home, from_world=world), FAST)
        returned = open_manifest(back)
        assert digests(Checkpoint(returned)) == expected
        assert returned.layout.mesh == source.manifest.layout.mesh
        names = {p.name for p in (tmp_path / "home").rglob("*.pt")}
        assert {p.name for p in back.rglob("*.pt")} == names


def test_elastic_with_settings_that_are_given(fixtures_dir: Path, tmp_path: Path) -> None:
    """Elastic files hold no settings of the optimizer; who knows them can say them."""
    case = fixtures_dir / "deepspeed" / "z2_p4_bf16_elastic"
    source = open_manifest(case / "ckpt")
    assert [dict(g.settings) for g in source.groups] == [{}, {}]
    likewise = open_manifest(fixtures_dir / "deepspeed" / "z2_p4_bf16" / "ckpt")
    groups = tuple(
        replace(own, settings=other.settings)
        for own, other in zip(source.groups, likewise.groups, strict=True)
    )
    convert(replace(source, groups=groups), tmp_path / "t", Wanted(world=3, stage=1), FAST)
    equal, missing = real.compare(Checkpoint(open_manifest(tmp_path / "t")), case)
    assert (equal, missing) == (126, ["buffer.mask"])


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
