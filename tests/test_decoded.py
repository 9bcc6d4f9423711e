"""Are encoded files served as if their bytes lay on the disk, and what goes wrong with them?

Real checkpoints are compressed file by file, and everything that the core does with them has to
come out as it does for the files as they are.
"""

from __future__ import annotations

import os
import random
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoded import Unzip, encode

import reshard
from reshard import Options, Wanted, conversion, decoded, record, work
from reshard.api import open_manifest
from reshard.checkpoint import Checkpoint
from reshard.decoded import DecodedFiles, Write
from reshard.digests import survey
from reshard.errors import (
    CorruptError,
    InconsistentError,
    NotFoundError,
    ReshardError,
    TargetError,
)
from reshard.identity import marks, stored_files
from reshard.manifest import Manifest
from reshard.store import File

WANTED = Wanted(world=3, stage=3, format="native")


@pytest.fixture(scope="module")
def plain(golden_dir: Path) -> Manifest:
    return open_manifest(golden_dir / "z2_p4_bf16" / "ckpt")


@pytest.fixture(params=["in memory", "on disk"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where decoded files are kept."""
    if request.param == "on disk":
        monkeypatch.setattr(decoded, "SMALL", 0)
    return request.param


def convert(source: Manifest, target: Path, read: Any = None, workers: int = 2) -> reshard.Report:
    options = Options(sync=False, read=read, workers=workers)
    return reshard.convert(source, target, WANTED, options)


def read_all(manifest: Manifest) -> None:
    for key in manifest.tensors:
        Checkpoint(manifest)[key].numpy()


def contents(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("read", ["map", "read"])
@pytest.mark.parametrize("workers", [1, 4])
def test_converts_to_the_same_files(
    plain: Manifest, tmp_path: Path, read: Any, workers: int
) -> None:
    calls: Counter[str] = Counter()
    source = encode(plain, tmp_path / "encoded", calls)
    convert(plain, tmp_path / "a")
    done = convert(source, tmp_path / "b", read=read, workers=workers)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert done.regions_checked  # checksums of the decoded bytes
    # once for the small replicas, which are compared first, and once for the pass itself
    assert set(calls.values()) <= {1, 2}
    assert len(calls) == len(source.files)


@pytest.mark.usefixtures("place")
def test_slices_are_read(plain: Manifest, tmp_path: Path) -> None:
    found, expected = Checkpoint(encode(plain, tmp_path / "encoded")), Checkpoint(plain)
    for key in plain.tensors:
        a, b = found[key], expected[key]
        assert a.numpy().tobytes() == b.numpy().tobytes(), key
        if a.shape:
            assert a[1:3].tobytes() == b[1:3].tobytes(), key


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("read", ["map", "read"])
def test_digests_are_the_same(plain: Manifest, tmp_path: Path, read: Any) -> None:
    found = survey(encode(plain, tmp_path / "encoded"), Options(read=read))
    expected = survey(plain)
    assert found.digests == expected.digests
    assert found.regions_checked == expected.regions_checked > 0
    assert not found.damaged


def test_a_flipped_bit_that_decodes(plain: Manifest, tmp_path: Path) -> None:
    """Checksums are of the decoded bytes: what the encoding doesn't notice, they do."""
    source = encode(plain, tmp_path / "encoded")
    path = tmp_path / "encoded" / "0.z"
    content = bytearray(zlib.decompress(path.read_bytes()))
    content[len(content) // 2] ^= 4
    path.write_bytes(zlib.compress(bytes(content)))
    with pytest.raises(CorruptError):
        convert(source, tmp_path / "target")


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: data[: len(data) // 2], "decodes to"),
        (lambda data: b"\0" + data[1:], "can't be decoded"),
        (lambda data: zlib.compress(zlib.decompress(data)[:-1]), "decodes to"),
        (lambda data: zlib.compress(zlib.decompress(data) + b"x"), "decodes to more than"),
        (lambda data: zlib.compress(bytes(1 << 24)), "decodes to more than"),
        (lambda data: b"", "decodes to 0 bytes"),
    ],
)
def test_damage_is_named(
    plain: Manifest, tmp_path: Path, damage: Callable[[bytes], bytes], says: str
) -> None:
    source = encode(plain, tmp_path / "encoded")
    path = tmp_path / "encoded" / "1.z"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CorruptError, match=says) as caught:
        convert(source, tmp_path / "target")
    assert caught.value.where == str(path)
    assert not (tmp_path / "target").exists()
    with pytest.raises(CorruptError, match=says):
        read_all(source)


def test_a_stored_file_that_is_gone(plain: Manifest, tmp_path: Path) -> None:
    source = encode(plain, tmp_path / "encoded")
    (tmp_path / "encoded" / "1.z").unlink()
    with pytest.raises(NotFoundError, match=r"1\.z.*gone"):
        convert(source, tmp_path / "target")
    with pytest.raises(NotFoundError, match=r"1\.z.*gone"):
        survey(source)


def test_a_disk_without_room(
    plain: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoded, "SMALL", 0)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(decoded.os, "pwrite", full)
    with pytest.raises(TargetError, match=r"decoded bytes.*No space left(?s:.*)TMPDIR"):
        survey(encode(plain, tmp_path / "encoded"))


def test_nothing_stays_behind(
    plain: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temporary files have no name, and lie beside the target, never in the source."""
    monkeypatch.setattr(decoded, "SMALL", 0)
    folders = set()
    temporary = decoded.tempfile.TemporaryFile

    def made(*given: Any, **named: Any) -> Any:
        folders.add(named["dir"])
        return temporary(*given, **named)

    monkeypatch.setattr(decoded.tempfile, "TemporaryFile", made)
    source = encode(plain, tmp_path / "encoded")
    before = sorted(os.listdir(source.root))
    convert(source, tmp_path / "target")
    assert sorted(os.listdir(source.root)) == before
    assert sorted(os.listdir(tmp_path)) == ["encoded", "target"]
    beside = {f for f in folders if f is not None}
    assert beside
    assert all(f.is_relative_to(tmp_path) and not f.is_relative_to(source.root) for f in beside)


def test_a_source_that_changed_meanwhile(
    plain: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = encode(plain, tmp_path / "encoded")
    move = conversion.execute

    def moved(*given: Any) -> Any:
        result = move(*given)
        os.utime(tmp_path / "encoded" / "0.z", ns=(1, 1))
        return result

    monkeypatch.setattr(conversion, "execute", moved)
    with pytest.raises(InconsistentError, match=r"0\.z.*changed while"):
        convert(source, tmp_path / "target")


def test_marks_are_of_the_stored_files_once(tmp_path: Path) -> None:
    shared = ("a", "b")

    class Value:
        stored = shared

        def decode(self, root: Path, write: Write) -> None: ...

    for name in "abc":
        (tmp_path / name).write_bytes(b"x")
    files = (File("a", 5, Value()), File("a", 9, Value()), File("c", 1))
    manifest = Manifest("none", tmp_path, reshard.layout.Layout((), {}), files, {})
    assert set(stored_files(manifest)) == {tmp_path / n for n in "abc"}
    assert len(marks(manifest)) == 3
    (tmp_path / "b").unlink()
    with pytest.raises(ReshardError, match="gone"):
        marks(manifest)


# -- what is kept -------------------------------------------------------------------------------


class Some:
    """Decodes to ``nbytes`` of its number, and counts."""

    stored = ()

    def __init__(self, number: int, nbytes: int, calls: Counter[int]) -> None:
        self.number = number
        self.nbytes = nbytes
        self._calls = calls

    def decode(self, root: Path, write: Write) -> None:
        self._calls[self.number] += 1
        write(bytes([self.number]) * self.nbytes)


def ask(files: DecodedFiles, some: Some) -> memoryview:
    found = files.find(some.number)
    if found is None:
        found = files.get(some.number, some, some.nbytes, Path(str(some.number)))
    assert found == bytes([some.number]) * some.nbytes
    return found


def test_what_has_no_room_in_memory_goes_to_the_disk(tmp_path: Path) -> None:
    """Each is decoded once, however often all of them are walked over."""
    calls: Counter[int] = Counter()
    some = [Some(n, 1000, calls) for n in range(50)]
    files = DecodedFiles(tmp_path, memory=10_000)
    for _ in range(3):
        for one in some:
            ask(files, one)
    assert set(calls.values()) == {1}
    assert sum(f.slab is None for f in files._files.values()) == 10
    assert len(files._slabs) == 1


def test_the_least_recently_used_slab_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = decoded.mmap.PAGESIZE
    monkeypatch.setattr(decoded, "SMALL", 0)
    monkeypatch.setattr(decoded, "SLAB", 2 * page)
    monkeypatch.setattr(decoded, "DISK", 4 * page)
    calls: Counter[int] = Counter()
    a, b, c, d, e = (Some(n, 100, calls) for n in range(5))
    files = DecodedFiles(tmp_path)
    held = ask(files, c)
    for some in (d, a, b, a, c, a):  # c and d lie in one slab, a and b in another
        ask(files, some)
    assert len(files._slabs) == 2
    ask(files, e)
    assert len(files._slabs) == 2
    ask(files, a)
    ask(files, b)
    assert set(calls.values()) == {1}
    ask(files, c)
    assert calls[2] == 2
    assert held == b"\2" * 100


def test_one_that_is_larger_than_all_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoded, "SMALL", 0)
    monkeypatch.setattr(decoded, "DISK", 10)
    calls: Counter[int] = Counter()
    files, large = DecodedFiles(tmp_path), Some(1, 5000, calls)
    for _ in range(3):
        ask(files, large)
    assert calls == {1: 1}


def test_threads_wait_for_each_other(tmp_path: Path) -> None:
    calls: Counter[int] = Counter()
    files = DecodedFiles(tmp_path)
    begun = threading.Barrier(8)

    class Slow(Some):
        def decode(self, root: Path, write: Write) -> None:
            threading.Event().wait(0.05)
            super().decode(root, write)

    some = Slow(7, 100, calls)

    def work() -> None:
        begun.wait()
        ask(files, some)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == {7: 1}


@pytest.mark.parametrize(("nbytes", "together"), [(300_000, 3), (600_000, 1), (5_000_000, 1)])
def test_no_more_is_decoded_at_a_time_than_memory_allows(
    tmp_path: Path, nbytes: int, together: int
) -> None:
    now = most = 0
    lock = threading.Lock()
    full = threading.Event()

    class Watched(Some):
        def decode(self, root: Path, write: Write) -> None:
            nonlocal now, most
            with lock:
                now += 1
                most = max(most, now)
                if now == together:
                    full.set()
            full.wait(5)
            super().decode(root, write)
            with lock:
                now -= 1

    files = DecodedFiles(tmp_path, memory=1_000_000)
    some = [Watched(n, nbytes, Counter()) for n in range(6)]
    threads = [threading.Thread(target=ask, args=(files, one)) for one in some]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == together


def test_a_turn_ends_with_an_error(tmp_path: Path) -> None:
    class Broken(Some):
        def decode(self, root: Path, write: Write) -> None:
            raise ValueError("no")

    files = DecodedFiles(tmp_path, memory=1000)
    for number in range(3):
        with pytest.raises(CorruptError, match="can't be decoded: no"):
            ask(files, Broken(number, 5000, Counter()))
    ask(files, Some(9, 5000, Counter()))


def test_disk_for_temporary_files_is_reckoned_with(plain: Manifest, tmp_path: Path) -> None:
    """What is on the disk at a time, with what a slab leaves over."""
    assert decoded.disk_for([0, decoded.SMALL]) == 0
    assert decoded.disk_for([100_000]) >= 100_000
    many = decoded.disk_for([1 << 30] * 100)
    assert decoded.DISK <= many <= decoded.DISK + 2 * decoded.SLAB
    assert decoded.disk_for([9 << 30]) >= 9 << 30
    needed = reshard.prepare(plain, tmp_path / "a", WANTED).report.disk_needed
    manifest = encode(plain, tmp_path / "encoded")
    more = reshard.prepare(manifest, tmp_path / "b", WANTED).report.disk_needed
    assert more == needed + decoded.disk_for(file.nbytes for file in manifest.files)


def test_random_use_under_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is dropped, each answer is right, and the room is kept to."""
    monkeypatch.setattr(decoded, "SMALL", 200)
    monkeypatch.setattr(decoded, "SLAB", 1 << 14)
    monkeypatch.setattr(decoded, "DISK", 3 << 14)
    rng = random.Random(5)
    calls: Counter[int] = Counter()
    some = [Some(n, rng.choice([0, 1, 150, 200, 201, 900, 9999, 20_000]), calls) for n in range(40)]
    files = DecodedFiles(tmp_path, memory=1000)

    def work(seed: int) -> None:
        chosen = random.Random(seed)
        for _ in range(300):
            ask(files, chosen.choice(some))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = [f for f in files._files.values() if f.view is not None]
    assert {id(f.slab) for f in kept if f.slab} <= set(map(id, files._slabs))
    assert sum(slab.nbytes for slab in files._slabs) <= 3 << 14
    assert sum(len(f.view or b"") for f in kept if f.slab is None) <= 1000


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """A file of 192 MiB is streamed: what is ours and not a file's stays small."""
    nbytes = 192 << 20
    (tmp_path / "0.z").write_bytes(zlib.compress(bytes(nbytes), 1))
    files = DecodedFiles(tmp_path)
    before = _anonymous()
    found = files.get(0, Unzip("0.z", piece=1 << 10), nbytes, tmp_path / "0.z")
    assert not np.frombuffer(found, np.uint8)[:: 1 << 12].any()
    assert _anonymous() - before < 16 << 20


def _anonymous() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("RssAnon:")[1].split()[0]) << 10


def test_files_compare_by_what_they_are(plain: Manifest) -> None:
    assert replace(plain.files[0]) == plain.files[0]
    assert File("a", 1) != File("a", 1, Unzip("a"))


# -- going on after a kill ------------------------------------------------------------------------


def interrupted(source: Manifest, target: Path, after: int) -> None:
    """Convert, and interrupt it when some bytes have been moved."""
    moved = 0

    def progress(nbytes: int) -> None:
        nonlocal moved
        moved += nbytes
        if moved > after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reshard.convert(source, target, WANTED, Options(sync=False, workers=1, progress=progress))


@pytest.fixture
def halfway(
    plain: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Manifest, Path]:
    """A conversion of encoded files that was interrupted, and its target."""
    monkeypatch.setattr(record, "UNIT", 20_000)
    monkeypatch.setattr(work, "SHARE", 6_000)
    source = encode(plain, tmp_path / "encoded")
    interrupted(source, tmp_path / "target", after=sum(plain.nbytes.values()) // 2)
    return source, tmp_path / "target"


def test_a_killed_conversion_goes_on(
    halfway: tuple[Manifest, Path], plain: Manifest, tmp_path: Path
) -> None:
    source, target = halfway
    done = convert(source, target)
    assert done.resumed_bytes
    convert(plain, tmp_path / "undisturbed")
    assert contents(target) == contents(tmp_path / "undisturbed")


def test_a_stored_file_that_has_changed_is_never_mixed(
    halfway: tuple[Manifest, Path], tmp_path: Path
) -> None:
    source, target = halfway
    path = tmp_path / "encoded" / "0.z"
    path.write_bytes(path.read_bytes())  # the same bytes, and other marks
    assert convert(source, target).resumed_bytes == 0
