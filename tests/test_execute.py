"""How bytes are moved: casts, proofs, threads, files, and what goes wrong with each of them."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from oracle import Arrays, Side

from reshard import execute as execute_module
from reshard import source as source_module
from reshard import work
from reshard.digest import CRC32, CRC64NVME
from reshard.dtypes import dtype, from_numpy
from reshard.errors import (
    CorruptError,
    InconsistentError,
    NotFoundError,
    RequestError,
    TargetError,
)
from reshard.execute import LEAST_MEMORY, Options, Result, execute, in_threads
from reshard.layout import Entry, FlatSpace, Layout, TensorKey
from reshard.manifest import Manifest
from reshard.partition import Contiguous, Partition, PerTensor, Replicated
from reshard.plan import Plan
from reshard.ruler import ints
from reshard.source import Mapped, Read, SourceFiles, way_to_read
from reshard.store import EntryStore, File, Regions
from reshard.targets import TargetFiles

KEY: TensorKey = ("w", "param")


def side(arrays: Arrays, rule: Partition, copies: int = 1) -> Side:
    """Each state a space of its own, perhaps several times."""
    spaces = []
    for state in dict.fromkeys(s for _, s in arrays):
        some = {n: a for (n, s), a in arrays.items() if s == state}
        entries = tuple(Entry(n, a.shape) for n, a in some.items())
        kind = from_numpy(next(iter(some.values())).dtype)
        spaces += [FlatSpace(f"{state}{c}", entries, rule, {state: kind}) for c in range(copies)]
    return Side(Layout(tuple(spaces), {"shard": rule.world})).lay_plainly()


def checked(of: Side, algorithm=CRC64NVME, contents=None) -> Regions:
    """A region a file."""
    rows = []
    for file, nbytes in enumerate(of.sizes):
        value = None if contents is None else algorithm.of(bytes(contents[file]))
        rows.append((file, 0, nbytes, value, f"chunk {file}"))
    return Regions.of(algorithm.name, rows)


class Conversion:
    """A source on disk, a target to be, and their truth."""

    def __init__(self, tmp_path: Path, rng, arrays: Arrays, **how) -> None:
        self.folder = tmp_path / "target"
        self.folder.mkdir()
        self.arrays = arrays
        self.before = side(arrays, how.get("before", PerTensor(3)), how.get("copies", 1))
        self.wanted: Arrays = how.get("wanted", arrays)
        self.after = side(self.wanted, how.get("after", Contiguous(2)))
        contents = self.before.write(tmp_path / "source", arrays, rng)
        regions = checked(self.before, how.get("algorithm", CRC64NVME), contents)
        self.source = self.before.manifest(tmp_path / "source", regions)
        self.target = self.after.manifest(self.folder, checked(self.after))

    def damage(self, file: int, byte: int) -> Path:
        path = self.source.path(file)
        data = bytearray(path.read_bytes())
        data[byte] ^= 1
        path.write_bytes(data)
        return path

    def run(self, *, check: bool = True, plan: Plan | None = None, **options: Any) -> Result:
        plan = plan or Plan(self.source, self.target)
        options = {"sync": False, "workers": 2, **options}
        result = execute(plan, self.folder, Options(**options))
        if check:
            self.after.check(self.folder, self.wanted)
            assert result.digests == {
                k: CRC64NVME.of(np.ascontiguousarray(a).tobytes()) for k, a in self.wanted.items()
            }
        return result


@pytest.fixture
def numbers() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(40, 50)).astype(np.float32)


@pytest.fixture
def rng():
    import random

    return random.Random(0)


ways = pytest.mark.parametrize("read", ["map", "read"])


# -- casts ----------------------------------------------------------------------------------------

SPECIAL = [
    *(0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 6e-8, 5.96e-8, 65504.0, 65519.0, 1.0),
    *(1.00390625, 1.01171875, 2**-24, 2**-25, 1.17549435e-38, 3.3e38),
]


@ways
@pytest.mark.parametrize("kind", [np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)], ids=str)
def test_casts_are_those_of_numpy(tmp_path, rng, read, kind):
    values = np.array([v for v in SPECIAL if kind.name != "float16" or not 65519 < abs(v) < 1e39],
                      np.float32)  # fmt: skip
    random = np.random.default_rng(1).integers(0, 2**32, 5000, np.uint32).view(np.float32)
    tame = random[~np.isfinite(random) | (np.abs(random) < 6e4)]
    given: Arrays = {KEY: np.concatenate([values, tame])}
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = {KEY: given[KEY].astype(kind)}
    work_ = Conversion(tmp_path, rng, given, wanted=wanted, after=PerTensor(4))
    work_.run(plan=Plan(work_.source, work_.target, casts={KEY}), read=read)


@pytest.mark.parametrize(
    ("kind", "value"),
    [("float16", 65520.0), ("float16", -1e30), ("bfloat16", 3.4e38)],
)
def test_a_cast_that_overflows_is_refused(tmp_path, rng, numbers, kind, value):
    numbers[7, 7] = value
    wanted = {KEY: np.zeros_like(numbers, dtype=dtype(kind).numpy)}
    work_ = Conversion(tmp_path, rng, {KEY: numbers}, wanted=wanted)
    with pytest.raises(RequestError, match="param:w holds .* too large for " + kind):
        work_.run(plan=Plan(work_.source, work_.target, casts={KEY}))


def test_a_cast_to_a_wider_type(tmp_path, rng):
    values = np.random.default_rng(2).integers(0, 2**16, 3000, np.uint16)
    half = values.view(ml_dtypes.bfloat16).reshape(30, 100)
    wanted = {KEY: half.astype(np.float32)}
    work_ = Conversion(tmp_path, rng, {KEY: half}, wanted=wanted)
    work_.run(plan=Plan(work_.source, work_.target, casts={KEY}))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("algorithm", [CRC32, CRC64NVME], ids=lambda a: a.name)
def test_a_transposed_tensor(tmp_path, rng, numbers, kind, algorithm, monkeypatch):
    """Much larger than what is moved at once; its region is checked, too."""
    monkeypatch.setattr(Options, "step", 1 << 10)
    monkeypatch.setattr(work, "SHARE", 3000)
    wanted = {KEY: numbers.astype(dtype(kind).numpy)}
    work_ = Conversion(tmp_path, rng, {KEY: numbers}, wanted=wanted, before=Contiguous(1),
                       algorithm=algorithm)  # fmt: skip
    work_.source.path(0).write_bytes(numbers.T.tobytes())
    strided = EntryStore(ints([0]), ints([0]), ((1, 40),))
    value = algorithm.of(numbers.T.tobytes())

    def source(value: int) -> Manifest:
        regions = Regions.of(algorithm.name, [(0, 0, numbers.nbytes, value, "storage")])
        layout, files = work_.source.layout, work_.source.files
        stores = {("param0", "param"): strided}
        return Manifest("x", work_.source.root, layout, files, stores, regions=regions)

    casts: set[TensorKey] = {KEY} if kind != "float32" else set()
    assert work_.run(plan=Plan(source(value), work_.target, casts=casts)).regions_checked == 1
    with pytest.raises(CorruptError, match="storage has the checksum"):
        work_.run(plan=Plan(source(value ^ 1), work_.target, casts=casts))


# -- proofs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [CRC32, CRC64NVME], ids=lambda a: a.name)
def test_damage_is_named(tmp_path, rng, numbers, algorithm):
    work_ = Conversion(tmp_path, rng, {KEY: numbers}, algorithm=algorithm)
    assert work_.run().regions_checked == 3
    path = work_.damage(1, 77)
    with pytest.raises(CorruptError, match=r"chunk 1 has the checksum [0-9a-f]+, but") as error:
        work_.run()
    assert error.value.where == str(path)
    assert "use another copy" in str(error.value)
    assert work_.run(check=False, verify=False).regions_checked == 0


def test_what_is_read_whole_is_not_read_again(tmp_path, rng, numbers, monkeypatch):
    """Also where a master is cut for two replicas and proves the weights besides."""
    monkeypatch.setattr(execute_module, "check_region", None)
    weights = numbers.astype(ml_dtypes.bfloat16)
    arrays = {("w", "master"): numbers, KEY: weights}
    work_ = Conversion(tmp_path, rng, arrays, before=PerTensor(8), copies=2)
    proofs = [(KEY, ("w", "master"))]
    result = work_.run(plan=Plan(work_.source, work_.target, proofs=proofs))
    assert result.regions_checked == 32


def test_what_is_read_in_part_is_read_again(tmp_path, rng, numbers):
    """A region with a tensor that nobody asked for."""
    arrays = {KEY: numbers, ("v", "param"): numbers[:3]}
    work_ = Conversion(tmp_path, rng, arrays, wanted={KEY: numbers})
    assert work_.run().regions_checked == 3
    byte = work_.before.places["param0", "param", 1][0]  # of v
    work_.damage(*byte)
    with pytest.raises(CorruptError, match=f"chunk {byte[0]} has the checksum"):
        work_.run()


@pytest.mark.parametrize("replica", [0, 1, 2])
def test_replicas_must_be_equal_unless_the_first_counts(tmp_path, rng, numbers, replica):
    work_ = Conversion(tmp_path, rng, {KEY: numbers}, copies=3, before=Contiguous(1))
    bare = work_.before.manifest(work_.source.root)
    work_.run(plan=Plan(bare, work_.target))
    work_.damage(replica, 5)
    with pytest.raises(InconsistentError, match="param:w is stored several times, and its copies"):
        work_.run(plan=Plan(bare, work_.target))
    work_.run(plan=Plan(bare, work_.target, replicas="first"), check=replica > 0)


@pytest.mark.parametrize("kept", ["master", "param"])
def test_weights_must_be_the_rounding_of_their_masters(tmp_path, rng, numbers, kept):
    weights = numbers.astype(ml_dtypes.bfloat16)
    arrays = {("w", "master"): numbers, KEY: weights}
    wanted = {("w", kept): arrays["w", kept]}
    work_ = Conversion(tmp_path, rng, arrays, wanted=wanted, before=Contiguous(1))
    bare = work_.before.manifest(work_.source.root)
    proofs = [(KEY, ("w", "master"))]
    work_.run(plan=Plan(bare, work_.target, proofs=proofs))
    work_.damage(1, 5)
    with pytest.raises(InconsistentError, match="param:w isn't master:w rounded to its type"):
        work_.run(plan=Plan(bare, work_.target, proofs=proofs))


def test_masters_beyond_the_weights_range_prove_infinite_weights(tmp_path, rng, numbers):
    numbers[3, 3] = 1e6
    with np.errstate(over="ignore"):
        weights = numbers.astype(np.float16)
    arrays = {("w", "master"): numbers, KEY: weights}
    work_ = Conversion(tmp_path, rng, arrays)
    work_.run(plan=Plan(work_.source, work_.target, proofs=[(KEY, ("w", "master"))]))


# -- files ----------------------------------------------------------------------------------------


@ways
def test_files_without_payload_and_tensors_without_elements(tmp_path, rng, read):
    empty = {("a", "param"): np.zeros((0, 3), np.float32), ("b", "param"): np.ones((), np.float32)}
    work_ = Conversion(tmp_path, rng, empty, before=PerTensor(3), after=PerTensor(5))
    files = (*work_.target.files, File("more/header.bin", 10), File("more/nothing", 0))
    target = Manifest("x", work_.folder, work_.target.layout, files, work_.target.stores)
    source_files = (*work_.source.files, File("f/empty", 0))
    (work_.source.root / "f/empty").touch()
    source = Manifest(
        "x", work_.source.root, work_.source.layout, source_files, work_.source.stores
    )
    work_.run(plan=Plan(source, target), read=read)
    assert (work_.folder / "more/header.bin").read_bytes() == bytes(10)
    assert (work_.folder / "more/nothing").read_bytes() == b""


@ways
def test_a_file_without_bytes_can_be_opened(tmp_path, read):
    (tmp_path / "empty").touch()
    made = Manifest("x", tmp_path, Layout((), {}), (File("empty", 0),), {})
    files = SourceFiles(made)
    fetcher = Mapped(files) if read == "map" else Read(files, 8)
    assert bytes(fetcher.fetch(0, 0, 0)) == b""
    fetcher.release(0, 0, 0)
    with pytest.raises(CorruptError, match="ends at byte 0; 1 more were expected"):
        fetcher.fetch(0, 0, 1)


@ways
def test_more_files_than_are_kept_open(tmp_path, rng, read):
    """And none stays open."""
    many = 3 * source_module.OPEN_FILES
    arrays = {("w", "param"): np.arange(many * 2, dtype=np.int32)}
    work_ = Conversion(tmp_path, rng, arrays, before=PerTensor(many), after=Contiguous(3))
    before = os.listdir("/proc/self/fd")
    most = 0

    def count(_: int) -> None:
        nonlocal most
        most = max(most, len(os.listdir("/proc/self/fd")))

    work_.run(read=read, progress=count)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert most <= len(before) + 3 * source_module.OPEN_FILES + 8


def test_mappings_in_use_do_not_add_up(tmp_path, rng, monkeypatch):
    """Neighbouring bytes of the target out of a thousand files, with few files to be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(source_module, "OPEN_FILES", 16)
    monkeypatch.setattr(execute_module, "OPEN_FILES", 16)
    arrays = {("w", "param"): np.arange(1000, dtype=np.int32)}
    work_ = Conversion(tmp_path, rng, arrays, before=PerTensor(1000), after=Contiguous(2))
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 80, hard))
    try:
        work_.run(read="map", workers=4)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_source_that_changes_is_noticed(tmp_path, rng, numbers):
    work_ = Conversion(tmp_path, rng, {KEY: numbers})
    path = work_.source.path(1)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptError, match=r"has \d+ bytes and had \d+ when it was opened"):
        work_.run()
    path.unlink()
    with pytest.raises(NotFoundError, match="the file is gone"):
        work_.run()


