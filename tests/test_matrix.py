"""From every format that is read to every format that is written, and back: all of it, or listed.

A checkpoint of each format goes to native at another world size, from there to each format that is
written, and back to native. Each tensor, each object and each parameter group has come back bit
for bit, or the conversion said that it would be lost.
"""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reshard
from reshard.api import open_manifest
from reshard.checkpoint import Checkpoint
from reshard.conversion import Wanted, planned
from reshard.errors import ReshardError
from reshard.execute import Options
from reshard.format import AS_WRITTEN
from reshard.formats import formats
from reshard.layout import BUFFER, MASTER, PARAM, TensorKey, key_text
from reshard.manifest import Manifest
from reshard.plain import encode

QUICK = Options(sync=False)

SOURCES: dict[str, tuple[str, str | None]] = {
    "deepspeed stage 2": ("deepspeed/z2_p4_bf16/ckpt", None),
    "deepspeed stage 3": ("deepspeed/z3_p2_bf16_frozen_tied/ckpt", None),
    "deepspeed experts": ("deepspeed/moe_z2_p4_ep2_bf16/ckpt", None),
    "deepspeed pipeline": ("deepspeed/pp2dp2_z1_bf16/ckpt", None),
    "dcp": ("dcp/fsdp2_p4/ckpt", None),
    "dcp of FSDP1": ("dcp/fsdp1_hsdp_2x2/ckpt", None),
    "dcp with tensor parallelism": ("dcp/fsdp2tp_2x2/ckpt", None),
    "orbax": ("orbax/default_ocdbt/ckpt", None),
    "megatron": ("megatron/gpt_tp2pp1dp2_fully_reshardable_v019/ckpt", None),
    "bytecheckpoint": ("bytecheckpoint/fsdp2_ws2/ckpt", None),
    "torchsnapshot": ("torchsnapshot/ddp_ws2/ckpt", None),
    "safetensors": ("deepspeed/z2_p4_bf16/ckpt", "safetensors"),
    "torch": ("deepspeed/z2_p4_bf16/ckpt", "torch"),
}
"""A checkpoint of each format; the second says what it is made into first."""

WORLDS = {"deepspeed experts": 2}
"""World sizes, where three ranks don't fit (a degree of expert parallelism divides them)."""

REFUSED = {
    ("bytecheckpoint", "deepspeed"): "no optimizer state",
    ("torchsnapshot", "deepspeed"): "no optimizer state",
    ("orbax", "deepspeed"): "no optimizer state",
    ("safetensors", "deepspeed"): "no optimizer state",
}
"""What can't be written from what, and a word of why."""

WRITABLE = [name for name, f in formats().items() if f.writes and name != "native"]


def convert(source: Path, target: Path, **wanted: Any) -> list[str]:
    """Convert; returns what was lost, harmlessly or not."""
    suffix = {"torch": ".pt", "safetensors": ".safetensors"}.get(wanted["format"], "")
    job = planned(
        open_manifest(source),
        target.with_name(target.name + suffix),
        Wanted(optimizer=True, drop=("*",), **wanted),
        QUICK,
        formats(),
    )
    job.run()
    return [loss.what for loss in job.draft.losses]


def written(folder: Path, name: str) -> Path:
    """What stands under a name, whatever its suffix."""
    (found,) = folder.glob(f"{name}*")
    return found


