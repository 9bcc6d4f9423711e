"""Does a conversion that was killed go on where it was, and never from anything else?

A child process converts and kills itself, at points that are drawn, in the middle of whatever it
does: moving bytes, writing the journal, writing headers, renaming. Then the same is done again and
compared with what comes out undisturbed.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import reshard
from reshard import Options, Wanted, commit, conversion, journal, record, work
from reshard.cli.main import main as program
from reshard.commit import Staging
from reshard.errors import InconsistentError, TargetError
from reshard.journal import Journal
from reshard.lock import FolderLock
from reshard.record import Recorder

UNIT = 20_000
KINDS = {
    "native": Wanted(world=3, stage=3, format="native"),
    "deepspeed": Wanted(world=3, stage=2),
    "one file.safetensors": Wanted(format="safetensors", dtype="bfloat16"),
    "shards": Wanted(format="safetensors", max_shard_bytes=50_000),
}
NATIVE = KINDS["native"]


class Killed(BaseException):
    """What stands for a kill where it happens in this process."""


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "UNIT", UNIT)
    monkeypatch.setattr(work, "SHARE", 6_000)


@pytest.fixture(scope="module")
def golden(golden_dir: Path) -> Path:
    return golden_dir / "z2_p4_bf16" / "ckpt"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A source without any checksum: nothing but its marks tells that it has changed."""
    path = tmp_path / "plain.safetensors"
    save_file(weights(0), path)
    return path


def weights(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {f"w{i}": rng.normal(size=(50, 101)).astype(np.float32) for i in range(24)}


class Events:
    """Counts what happens in a conversion, and stops at one of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop_at: int, stop: Callable[[], None]):
        self.count = 0
        self._stop_at = stop_at
        self._stop = stop
        self._lock = threading.Lock()
        append, rename = Journal.append, os.rename

        def appended(journal: Journal, *given: Any) -> None:
            self.happened()
            append(journal, *given)
            self.happened()

        def renamed(*given: Any) -> None:
            self.happened()
            rename(*given)
            self.happened()

        def finished(job: conversion.Job, *given: Any) -> None:
            check(job, *given)
            self.happened()

        check = conversion.Job._check_unchanged
        monkeypatch.setattr(Journal, "append", appended)
        monkeypatch.setattr(commit.os, "rename", renamed)
        monkeypatch.setattr(conversion.Job, "_check_unchanged", finished)

    def happened(self, _: int = 0) -> None:
        with self._lock:
            self.count += 1
            if self.count == self._stop_at:
                self._stop()


def convert(source: Path, target: Path, wanted: Wanted, **options: Any) -> reshard.Report:
    options = {"workers": 2, "sync": False, **options}
    return reshard.convert(source, target, wanted, Options(**options))


def killed(source: Path, target: Path, wanted: Wanted, at: int, **options: Any) -> bool:
    """Convert in a child that kills itself at an event; whether it did."""
    child = os.fork()
    if child == 0:
        with pytest.MonkeyPatch.context() as patch:
            events = Events(patch, at, lambda: os.kill(os.getpid(), signal.SIGKILL))
            try:
                convert(source, target, wanted, progress=events.happened, **options)
                os._exit(0)
            finally:
                os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status != 0


def events_of(source: Path, target: Path, wanted: Wanted, **options: Any) -> int:
    """How many events an undisturbed conversion has."""
    with pytest.MonkeyPatch.context() as patch:
        events = Events(patch, -1, lambda: None)
        convert(source, target, wanted, progress=events.happened, **options)
        return events.count


def halfway(source: Path, target: Path, wanted: Wanted = NATIVE, **options: Any) -> Path:
    """Kill a conversion when a part of it is complete; its staging folder."""
    staging = Staging(target, single_file=False)
    for at in range(60, 300, 10):
        assert killed(source, target, wanted, at, **options)
        if len(list(journal.read(staging.journal))) > 4:
            return staging.folder
    raise AssertionError("nothing was ever complete")


def tree(path: Path) -> dict[str, str]:
    """Everything below a path."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return {str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


# -- kills ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "sync"), [*((kind, False) for kind in KINDS), ("native", True), ("deepspeed", True)]
)
def test_a_killed_conversion_goes_on(golden: Path, tmp_path: Path, kind: str, sync: bool) -> None:
    """Killed again and again, at any event, it still comes to the same end."""
    whole, target, rng = tmp_path / "whole" / kind, tmp_path / kind, random.Random(kind)
    total = events_of(golden, whole, KINDS[kind], sync=sync)
    kills = 0
    while kills < 10 and not target.exists():
        kills += killed(golden, target, KINDS[kind], rng.randint(1, total), sync=sync)
    if not target.exists():
        convert(golden, target, KINDS[kind], sync=sync)
    assert kills
    assert tree(target) == tree(whole)


