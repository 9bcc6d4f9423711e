"""Damaged and wrong checkpoints: a clear error, nothing written, the target untouched."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reshard.api import convert, open_manifest
from reshard.conversion import Wanted
from reshard.errors import (
    CorruptError,
    IncompleteError,
    InconsistentError,
    NotFoundError,
    RequestError,
    ReshardError,
    TargetError,
    UnsafeError,
)
from reshard.execute import Options

FAST = Options(sync=False)
STAGE2 = "z2_p4_bf16"
STAGE3 = "z3_p2_bf16_frozen_tied"
RANK = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


@pytest.fixture
def stage2(golden_dir: Path, tmp_path: Path) -> Path:
    """A copy of a real stage-2 checkpoint of four ranks: its tag's folder."""
    shutil.copytree(golden_dir / STAGE2 / "ckpt", tmp_path / "ckpt")
    return tmp_path / "ckpt" / "global_step3"


@pytest.fixture
def stage3(golden_dir: Path, tmp_path: Path) -> Path:
    """A copy of a real stage-3 checkpoint of two ranks: its tag's folder."""
    shutil.copytree(golden_dir / STAGE3 / "ckpt", tmp_path / "ckpt3")
    return tmp_path / "ckpt3" / "global_step3"


def refused(source: Path, error: type[ReshardError], *words: str, **wanted: Any) -> ReshardError:
    """The error of a conversion, after a check that it left nothing behind."""
    target = source.parent.parent / "target"
    before = sorted(p.name for p in target.parent.iterdir())
    fields: dict[str, Any] = {"format": "native", "world": 3, **wanted}
    with pytest.raises(error) as caught:
        convert(source, target, Wanted(**fields), FAST)
    assert sorted(p.name for p in target.parent.iterdir()) == before
    message = str(caught.value)
    for word in words:
        assert word in message, message
    return caught.value


def test_a_missing_rank(stage2: Path) -> None:
    (stage2 / RANK.format(2)).unlink()
    refused(stage2, IncompleteError, "rank 2 of 4", RANK.format(2))


def test_a_missing_last_rank(stage2: Path) -> None:
    (stage2 / RANK.format(3)).unlink()
    refused(stage2, IncompleteError, "rank 3 of 4")


def test_a_missing_model_file(stage2: Path) -> None:
    (stage2 / "mp_rank_00_model_states.pt").unlink()
    refused(stage2, IncompleteError, "model")


def test_a_rank_twice_under_two_names(stage2: Path) -> None:
    shutil.copy(stage2 / RANK.format(1), stage2 / RANK.format(1).removeprefix("bf16_"))
    refused(stage2, InconsistentError, "rank 1")


def test_a_rank_that_is_one_too_many(stage2: Path) -> None:
    shutil.copy(stage2 / RANK.format(1), stage2 / RANK.format(4))
    refused(stage2, InconsistentError, RANK.format(4), "4 data-parallel")


def test_a_rank_of_another_rank(stage2: Path) -> None:
    """Rank 1's file under rank 2's name: the 16-bit weights tell."""
    shutil.copy(stage2 / RANK.format(1), stage2 / RANK.format(2))
    refused(stage2, InconsistentError, "master")


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_of_another_run(stage2: Path, fixtures_dir: Path, rank: int) -> None:
    other = fixtures_dir / "deepspeed" / "z2_p4_fp16" / "ckpt" / "global_step3"
    theirs = other / RANK.format(rank).removeprefix("bf16_")
    shutil.copy(theirs, stage2 / RANK.format(rank))
    refused(stage2, InconsistentError, RANK.format(rank) if rank else "bf16_zero_pp_rank")


def test_a_rank_of_another_world_size(stage3: Path, fixtures_dir: Path) -> None:
    other = fixtures_dir / "deepspeed" / "z3_p4_bf16" / "ckpt" / "global_step3"
    shutil.copy(other / RANK.format(1), stage3 / RANK.format(1))
    refused(stage3, InconsistentError, RANK.format(1), "4", "2")


@pytest.mark.parametrize("keep", [0, 1, 100, 20000, -1, -22])
@pytest.mark.parametrize("which", [RANK.format(1), "mp_rank_00_model_states.pt"])
def test_a_truncated_file(stage2: Path, which: str, keep: int) -> None:
    path = stage2 / which
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    refused(stage2, CorruptError, which)