def test_each_file_is_finished_once(tmp_path, rng, numbers, monkeypatch):
    """Two files and eight workers, who must share them."""
    monkeypatch.setattr(work, "SHARE", 100)
    synced: Counter[str] = Counter()
    flush = os.fsync

    def fsync(fd: int) -> None:
        synced[os.readlink(f"/proc/self/fd/{fd}")] += 1
        flush(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    work_ = Conversion(tmp_path, rng, {KEY: numbers})
    work_.run(workers=8, sync=True)
    assert synced == {str(work_.folder / f.path): 1 for f in work_.target.files}


def test_a_finished_file_is_not_made_again(tmp_path):
    targets = TargetFiles(tmp_path, [File("a", 4)], sync=False)
    targets.write(0, [memoryview(b"abcd")], 0)
    targets.finish(0)
    with pytest.raises(AssertionError, match="file 0 is finished"):
        targets.write(0, [memoryview(b"abcd")], 0)
    assert (tmp_path / "a").read_bytes() == b"abcd"


def test_partial_writes_are_continued(tmp_path, rng, numbers, monkeypatch):
    gather, write = os.pwritev, os.pwrite
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: gather(fd, [b"".join(parts)[:37]], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:11], at))
    Conversion(tmp_path, rng, {KEY: numbers}).run()