@pytest.fixture(scope="module")
def sources(fixtures_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All sources, as native checkpoints of three ranks."""
    folder = tmp_path_factory.mktemp("sources")
    found = {}
    for name, (path, made_into) in SOURCES.items():
        source = fixtures_dir / path
        if made_into is not None:
            convert(source, folder / f"{name} made", format=made_into)
            source = written(folder, f"{name} made")
        convert(source, folder / name, format="native", world=WORLDS.get(name, 3))
        found[name] = folder / name
    return found


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("target", WRITABLE)
def test_there_and_back(sources: dict[str, Path], tmp_path: Path, source: str, target: str) -> None:
    if (source, target) in REFUSED:
        with pytest.raises(ReshardError, match=REFUSED[source, target]):
            convert(sources[source], tmp_path / "there", format=target)
        assert not list(tmp_path.glob("there*"))
        return
    lost = convert(sources[source], tmp_path / "there", format=target)
    there, world = written(tmp_path, "there"), WORLDS.get(source, 3)
    convert(there, tmp_path / "back", format="native", world=world)
    before, after = open_manifest(sources[source]), open_manifest(tmp_path / "back")
    assert missing_tensors(before, after, lost) == []
    assert missing_objects(before, after, lost) == []
    assert missing_groups(before, after, lost) == []


@pytest.mark.parametrize("target", ["dcp", "orbax", "torch", "megatron", "native"])
def test_weights_alone_need_no_waiver(tmp_path: Path, target: str) -> None:
    """A file as transformers writes it: that its tensors are torch's is no state to lose."""
    torch_files = pytest.importorskip("safetensors.torch")
    torch = pytest.importorskip("torch")
    torch_files.save_file({"a": torch.ones(6, 4)}, tmp_path / "a.safetensors", {"format": "pt"})
    out = tmp_path / ("out.pt" if target == "torch" else "out")
    reshard.convert(tmp_path / "a.safetensors", out, Wanted(format=target), QUICK)
    assert np.array_equal(reshard.open(out)["a"].numpy(), np.ones((6, 4), np.float32))


def missing_tensors(before: Manifest, after: Manifest, lost: list[str]) -> list[str]:
    """Tensors that neither came back nor were listed."""
    old, new = Checkpoint(before), Checkpoint(after)
    missing = []
    for key in before.tensors:
        if key_text(key) in lost:
            continue
        found = [k for k in places_of(key, after) if k in after.tensors]
        if not found or not any(same(old[key].numpy(), new[k].numpy()) for k in found):
            missing.append(key_text(key))
    return missing


def places_of(key: TensorKey, after: Manifest) -> list[TensorKey]:
    """Where a tensor may be: formats that hold one weight a name don't say what it was."""
    name, state = key
    names = [name, after.aliases.get(name, name)]
    also = {MASTER: [PARAM], BUFFER: [PARAM], PARAM: [MASTER]}
    states = [state, *also.get(state, [])]
    return [(n, s) for n in names for s in states]


def same(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    return (
        one.dtype == other.dtype and one.shape == other.shape and (one.tobytes() == other.tobytes())
    )


def missing_objects(before: Manifest, after: Manifest, lost: list[str]) -> list[str]:
    """State that isn't tensors and neither came back nor was listed."""
    missing = []
    for name, value in before.objects.items():
        if name.endswith(AS_WRITTEN) or name in lost:
            continue
        if isinstance(value, dict) and name in ("client", "deepspeed", "per_rank"):
            there = after.objects.get(name, {})
            missing += [
                f"{name}/{key}"
                for key, one in value.items()
                if not _listed(name, key, lost) and text(one) != text(there.get(key))
            ]
        elif value is not None and text(value) != text(after.objects.get(name)):
            missing.append(name)
    return missing


def _listed(name: str, key: str, lost: list[str]) -> bool:
    labels = (name, f"{name}:{key}", f"{name}/{key}", f"{name}:{key}/*", f"{name}/{key}/*")
    return any(fnmatchcase(what, label) for what in lost for label in labels)


def text(value: Any) -> str:
    return json.dumps(encode(value), sort_keys=True)


def missing_groups(before: Manifest, after: Manifest, lost: list[str]) -> list[str]:
    """Parameter groups that neither came back nor were listed."""
    if "groups" in lost or not before.groups:
        return []
    if len(before.groups) != len(after.groups):
        return [f"{len(before.groups)} groups became {len(after.groups)}"]
    return [
        f"group {index}"
        for index, (one, other) in enumerate(zip(before.groups, after.groups, strict=True))
        if text(one.settings) != text(other.settings)
        or text(numbers(one.scalars)) != text(numbers(other.scalars))
    ]


def numbers(scalars: Any) -> dict[str, float]:
    """Scalars as numbers: a step may be an int here and a tensor there."""
    return {name: float(np.asarray(value)) for name, value in scalars.items()}