@pytest.mark.parametrize("after", range(6))
def test_a_kill_near_the_end(golden: Path, tmp_path: Path, after: int) -> None:
    """While headers are written, before and after the rename."""
    whole, target = tmp_path / "whole", tmp_path / "out"
    total = events_of(golden, whole, KINDS["deepspeed"], workers=1)
    killed(golden, target, KINDS["deepspeed"], total - after, workers=1)
    if not target.exists():
        assert convert(golden, target, KINDS["deepspeed"]).resumed_bytes
        assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "whole"]
    assert tree(target) == tree(whole)


def test_the_command_says_so(golden: Path, tmp_path: Path, capsys: Any) -> None:
    target = tmp_path / "out"
    folder = halfway(golden, target)
    words = ["convert", golden, target, "--to", "3", "--stage", "3", "--format", "native"]
    with pytest.raises(SystemExit) as end:
        program.main([*map(str, words), "--no-sync"])
    out, err = capsys.readouterr()
    assert end.value.code == 0, err
    assert re.fullmatch(r"resuming: \d+ of 23 files are complete(, \d more in part)?\n", err)
    assert ", the last " in out
    assert not folder.exists()


@pytest.mark.parametrize("read", ["map", "read"])
def test_less_is_read_the_second_time(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Any
) -> None:
    from reshard import source

    fetched = [0]
    fetches = {kind: kind.fetch for kind in (source.Mapped, source.Read)}
    for kind, fetch in fetches.items():

        def counted(self: Any, file: int, at: int, nbytes: int, fetch: Any = fetch) -> memoryview:
            if str(self._files.path(file)).startswith(str(golden)):
                fetched[0] += nbytes
            return fetch(self, file, at, nbytes)

        monkeypatch.setattr(kind, "fetch", counted)
    report = convert(golden, tmp_path / "whole", NATIVE, read=read)
    whole, fetched[0] = fetched[0], 0
    halfway(golden, tmp_path / "out", read=read)
    again = convert(golden, tmp_path / "out", NATIVE, read=read)
    assert again.resumed_bytes
    assert again.moved_bytes is not None
    assert again.moved_bytes + again.resumed_bytes == report.moved_bytes
    assert again.regions_checked == report.regions_checked
    assert fetched[0] <= whole - again.resumed_bytes


def test_progress_adds_up(golden: Path, tmp_path: Path) -> None:
    halfway(golden, tmp_path / "out")
    seen: list[int] = []
    report = convert(golden, tmp_path / "out", NATIVE, progress=seen.append)
    assert seen[0] == report.resumed_bytes
    assert sum(seen) == (report.moved_bytes or 0) + (report.resumed_bytes or 0)


# -- errors and interrupts ------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TargetError("x"), ZeroDivisionError()])
@pytest.mark.parametrize("system", [False, True])
def test_what_is_kept_after_an_error(
    golden: Path, tmp_path: Path, error: BaseException, system: bool
) -> None:
    """What a person or the system did may pass; what we or the bytes did won't."""
    if system:
        error.__cause__ = OSError(28, "No space left on device")
    said: list[str] = []

    def fail() -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        events = Events(patch, 60, fail)
        options = {"progress": events.happened, "notice": said.append}
        with pytest.raises(type(error)):
            convert(golden, tmp_path / "out", NATIVE, **options)
    folder = tmp_path / ".out.zreshard-partial"
    if system or isinstance(error, KeyboardInterrupt):
        assert said == [f"what is complete stays in {folder}: the same command goes on from there"]
        assert (convert(golden, tmp_path / "out", NATIVE).resumed_bytes or 0) > 0
    assert not folder.exists()
    assert [t.name for t in threading.enumerate() if t.name.startswith("zreshard")] == []