def test_partial_reads_are_continued(tmp_path, rng, numbers, monkeypatch):
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: read(fd, [parts[0][:37]], at))
    Conversion(tmp_path, rng, {KEY: numbers}).run(read="read")


@pytest.mark.parametrize(
    ("number", "match"), [(28, "no space left"), (30, "can't be written"), (5, "can't be written")]
)
def test_a_target_that_cannot_be_written(tmp_path, rng, numbers, monkeypatch, number, match):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    work_ = Conversion(tmp_path, rng, {KEY: numbers})
    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(TargetError, match=match) as error:
        work_.run()
    assert error.value.where is not None
    assert error.value.where.startswith(str(work_.folder))


def test_a_source_that_cannot_be_read(tmp_path, rng, numbers, monkeypatch):
    def fail(*_):
        raise OSError(5, os.strerror(5))

    work_ = Conversion(tmp_path, rng, {KEY: numbers})
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CorruptError, match="can't be read: Input/output error"):
        work_.run(read="read")


@pytest.mark.parametrize(
    ("mounts", "way"),
    [
        ("/dev/sda / ext4 rw\n", "map"),
        ("/dev/sda / ext4 rw\nhost:/x /data nfs4 rw\n", "read"),
        ("host:/x / nfs4 rw\n/dev/sda /data xfs rw\n", "map"),
        ("host:/x /dat lustre rw\n/dev/sda / ext4 rw\n", "map"),
        ("/dev/sda / ext4 rw\ns3 /data fuse.s3fs rw\n", "read"),
    ],
)
def test_network_file_systems_are_not_mapped(monkeypatch, mounts, way):
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: mounts)
    assert way_to_read(Path("/data/checkpoint")) == way