@pytest.mark.parametrize("which", [RANK.format(1), "mp_rank_00_model_states.pt"])
def test_a_flipped_bit_anywhere_in_the_payload(stage2: Path, which: str) -> None:
    path = stage2 / which
    good = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        members = [m for m in archive.infolist() if "/data/" in m.filename and m.file_size > 4]
    for member in members:
        bad = bytearray(good)
        bad[_payload(good, member) + member.file_size // 2] ^= 0x10
        path.write_bytes(bad)
        refused(stage2, CorruptError, which, member.filename.partition("/")[2])
    assert len(members) > 4


def _payload(data: bytes, member: zipfile.ZipInfo) -> int:
    head = member.header_offset
    name, extra = (int.from_bytes(data[head + i : head + i + 2], "little") for i in (26, 28))
    return head + 30 + name + extra


def _repickled(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Write a torch file again with another pickle, its zip in order."""
    out = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w") as new:
        for member in old.infolist():
            data = old.read(member)
            new.writestr(
                member.filename, change(data) if member.filename.endswith("data.pkl") else data
            )
    path.write_bytes(out.getvalue())


class _Canary:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize("which", [RANK.format(1), "mp_rank_00_model_states.pt"])
def test_a_pickle_that_runs_code(stage2: Path, tmp_path: Path, which: str) -> None:
    canary = tmp_path / "canary"
    evil = pickle.dumps({"module": _Canary(canary)}, protocol=2)
    pickle.loads(evil)
    assert canary.exists(), "the canary sings where it is let"
    canary.rmdir()
    _repickled(stage2 / which, lambda _: evil)
    refused(stage2, UnsafeError, which, "mkdir")
    assert not canary.exists()


@pytest.mark.parametrize("name", ["tok.weight", "scale"])
def test_a_placeholder_where_data_is_due(stage2: Path, name: str) -> None:
    torch = pytest.importorskip("torch")
    path = stage2 / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=True)
    state["module"][name] = torch.empty(0, dtype=torch.bfloat16)
    torch.save(state, path)
    refused(stage2, InconsistentError, path.name, name, "placeholder")


def test_a_placeholder_for_nothing(stage3: Path) -> None:
    """An empty parameter at stage 3 that no other file has data for."""
    torch = pytest.importorskip("torch")
    path = stage3 / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=True)
    state["module"]["extra"] = torch.empty(0)
    torch.save(state, path)
    refused(stage3, InconsistentError, path.name, "extra", "nowhere")


def test_latest_that_leaves_the_folder(stage2: Path) -> None:
    (stage2.parent / "latest").write_text("../elsewhere")
    with pytest.raises(CorruptError, match="no folder's name"):
        open_manifest(stage2.parent)


def test_from_is_checked(stage2: Path) -> None:
    refused(stage2, RequestError, "4", "8", from_world=8)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nothing there"):
        open_manifest(tmp_path / "no")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match="no checkpoint"):
        open_manifest(tmp_path / "empty")


def test_a_target_that_exists(stage2: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "precious").write_text("mine")
    with pytest.raises(TargetError, match="exists"):
        convert(stage2, target, Wanted(format="native"), FAST)
    assert (target / "precious").read_text() == "mine"
    assert [p.name for p in target.iterdir()] == ["precious"]


def test_an_empty_folder_may_be_the_target(stage2: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    convert(stage2, tmp_path / "target", Wanted(format="native"), FAST)
    assert open_manifest(tmp_path / "target").format == "native"


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a small tmpfs, where this process may."""
    place = tmp_path / "mount"
    place.mkdir()
    made = []

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("needs the right to mount a tmpfs")
        made.append(place)
        return place

    yield mount
    for one in made:
        subprocess.run(["umount", str(one)], check=True, capture_output=True)


def test_a_full_disk_is_seen_before_anything_is_written(
    stage2: Path, mounted: Callable[[str], Path]
) -> None:
    disk = mounted("size=64k")
    with pytest.raises(TargetError, match="free"):
        convert(stage2, disk / "target", Wanted(format="native"), FAST)
    assert not list(disk.iterdir())


def test_a_disk_that_fills_up_on_the_way(
    stage2: Path, mounted: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = mounted("size=200k")
    monkeypatch.setattr("reshard.report.free_space", lambda _: None)
    with pytest.raises(TargetError, match="space"):
        convert(stage2, disk / "target", Wanted(format="native"), FAST)
    assert not list(disk.iterdir())


def test_no_permission_to_write(stage2: Path, mounted: Callable[[str], Path]) -> None:
    disk = mounted("size=1m,ro")
    with pytest.raises(TargetError, match=r"permission|[Rr]ead-only"):
        convert(stage2, disk / "target", Wanted(format="native"), FAST)


@pytest.mark.parametrize("change", ["less", "more"])
def test_a_model_that_disagrees_with_its_optimizer(stage3: Path, change: str) -> None:
    """A parameter that the model's file doesn't list, or one that isn't in the flat groups."""
    torch = pytest.importorskip("torch")
    for path in sorted(stage3.glob("zero_pp_rank_*_model_states.pt")):
        state = torch.load(path, weights_only=True)
        if change == "less":
            del state["param_shapes"][0]["blocks.1.fc2.weight"]
        else:
            state["param_shapes"][0]["extra"] = torch.Size([4])
        torch.save(state, path)
    refused(stage3, InconsistentError, RANK.format(0), "elements")