def test_a_full_disk(golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = os.pwritev, [0]

    def full(*given: Any) -> int:
        calls[0] += 1
        if calls[0] > 100:
            raise OSError(28, "No space left on device")
        return write(*given)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(TargetError, match="no space left"):
            convert(golden, tmp_path / "out", NATIVE)
    assert convert(golden, tmp_path / "out", NATIVE).resumed_bytes


def test_a_journal_that_cannot_be_written(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise TargetError("can't be written", where="journal")

    monkeypatch.setattr(Journal, "append", fail)
    with pytest.raises(TargetError, match="journal"):
        convert(golden, tmp_path / "out", NATIVE)
    assert list(tmp_path.iterdir()) == []


# -- never from anything else ---------------------------------------------------------------------


def rewrite(path: Path, seed: int) -> None:
    """Other weights in the same file, at the same size and time."""
    before = path.stat()
    content = path.with_name("new")
    save_file(weights(seed), content)
    with path.open("r+b") as file:
        file.write(content.read_bytes())
    content.unlink()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (before.st_size, before.st_mtime_ns, before.st_ino) == (
        after.st_size,
        after.st_mtime_ns,
        after.st_ino,
    )


def test_a_source_that_has_changed_is_never_mixed(plain: Path, tmp_path: Path) -> None:
    wanted = Wanted(world=3, stage=3, format="native")
    halfway(plain, tmp_path / "out", wanted)
    rewrite(plain, 1)
    said: list[str] = []
    report = convert(plain, tmp_path / "out", wanted, notice=said.append)
    assert said == [
        "what an earlier run has done is void, as the source has changed since: beginning anew"
    ]
    assert report.resumed_bytes == 0
    for name, array in weights(1).items():
        assert np.array_equal(reshard.open(tmp_path / "out")[name].numpy(), array)


def test_a_source_that_changes_while_it_is_read(plain: Path, tmp_path: Path) -> None:
    calls = [0]

    def change(_: int) -> None:
        calls[0] += 1
        if calls[0] == 5:
            with plain.open("r+b") as file:
                file.seek(-8, 2)
                file.write(b"changed.")

    with pytest.raises(InconsistentError, match="was changed while it was read"):
        convert(plain, tmp_path / "out", Wanted(world=2, format="native"), progress=change)
    assert [p.name for p in tmp_path.iterdir()] == [plain.name]


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        (Wanted(world=4, stage=3, format="native"), "this source with other options"),
        (Wanted(world=3, stage=1, format="native"), "this source with other options"),
        (Wanted(world=3, stage=3, format="native", dtype="fp32"), "this source with other options"),
        (Wanted(world=3, stage=3, format="native", replicas="first"), "with other options"),
        (None, "another source"),
    ],
)
def test_another_conversion_is_not_taken_over(
    golden: Path, plain: Path, tmp_path: Path, changed: Wanted | None, what: str
) -> None:
    folder = halfway(golden, tmp_path / "out")
    before = tree(folder / "payload")
    source = plain if changed is None else golden
    with pytest.raises(TargetError, match=f"isn't finished, of .*{what}") as error:
        convert(source, tmp_path / "out", changed or NATIVE)
    assert "--fresh" in str(error.value)
    assert tree(folder / "payload") == before
    report = convert(source, tmp_path / "out", changed or NATIVE, resume=False)
    assert report.resumed_bytes == 0
    assert not folder.exists()