# -- threads --------------------------------------------------------------------------------------


class BrokenError(Exception):
    """What a test raises in a worker."""


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "zreshard"]


def large(tmp_path: Path, rng, monkeypatch) -> Conversion:
    """A conversion of hundreds of shares."""
    monkeypatch.setattr(work, "SHARE", 100)
    return Conversion(tmp_path, rng, {KEY: np.zeros((100, 100), np.float32)})


@pytest.mark.parametrize("workers", [1, 4])
def test_a_worker_that_fails_stops_the_others(tmp_path, rng, monkeypatch, workers):
    number, calls = itertools.count(1), []

    def fail(nbytes: int) -> None:
        calls.append(nbytes)
        if next(number) == 3:
            raise BrokenError
        time.sleep(0.01)

    work_ = large(tmp_path, rng, monkeypatch)
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BrokenError):
        work_.run(workers=workers, progress=fail)
    assert len(calls) < 3 + 2 * workers
    assert threads() == []
    assert len(os.listdir("/proc/self/fd")) == fds


def test_the_first_of_several_errors_is_raised():
    stop, barrier = threading.Event(), threading.Barrier(3)

    def fail(seconds: float) -> None:
        barrier.wait()
        time.sleep(seconds)
        raise BrokenError(str(seconds))

    with pytest.raises(BrokenError, match=r"0\.0"):
        in_threads([lambda s=s: fail(s) for s in (0.4, 0.0, 0.2)], stop)
    assert stop.is_set()


