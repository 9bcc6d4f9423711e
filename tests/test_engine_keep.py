"""Which checkpoint is the newest, and which are deleted, also when something is killed between?"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from standin import Meeting, Standin, good, on_ranks

import reshard
from reshard.engine import keep
from reshard.engine.keep import checkpoints, latest
from reshard.engine.load import load
from reshard.engine.save import save
from reshard.errors import NotFoundError, RequestError, TargetError


def put(path: Path, step: int, **settings: Any) -> None:
    def run(rank: int, meeting: Meeting) -> None:
        engine = Standin(rank, meeting)
        engine.counters["step"] = step
        save(engine, path, **settings)

    good(on_ranks(1, run))


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_the_step_counts_and_never_the_name(tmp_path: Path) -> None:
    for name, step in (("z9999", 3), ("a", 12), ("m100", 7)):
        put(tmp_path / name, step)
    assert [k.path.name for k in checkpoints(tmp_path)] == ["z9999", "m100", "a"]
    assert latest(tmp_path).name == "a"

    def run(rank: int, meeting: Meeting) -> int | None:
        return load(Standin(rank, meeting), tmp_path).step

    assert good(on_ranks(2, run)) == [12, 12]


def test_what_is_not_whole_counts_for_nothing(tmp_path: Path) -> None:
    for step in range(1, 5):
        put(tmp_path / f"s{step}", step)
    (tmp_path / "s4" / "zreshard.json").unlink()
    next((tmp_path / "s3").rglob("c/0")).write_bytes(b"")
    shutil.copytree(tmp_path / "s2", tmp_path / ".s9.zreshard-partial")
    (tmp_path / "a file").write_text("x")
    assert latest(tmp_path).name == "s2"


def test_none_at_all_says_why(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        latest(tmp_path / "nowhere")
    put(tmp_path / "s1", 1)
    next((tmp_path / "s1").rglob("c/0")).unlink()
    with pytest.raises(NotFoundError, match="chunk is missing"):
        latest(tmp_path)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        put(tmp_path / f"s{step}", step, keep_last=2)
    assert names(tmp_path) == ["s4", "s5"]
    put(tmp_path / "s6", 6, keep_last=1)
    assert names(tmp_path) == ["s6"]


def test_the_new_one_stays_though_others_went_further(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        put(tmp_path / f"s{step}", step)
    put(tmp_path / "again15", 15, keep_last=2)
    assert names(tmp_path) == ["again15", "s30"]


def test_only_what_an_engine_saved_is_deleted(tmp_path: Path) -> None:
    put(tmp_path / "s1", 1)
    reshard.convert(tmp_path / "s1", tmp_path / "release", reshard.Wanted(world=2))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a").write_text("x")
    put(tmp_path / "s2", 2, keep_last=1)
    assert names(tmp_path) == ["notes", "release", "s2"]


def test_killed_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever a deletion stops, what has its name is whole; the next save cleans up."""
    for step in (1, 2, 3):
        put(tmp_path / f"s{step}", step)

    plain = shutil.rmtree

    def stop(path: Path) -> None:
        if not path.name.endswith(keep.GONE):
            plain(path)
        next(path.rglob("c/0")).unlink()
        raise OSError(5, "killed here")

    with monkeypatch.context() as patch:
        patch.setattr(keep.shutil, "rmtree", stop)
        with pytest.raises(TargetError):
            put(tmp_path / "s4", 4, keep_last=2)
    assert [k.path.name for k in checkpoints(tmp_path)] == ["s3", "s4"]
    assert len(names(tmp_path)) == 4
    put(tmp_path / "s5", 5, keep_last=2)
    assert names(tmp_path) == ["s4", "s5"]


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError):
        put(tmp_path / "s1", 1, keep_last=0)
    assert names(tmp_path) == []