def test_another_release_begins_anew(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halfway(golden, tmp_path / "out")
    monkeypatch.setattr(reshard, "__version__", "99.0")
    said: list[str] = []
    assert convert(golden, tmp_path / "out", NATIVE, notice=said.append).resumed_bytes == 0
    assert "as another release" in said[0]


def test_a_torn_journal_is_harmless(golden: Path, tmp_path: Path) -> None:
    """Cut anywhere in its last lines, or with wrong bytes there."""
    whole, rng = tmp_path / "whole", random.Random(0)
    convert(golden, whole, NATIVE)
    everything = tree(whole)
    resumed = set()
    for case in range(6):
        target = tmp_path / f"out{case}"
        path = halfway(golden, target) / "journal"
        data = bytearray(path.read_bytes())
        at = rng.randrange(len(data) * (case > 1) // 2, len(data))
        if case % 2:
            del data[at:]
        else:
            data[at] ^= rng.randrange(1, 256)
        path.write_bytes(data)
        resumed.add(convert(golden, target, NATIVE).resumed_bytes)
        assert tree(target) == everything
        shutil.rmtree(target)
    assert len(resumed) > 2


@pytest.mark.parametrize("case", range(6))
def test_what_was_changed_since_is_made_anew(golden: Path, tmp_path: Path, case: int) -> None:
    """Bytes, names and sizes of staged files, whether they were complete or not."""
    convert(golden, tmp_path / "whole", KINDS["deepspeed"])
    payload = halfway(golden, tmp_path / "out", KINDS["deepspeed"]) / "payload"
    rng = random.Random(case)
    for path in [p for p in payload.rglob("*") if p.is_file()]:
        data = bytearray(path.read_bytes())
        if case < 3:
            for _ in range(3 if data else 0):  # one may have been made and have no bytes yet
                data[rng.randrange(len(data))] ^= 1
            with path.open("r+b") as file:
                file.write(data)
        elif case == 3:
            path.unlink()
        elif case == 4:
            os.truncate(path, len(data) // 2)
        else:
            os.truncate(path, len(data) + 1)
    report = convert(golden, tmp_path / "out", KINDS["deepspeed"])
    assert report.resumed_bytes == 0 or case < 3
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_what_cannot_be_told_by_its_stamp_is_read_again(golden: Path, tmp_path: Path) -> None:
    """Files that were touched, and not changed."""
    convert(golden, tmp_path / "whole", NATIVE)
    folder = halfway(golden, tmp_path / "out")
    for path in [p for p in (folder / "payload").rglob("*") if p.is_file()]:
        os.utime(path)
    assert convert(golden, tmp_path / "out", NATIVE).resumed_bytes
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.parametrize("sync", [False, True])
def test_a_start_of_the_machine(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    """What wasn't brought to disk can have been lost."""
    halfway(golden, tmp_path / "out", sync=sync)
    monkeypatch.setattr(record, "boot", lambda: "another")
    assert bool(convert(golden, tmp_path / "out", NATIVE).resumed_bytes) is sync


@pytest.mark.parametrize("kind", ["native", "deepspeed"])
def test_bytes_are_on_disk_before_the_journal_says_so(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    written: Counter[str] = Counter()
    synced: Counter[str] = Counter()
    write, flush, append, complete = os.pwritev, os.fsync, Journal.append, Recorder._complete

    def path(fd: int) -> str:
        return os.readlink(f"/proc/self/fd/{fd}")

    def wrote(fd: int, *given: Any) -> int:
        written[path(fd)] += 1
        return write(fd, *given)

    def flushed(fd: int) -> None:
        before = written[path(fd)]
        flush(fd)
        synced[path(fd)] = before

    def completed(self: Recorder, unit: Any) -> None:
        for file in unit.files:
            if file >= 0:
                needed[unit.part, file] = written[str(folder / files[file].path)]
        complete(self, unit)

    def said(self: Journal, head: Any, payload: bytes = b"") -> None:
        part = tuple(head["part"]) if "part" in head else None
        for file in range(*head["files"]) if part is None else part[:1]:
            if (part, file) in needed:
                seen.append(synced[str(folder / files[file].path)] >= needed[part, file])
        append(self, head, payload)

    monkeypatch.setattr(os, "pwritev", wrote)
    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Recorder, "_complete", completed)
    monkeypatch.setattr(Journal, "append", said)
    job = reshard.prepare(golden, tmp_path / "out", KINDS[kind])
    files, folder = job.draft.manifest.files, tmp_path / ".out.zreshard-partial" / "payload"
    needed: dict[Any, int] = {}
    seen: list[bool] = []
    job.run()
    assert len(seen) > 10
    assert all(seen)


# -- one at a time --------------------------------------------------------------------------------


def test_two_at_a_time(golden: Path, tmp_path: Path) -> None:
    folder = halfway(golden, tmp_path / "out")
    before = tree(folder / "payload")
    first = Staging(tmp_path / "out", single_file=False)
    first.begin(keep=True)
    for resume in (True, False):
        with pytest.raises(TargetError, match=f"process {os.getpid()} on .* is working in it"):
            convert(golden, tmp_path / "out", NATIVE, resume=resume)
    second = Staging(tmp_path / "out", single_file=False)
    with pytest.raises(TargetError, match="is working in it"):
        second.begin()
    second.abandon()
    assert tree(folder / "payload") == before
    assert first.leave()
    assert convert(golden, tmp_path / "out", NATIVE).resumed_bytes


def test_a_crowd(golden: Path, tmp_path: Path) -> None:
    """Four at once, some of which are killed: one wins, and nothing is mixed or left."""
    convert(golden, tmp_path / "whole", NATIVE)
    total = events_of(golden, tmp_path / "count", NATIVE)
    rng = random.Random(1)
    for round_ in range(1):
        target = tmp_path / f"out{round_}"
        children = []
        for _ in range(4):
            at = rng.randint(1, 2 * total)
            child = os.fork()
            if child == 0:
                code = 9
                try:
                    code = int(killed(golden, target, NATIVE, at))
                except AssertionError:  # busy, or there already
                    code = 2
                finally:
                    os._exit(code)
            children.append(child)
        ends = [os.waitpid(child, 0)[1] >> 8 for child in children]
        assert set(ends) <= {0, 1, 2}
        assert ends.count(0) <= 1
        if not target.exists():
            convert(golden, target, NATIVE)
        assert tree(target) == tree(tmp_path / "whole")


def test_a_lock_that_was_removed_is_not_held(tmp_path: Path) -> None:
    """Another process may remove the file between our opening and our locking it."""
    import fcntl

    flock, calls = fcntl.flock, [0]

    def remove_first(fd: int, how: int) -> None:
        calls[0] += 1
        if calls[0] == 1:
            shutil.rmtree(tmp_path / "folder")
        flock(fd, how)

    lock = FolderLock(tmp_path / "folder")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", remove_first)
        assert lock.take()
    assert calls[0] == 2
    with pytest.raises(TargetError, match="is working in it"):
        FolderLock(tmp_path / "folder").take()
    lock.release(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_without_locks_nobody_goes_on_from_it(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    assert killed(golden, tmp_path / "out", NATIVE, 60)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.zreshard-partial-")
    with pytest.MonkeyPatch.context() as patch:
        events = Events(patch, 60, interrupt)
        with pytest.raises(KeyboardInterrupt):
            convert(golden, tmp_path / "out", NATIVE, progress=events.happened)
    assert convert(golden, tmp_path / "out", NATIVE).resumed_bytes == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == [left.name, "out"]


def interrupt() -> None:
    raise KeyboardInterrupt


# -- space ----------------------------------------------------------------------------------------


def test_what_is_there_already_needs_no_space(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = halfway(golden, tmp_path / "out")
    taken = sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file())
    needed = reshard.prepare(golden, tmp_path / "x", NATIVE).report.disk_needed
    assert 0 < taken < needed
    usage = shutil._ntuple_diskusage(10**9, 0, needed - taken)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert reshard.prepare(golden, tmp_path / "out", NATIVE).report.disk_free == needed
    with pytest.raises(TargetError, match="are free"):
        convert(golden, tmp_path / "other", NATIVE)
    assert convert(golden, tmp_path / "out", NATIVE).resumed_bytes