@pytest.mark.parametrize("workers", [1, 3])
def test_an_interrupt_stops_all_workers(tmp_path, rng, monkeypatch, workers):
    """Control-C reaches the main thread while it waits for the workers."""
    number, calls = itertools.count(1), []

    def interrupt(nbytes: int) -> None:
        calls.append(nbytes)
        if next(number) in (3, 4):  # the second one of a hasty user, too
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.02)

    work_ = large(tmp_path, rng, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        work_.run(workers=workers, progress=interrupt)
    patience = time.monotonic() + 60
    while threads() and time.monotonic() < patience:
        time.sleep(0.01)  # the second interrupt may have ended the wait that the first one began
    assert threads() == []
    assert len(calls) < 200  # of 400


def test_workers_without_a_file_help(tmp_path, rng, monkeypatch):
    """One file, four workers: all of them move some of it."""
    names = set()
    together = threading.Barrier(4)

    def meet(_: int) -> None:
        if threading.get_ident() not in names:
            names.add(threading.get_ident())
            together.wait(timeout=60)

    monkeypatch.setattr(work, "SHARE", 100)
    arrays: Arrays = {KEY: np.zeros((100, 100), np.float32)}
    work_ = Conversion(tmp_path, rng, arrays, after=Replicated(2))
    work_.run(workers=4, progress=meet)
    assert len(names) == 4


# -- options --------------------------------------------------------------------------------------


def test_options_are_checked():
    with pytest.raises(RequestError, match="0 workers; at least 1 is needed"):
        Options(workers=0)
    with pytest.raises(RequestError, match="memory limit of 1000 bytes is too small"):
        Options(max_memory=1000)


@pytest.mark.parametrize("workers", [1, 2, 7, 16, 100])
@pytest.mark.parametrize("memory", [LEAST_MEMORY, 20 << 20, 64 << 20, 1 << 40])
def test_buffers_fit_the_memory(workers, memory):
    step = Options(workers=workers, max_memory=memory).step
    assert step % 4096 == 0
    assert LEAST_MEMORY // 2 + 4 * workers * step <= memory
