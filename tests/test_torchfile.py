"""Do we read what torch wrote, does torch read what we wrote, and is every damage noticed?"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import io
import math
import os
import pickle
import random
import struct
import types
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import reshard.torchfile_write
from reshard.digest import CRC32
from reshard.errors import CorruptError, NotFoundError, ReshardError, UnsafeError, UnsupportedError
from reshard.pickle_write import Call, Global, dump_pickle
from reshard.pickles import Device, DTypeName, Record, Size, StorageRef, StoredTensor
from reshard.torchfile import TorchFile, open_torch_file, read_tensor
from reshard.torchfile_write import TorchZipLayout, write_torch_file

torch = pytest.importorskip("torch")

DTYPES = [
    "float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8",
    "uint16", "uint32", "uint64", "bool", "complex64", "complex128", "float8_e4m3fn",
    "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip
LOADS: list[dict[str, Any]] = [
    dict(weights_only=True),
    dict(weights_only=True, mmap=True),
    dict(weights_only=False),
]
ONE_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def tensor_bytes(tensor: Any) -> bytes:
    """Elements of a torch tensor, row-major, for any dtype."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.view(tensor.shape).copy_(tensor.detach())
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Any:
    """Any bits that the dtype can hold, NaNs with payloads among them."""
    kind = getattr(torch, dtype)
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=kind)
    high = 2 if dtype == "bool" else 256
    bits = np.random.default_rng(seed).integers(0, high, count * kind.itemsize, np.uint8)
    return torch.from_numpy(bits).view(kind).reshape(shape)


def assert_same(ours: TorchFile, value: Any, theirs: Any) -> None:
    """Compare a value of ours with torch's, tensors by their bits."""
    if type(theirs).__name__ == "DTensor":
        assert isinstance(value, Record)
        assert value.qualname == "torch.distributed.tensor.DTensor"
        assert_same(ours, value.fields["_local_tensor"], theirs._local_tensor)
    elif isinstance(theirs, torch.Tensor):
        assert isinstance(value, StoredTensor)
        assert value.shape == tuple(theirs.shape)
        assert value.strides == tuple(theirs.stride())
        assert value.dtype == str(theirs.dtype).removeprefix("torch.")
        assert value.requires_grad == theirs.requires_grad
        array = read_tensor(ours, value)
        assert array.shape == value.shape
        assert array.tobytes() == tensor_bytes(theirs)
    elif isinstance(theirs, torch.Size):
        assert value == tuple(theirs)
    elif isinstance(theirs, torch.dtype | torch.device):
        assert value == str(theirs).removeprefix("torch.")
    elif isinstance(theirs, dict):
        assert list(value) == list(theirs)
        for key in theirs:
            assert_same(ours, value[key], theirs[key])
    elif isinstance(theirs, list | tuple) and type(theirs) in (list, tuple):
        assert len(value) == len(theirs)
        for one, other in zip(value, theirs, strict=True):
            assert_same(ours, one, other)
    elif type(theirs) in (int, float, str, bool, bytes, type(None), set):
        assert type(value) is type(theirs)
        assert value == theirs or value != value
    else:
        assert isinstance(value, Record)


# ------------------------------------------------------------------ reading torch's files

TENSORS = st.builds(
    random_tensor,
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.integers(0, 9),
).flatmap(
    lambda t: st.sampled_from(
        [
            t,
            t.reshape(-1)[1:],
            t.reshape(-1)[::2],
            t.T if t.ndim == 2 else t,
            t.expand(2, *t.shape),
            t.clone(),
        ]
    )
)
LEAVES = st.one_of(
    TENSORS,
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats()),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.sampled_from([torch.bfloat16, torch.Size((2, 3)), torch.device("cpu")]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(collections.OrderedDict),
    ),
    max_leaves=8,
)


@ONE_FOLDER
@given(VALUES)
def test_random_values_of_torch_are_read(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "random.pt"
    torch.save(value, path)
    ours = open_torch_file(path)
    assert ours.opaque == ()
    assert_same(ours, ours.value, value)


@ONE_FOLDER
@given(VALUES)
def test_random_values_go_round(tmp_path: Path, value: Any) -> None:
    """What torch wrote and we read, we write and torch reads."""
    first, second = tmp_path / "first.pt", tmp_path / "second.pt"
    torch.save([value, value], first)
    ours = open_torch_file(first)
    copy(ours, second)
    assert_same(open_torch_file(second), ours.value, [value, value])
    for options in LOADS:
        loaded = torch.load(second, **options)
        assert_same(ours, ours.value, loaded)


def copy(file: TorchFile, path: Path) -> None:
    """Write a file anew: its payload first, then what ``finish`` adds."""
    storages = [(key, member.nbytes) for key, member in file.members.items()]
    layout = TorchZipLayout(file.value, storages)
    source = file.path.read_bytes()
    with path.open("wb") as out:
        for key, member in file.members.items():
            payload = source[member.offset : member.offset + member.nbytes]
            os.pwrite(out.fileno(), payload, layout.offset(key))
        layout.finish(out.fileno(), {key: one.crc32 for key, one in file.members.items()})
    assert path.stat().st_size == layout.nbytes


def test_parameters_and_subclasses_are_their_tensors(tmp_path: Path) -> None:
    tagged = torch.arange(3.0)
    tagged.ds_id = 7
    parameter = torch.nn.Parameter(torch.arange(4.0))
    with_state = torch.nn.Parameter(torch.arange(4.0))
    with_state.tag = "x"
    frozen = torch.nn.Parameter(torch.arange(4), requires_grad=False)
    torch.save([tagged, parameter, with_state, frozen], tmp_path / "p.pt")
    ours = open_torch_file(tmp_path / "p.pt")
    assert ours.opaque == ()
    assert_same(ours, ours.value, [tagged, parameter, with_state, frozen])


def test_conjugated_tensors_are_refused(tmp_path: Path) -> None:
    torch.save(torch.ones(2, dtype=torch.complex64).conj(), tmp_path / "c.pt")
    with pytest.raises(UnsupportedError, match="resolve_conj"):
        open_torch_file(tmp_path / "c.pt")


def test_views_share_a_storage(tmp_path: Path) -> None:
    flat = torch.arange(10.0)
    torch.save(
        {"flat": flat, "part": flat[3:7].view(2, 2), "t": flat.view(2, 5).T}, tmp_path / "v.pt"
    )
    ours = open_torch_file(tmp_path / "v.pt")
    assert list(ours.members) == ["0"]
    part = ours.extent(ours.value["part"])
    assert part.offset == ours.members["0"].offset + 12
    assert (part.strides, part.nbytes, part.contiguous) == ((8, 4), 16, True)
    turned = ours.extent(ours.value["t"])
    assert (turned.strides, turned.nbytes, turned.contiguous) == ((4, 20), 40, False)


def test_opening_reads_no_payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "many.pt"
    torch.save({f"layer.{i}": torch.ones(1000) for i in range(1000)}, path)
    read = 0
    pread = os.pread

    def counting(fd: int, count: int, offset: int) -> bytes:
        nonlocal read
        data = pread(fd, count, offset)
        read += len(data)
        return data

    monkeypatch.setattr(os, "pread", counting)
    ours = open_torch_file(path)
    assert len(ours.members) == 1000
    assert read < 0.15 * path.stat().st_size
    monkeypatch.undo()
    last = ours.value["layer.999"]
    assert read_tensor(ours, last).tolist() == [1.0] * 1000


def test_a_file_inside_another(tmp_path: Path) -> None:
    blobs = []
    for i in range(3):
        out = io.BytesIO()
        torch.save(torch.full((5,), float(i)), out)
        blobs.append(out.getvalue())
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(b"head" + b"".join(blobs) + b"tail")
    at = 4
    for i, blob in enumerate(blobs):
        ours = open_torch_file(path, offset=at, length=len(blob))
        extent = ours.extent(ours.value)
        raw = path.read_bytes()[extent.offset : extent.offset + extent.nbytes]
        assert np.frombuffer(raw, "<f4").tolist() == [float(i)] * 5
        assert read_tensor(ours, ours.value).tolist() == [float(i)] * 5
        with pytest.raises(CorruptError, match=f"at byte {at}"):
            open_torch_file(path, offset=at, length=len(blob) - 1)
        at += len(blob)
    for offset, length in ((0, len(blobs[0])), (at, 4), (at, 10**9), (-1, 4)):
        with pytest.raises(CorruptError, match="__0_0"):
            open_torch_file(path, offset=offset, length=length)


# ------------------------------------------------------------------ real checkpoints


def sample(files: list[Path], count: int) -> list[Path]:
    return sorted(random.Random(0).sample(files, min(count, len(files))))


def real_files(fixtures_dir: Path, folder: str) -> list[Path]:
    files = sorted((fixtures_dir / folder).rglob("*.pt"))
    assert files, f"no .pt files in {folder}"
    return files


class StubUnpickler(pickle.Unpickler):
    """torch's side: classes that aren't installed hold nothing."""

    def find_class(self, module: str, name: str, /) -> Any:
        if module.startswith("deepspeed."):
            return Stub
        return super().find_class(module, name)


class Stub:
    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


StubPickle = types.SimpleNamespace(__name__="pickle", Unpickler=StubUnpickler)


@pytest.mark.parametrize("folder", ["deepspeed", "dcp"])
def test_every_real_file_opens(fixtures_dir: Path, folder: str) -> None:
    known = ("deepspeed.", "torch.distributed.", "torch._utils._rebuild_wrapper_subclass")
    for path in real_files(fixtures_dir, folder):
        ours = open_torch_file(path)
        assert all(name.startswith(known) for name in ours.opaque)
        stored = {tensor.storage.key for tensor in tensors_of(ours.value)}
        assert stored <= set(ours.members)


@pytest.mark.parametrize("folder", ["deepspeed", "dcp"])
def test_real_tensors_have_torchs_bits(fixtures_dir: Path, folder: str) -> None:
    files = real_files(fixtures_dir, folder)
    small = [path for path in files if path.parent.parent.name == "zero"]
    large = [path for path in files if path not in small]
    for path in sample(large, 40) + sample(small, 40):
        ours = open_torch_file(path)
        if any(name.startswith("torch.distributed._shard.") for name in ours.opaque):
            continue  # torch loads them only inside a running job
        theirs = torch.load(path, weights_only=False, pickle_module=StubPickle)
        assert_same(ours, ours.value, theirs)


def tensors_of(value: Any) -> Iterator[StoredTensor]:
    if isinstance(value, StoredTensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_of(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_of(one)


# ------------------------------------------------------------------ writing


@pytest.mark.parametrize("options", LOADS, ids=str)
def test_torch_reads_every_dtype(tmp_path: Path, options: dict[str, Any]) -> None:
    from reshard.dtypes import dtype as dtype_of

    path = tmp_path / "dtypes.pt"
    tensors = {
        f"{name} {shape}": random_tensor(name, shape, 3)
        for name in DTYPES
        for shape in ((), (0,), (3, 0), (1,), (2, 3, 5))
    }
    arrays = {
        name: np.frombuffer(tensor_bytes(tensor), dtype_of(name.split()[0]).numpy).reshape(
            tuple(tensor.shape)
        )
        for name, tensor in tensors.items()
    }
    write_torch_file(path, {"model": arrays, "step": 3})
    loaded = torch.load(path, **options)
    assert loaded["step"] == 3
    for name, tensor in tensors.items():
        found = loaded["model"][name]
        assert (found.dtype, found.shape, found.stride()) == (
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
        )
        assert tensor_bytes(found) == tensor_bytes(tensor)


@pytest.mark.parametrize("options", LOADS, ids=str)
def test_torch_reads_views_of_one_storage(tmp_path: Path, options: dict[str, Any]) -> None:
    storage = StorageRef("0", "bfloat16", 12)
    value = collections.OrderedDict(
        whole=StoredTensor(storage, 0, (12,), (1,), "bfloat16"),
        turned=StoredTensor(storage, 0, (4, 3), (1, 4), "bfloat16"),
        part=StoredTensor(storage, 5, (3,), (2,), "bfloat16", requires_grad=True),
        one=StoredTensor(storage, 11, (), (), "bfloat16"),
        spread=StoredTensor(storage, 2, (2, 3), (1, 0), "bfloat16"),
        none=StoredTensor(storage, 0, (0,), (1,), "bfloat16"),
    )
    layout = TorchZipLayout(value, [("0", 24)])
    reference = torch.arange(12).to(torch.bfloat16)
    payload = tensor_bytes(reference)
    path = tmp_path / "views.pt"
    with path.open("wb") as out:
        out.write(b"\0" * layout.nbytes)
        out.flush()
        os.pwrite(out.fileno(), payload, layout.offset("0"))
        layout.finish(out.fileno(), {"0": CRC32.of(payload)})
    loaded = torch.load(path, **options)
    for name, tensor in value.items():
        expected = reference.as_strided(tensor.shape, tensor.strides, tensor.offset)
        assert torch.equal(loaded[name], expected)
        assert loaded[name].requires_grad == tensor.requires_grad
        assert loaded[name].untyped_storage().data_ptr() == loaded["whole"].data_ptr()
    loaded["whole"].detach()[7] = 99
    assert loaded["part"][1] == 99


def test_our_bytes_are_torchs_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one pickle the file is torch's, but for the serialization id and its checksum."""
    theirs, ours = tmp_path / "theirs.pt", tmp_path / "ours.pt"
    value = {
        "a": torch.arange(10.0),
        "b": torch.zeros(0),
        "c": torch.arange(7, dtype=torch.int8),
        "d": [random_tensor("bfloat16", (i,), i) for i in range(1, 70)],
    }
    torch.save(value, theirs)
    with zipfile.ZipFile(theirs) as archive:
        pickled = archive.read("theirs/data.pkl")
    monkeypatch.setattr(reshard.torchfile_write, "dump_pickle", lambda *_, **__: pickled)
    file = open_torch_file(theirs)
    layout = TorchZipLayout(
        None, [(key, member.nbytes) for key, member in file.members.items()], name="theirs"
    )
    source = theirs.read_bytes()
    with ours.open("wb") as out:
        for key, member in file.members.items():
            assert layout.offset(key) == member.offset
            payload = source[member.offset : member.offset + member.nbytes]
            os.pwrite(out.fileno(), payload, member.offset)
        layout.finish(out.fileno(), {key: one.crc32 for key, one in file.members.items()})
    assert blank_id(ours) == blank_id(theirs)


def blank_id(path: Path) -> bytes:
    """A file's bytes with the serialization id and its two checksums zeroed."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        info = next(i for i in archive.infolist() if i.filename.endswith("serialization_id"))
        crc = struct.pack("<I", info.CRC)
    at = data.find(archive.namelist()[-1].encode(), info.header_offset)
    data = data.replace(crc, b"\0" * 4)
    end = data.find(b"PK\7\10", at)
    data[end - 40 : end] = b"0" * 40
    return bytes(data)


@pytest.mark.parametrize("calculate", [False, True])
def test_sparse_zip64(tmp_path: Path, calculate: bool) -> None:
    """Sizes and offsets above 4 GiB, in a file of holes; torch's own layout is the judge."""
    big = (1 << 32) + 4096
    layout = TorchZipLayout(
        {
            "small": StoredTensor.whole("0", "int32", (3,)),
            "big": StoredTensor.whole("1", "uint8", (big,)),
            "after": StoredTensor.whole("2", "float32", (5,)),
            "empty": StoredTensor.whole("3", "float32", (0,)),
            "last": StoredTensor.whole("4", "float16", (2, 2)),
        },
        [("0", 12), ("1", big), ("2", 20), ("3", 0), ("4", 8)],
        name="big",
    )
    path = tmp_path / "big.pt"
    after, last = np.arange(5, dtype="<f4").tobytes(), np.arange(4, dtype="<f2").tobytes()
    with path.open("wb") as out:
        try:
            out.truncate(layout.nbytes)
        except OSError:
            pytest.skip("the file system has no room for a sparse file of 4 GiB")
        fd = out.fileno()
        os.pwrite(fd, np.arange(3, dtype="<i4").tobytes(), layout.offset("0"))
        os.pwrite(fd, after, layout.offset("2"))
        os.pwrite(fd, last, layout.offset("4"))
        crcs = {"0": CRC32.of(np.arange(3, dtype="<i4").tobytes()), "1": 1, "4": CRC32.of(last)}
        layout.finish(fd, {**crcs, "2": CRC32.of(after)})
    try:
        if path.stat().st_blocks * 512 > 1 << 20:
            pytest.skip("the file system has no sparse files")
        ours = open_torch_file(path)
        assert ours.members["1"].nbytes == big
        assert ours.members["2"].offset > 1 << 32
        assert read_tensor(ours, ours.value["after"]).tolist() == [0, 1, 2, 3, 4]
        config: Any = importlib.import_module("torch.utils.serialization.config")
        with config.patch({"load.calculate_storage_offsets": calculate}):
            loaded = torch.load(path, mmap=True, weights_only=True)
        assert loaded["small"].tolist() == [0, 1, 2]
        assert loaded["after"].tolist() == [0, 1, 2, 3, 4]
        assert loaded["last"].tolist() == [[0, 1], [2, 3]]
        assert loaded["big"].shape == (big,)
        assert loaded["big"][-1] == 0
    finally:
        path.unlink()


def test_zip64_layout_is_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch lays a file out without writing its payload (``skip_data``)."""
    path = tmp_path / "big.pt"
    sizes = [10, (1 << 32) - 2, 6, 1 << 32, 0, 3]
    with torch.serialization.skip_data():
        torch.save([torch.empty(n, dtype=torch.uint8) for n in sizes], path)
    theirs = open_torch_file(path)
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        pickled = archive.read("big/data.pkl")
        begin = archive.start_dir
        file.seek(begin)
        directory = file.read()
        crc = archive.infolist()[-1].CRC
    path.unlink()
    monkeypatch.setattr(reshard.torchfile_write, "dump_pickle", lambda *_, **__: pickled)
    layout = TorchZipLayout(None, [(str(i), n) for i, n in enumerate(sizes)], name="big")
    assert {key: one.offset for key, one in theirs.members.items()} == {
        str(i): layout.offset(str(i)) for i in range(len(sizes))
    }
    written: dict[int, bytes] = {}
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, at: written.setdefault(at, bytes(data)) and len(data)
    )
    layout.finish(-1, {str(i): 0 for i in range(len(sizes))})
    ours = written[begin]
    assert layout.nbytes == begin + len(ours)
    with_id = struct.pack("<I", crc)
    at = directory.find(with_id)
    assert ours[:at] + with_id + ours[at + 4 :] == directory


def test_writing_is_deterministic(tmp_path: Path) -> None:
    value = {"w": np.arange(5.0), "names": {"x", "y", "z"}, "n": (1, "a", b"b")}
    write_torch_file(tmp_path / "one.pt", value, name="archive")
    write_torch_file(tmp_path / "two.pt", value, name="archive")
    one, two = (tmp_path / "one.pt").read_bytes(), (tmp_path / "two.pt").read_bytes()
    assert one == two
    value["w"] = np.arange(1.0, 6.0)
    write_torch_file(tmp_path / "two.pt", value, name="archive")
    other = (tmp_path / "two.pt").read_bytes()
    with zipfile.ZipFile(io.BytesIO(one)) as a, zipfile.ZipFile(io.BytesIO(other)) as b:
        assert a.read("archive/.data/serialization_id") != b.read("archive/.data/serialization_id")
        assert a.testzip() is None
        assert all(info.date_time == (1980, 0, 0, 0, 0, 0) for info in a.infolist())


def test_an_archive_can_begin_anywhere(tmp_path: Path) -> None:
    layout = TorchZipLayout(StoredTensor.whole("0", "float32", (4,)), [("0", 16)])
    payload = np.arange(4, dtype="<f4").tobytes()
    path = tmp_path / "outer"
    with path.open("wb") as out:
        for at in (0, 1000 + layout.nbytes):
            os.pwrite(out.fileno(), payload, at + layout.offset("0"))
            layout.finish(out.fileno(), {"0": CRC32.of(payload)}, at=at)
    ours = open_torch_file(path, offset=1000 + layout.nbytes)
    assert read_tensor(ours, ours.value).tolist() == [0, 1, 2, 3]
    data = path.read_bytes()
    assert data[: layout.nbytes] == data[1000 + layout.nbytes :]
    assert torch.load(io.BytesIO(data[: layout.nbytes])).tolist() == [0, 1, 2, 3]


def test_one_array_is_one_storage(tmp_path: Path) -> None:
    array = np.arange(6, dtype=">i4").reshape(2, 3).T
    write_torch_file(tmp_path / "a.pt", [array, {"again": array}, array.copy()])
    loaded = torch.load(tmp_path / "a.pt")
    assert loaded[0].tolist() == array.tolist()
    assert loaded[0].data_ptr() == loaded[1]["again"].data_ptr() != loaded[2].data_ptr()


def test_objects_that_torch_knows_are_read_by_it(tmp_path: Path) -> None:
    value = {
        "size": Size((2, 3)),
        "kind": DTypeName("bfloat16"),
        "devices": [Device("cpu"), Device("cuda:1")],
        "call": Call(Global("collections", "Counter"), ({"a": 2},)),
        "grad": dataclasses.replace(StoredTensor.whole("0", "float32", (0,)), requires_grad=True),
    }
    layout = TorchZipLayout(value, [("0", 0)])
    with (tmp_path / "o.pt").open("wb") as out:
        layout.finish(out.fileno(), {})
    loaded = torch.load(tmp_path / "o.pt", weights_only=True)
    assert loaded["size"] == torch.Size((2, 3))
    assert isinstance(loaded["size"], torch.Size)
    assert loaded["kind"] is torch.bfloat16
    assert loaded["devices"] == [torch.device("cpu"), torch.device("cuda", 1)]
    assert loaded["call"] == collections.Counter("aa")
    assert loaded["grad"].requires_grad


def test_a_layout_that_cannot_be() -> None:
    tensor = StoredTensor.whole("0", "float32", (4,))
    for storages in ([], [("1", 16)], [("0", 15)], [("0", 16), ("0", 16)], [("0", -1)]):
        with pytest.raises(ValueError, match="storage"):
            TorchZipLayout(tensor, storages)
    for name in ("", "..", "a/b", "a\\b", "c:"):
        with pytest.raises(ValueError, match="named"):
            TorchZipLayout(tensor, [("0", 16)], name=name)
    with pytest.raises(TypeError):
        TorchZipLayout({"x": object()}, [])
    with pytest.raises(KeyError):
        TorchZipLayout(tensor, [("0", 16)]).finish(-1, {})


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="object"):
        write_torch_file(tmp_path / "x.pt", np.array([None]))
    with pytest.raises(ReshardError, match="can't be written"):
        write_torch_file(tmp_path / "missing" / "x.pt", 1)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ damage


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "good.pt"
    value = {"a": torch.arange(100.0), "b": [random_tensor("uint16", (7,))], "s": "text"}
    torch.save(value, path)
    return path


def test_every_truncation_is_noticed(tmp_path: Path, good: Path) -> None:
    data, path = good.read_bytes(), tmp_path / "cut.pt"
    for end in [*range(0, len(data), 97), *range(len(data) - 120, len(data))]:
        path.write_bytes(data[:end])
        with pytest.raises(CorruptError, match=r"cut\.pt"):
            open_torch_file(path)
    for tail in (b"\0", b"junk" * 10):
        path.write_bytes(data + tail)
        with pytest.raises(CorruptError, match=r"cut\.pt"):
            open_torch_file(path)
        path.write_bytes(tail + data)
        with pytest.raises(CorruptError, match=r"cut\.pt"):
            open_torch_file(path)


def read_all(path: Path) -> list[bytes]:
    """All that a file says: values and bits of tensors."""
    ours = open_torch_file(path)
    found = [read_tensor(ours, tensor).tobytes() for tensor in tensors_of(ours.value)]
    return [*found, dump_pickle(ours.value)]


def test_every_flipped_byte_is_noticed_or_harmless(tmp_path: Path, good: Path) -> None:
    data, path = good.read_bytes(), tmp_path / "flipped.pt"
    truth, noticed = read_all(good), 0
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x41
        path.write_bytes(damaged)
        try:
            found = read_all(path)
        except ReshardError as error:
            message = str(error)
        else:
            assert found == truth, f"byte {at} was flipped and changed a value in silence"
            continue
        assert "flipped.pt" in message
        noticed += 1
    assert noticed > 1000


@ONE_FOLDER
@given(st.data())
def test_random_damage(tmp_path: Path, good: Path, draw: st.DataObject) -> None:
    damaged = bytearray(good.read_bytes())
    for _ in range(draw.draw(st.integers(1, 5))):
        at = draw.draw(
            st.integers(0, len(damaged) - 1) | st.integers(len(damaged) - 900, len(damaged) - 1)
        )
        damaged[at] = draw.draw(st.integers(0, 255))
    path = tmp_path / "damaged.pt"
    path.write_bytes(damaged)
    try:
        read_all(path)
    except ReshardError as error:
        message = str(error)
    else:
        return
    assert "damaged.pt" in message


def rewrite(
    good: Path,
    out: Path,
    *,
    changes: Mapping[str, bytes | None] | None = None,
    method: int = zipfile.ZIP_STORED,
    rename: dict[str, str] | None = None,
) -> Path:
    """Write the archive anew with Python's zipfile, with other members."""
    with zipfile.ZipFile(good) as archive, zipfile.ZipFile(out, "w") as new:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
        for name, data in changes.items() if changes else ():
            if data is None:
                del members[f"good/{name}"]
            else:
                members[f"good/{name}"] = data
        for name, data in members.items():
            new.writestr((rename or {}).get(name, name), data, method)
    return out


def test_an_archive_of_another_writer_is_read(tmp_path: Path, good: Path) -> None:
    assert read_all(rewrite(good, tmp_path / "new.pt")) == read_all(good)
    older = {".format_version": None, ".storage_alignment": None, "byteorder": None,
             ".data/serialization_id": None}  # fmt: skip
    assert read_all(rewrite(good, tmp_path / "old.pt", changes=older)) == read_all(good)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"byteorder": b"big"}, UnsupportedError, "big-endian"),
        ({"byteorder": b"odd"}, CorruptError, "byte order"),
        ({"version": b"99"}, UnsupportedError, "version"),
        ({"version": None}, CorruptError, "no version"),
        ({"data.pkl": None}, CorruptError, r"no data\.pkl"),
        ({"data.pkl": b""}, CorruptError, r"data\.pkl"),
        ({"data.pkl": b"\x80\x02cos\nsystem\nX\x01\0\0\0a\x85R."}, UnsafeError, r"os\.system"),
        ({"data/0": None}, CorruptError, "no storage '0'"),
        ({"data/0": b"x" * 399}, CorruptError, "399 bytes, but the pickle says 400"),
        ({"data/0": b"x" * 401}, CorruptError, "401 bytes, but the pickle says 400"),
        ({"constants.pkl": b""}, UnsupportedError, "TorchScript"),
        ({"code/a.py": b""}, UnsupportedError, "TorchScript"),
        ({"../x": b""}, UnsafeError, "leaves"),
        ({"a/../../x": b""}, UnsafeError, "leaves"),
        ({"a\\b": b""}, UnsafeError, "leaves"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_archives_that_are_refused(
    tmp_path: Path, good: Path, changes: dict[str, bytes | None], error: type, message: str
) -> None:
    path = rewrite(good, tmp_path / "odd.pt", changes=changes)
    with pytest.raises(error, match=rf"odd\.pt.*{message}"):
        open_torch_file(path)


@pytest.mark.parametrize("name", ["/etc/passwd", "other/data.pkl", "data.pkl", "C:/x", "good/"])
def test_names_outside_the_archive_are_refused(tmp_path: Path, good: Path, name: str) -> None:
    path = rewrite(good, tmp_path / "odd.pt", rename={"good/.format_version": name})
    with pytest.raises((UnsafeError, CorruptError), match=r"odd\.pt"):
        open_torch_file(path)


def test_compressed_members_are_refused(tmp_path: Path, good: Path) -> None:
    path = rewrite(good, tmp_path / "deflated.pt", method=zipfile.ZIP_DEFLATED)
    with pytest.raises(UnsupportedError, match=r"deflated\.pt, .*compressed"):
        open_torch_file(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", ["good/data/0", "good/DATA.pkl"])
def test_two_members_of_one_name_are_refused(tmp_path: Path, good: Path, name: str) -> None:
    path = tmp_path / "double.pt"
    path.write_bytes(rewrite(good, tmp_path / "new.pt").read_bytes())
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, b"y" * 400)
    with pytest.raises(CorruptError, match=rf"double\.pt, '{name}': two members"):
        open_torch_file(path)


def test_members_that_share_bytes_are_refused(tmp_path: Path, good: Path) -> None:
    data = bytearray(good.read_bytes())
    with zipfile.ZipFile(good) as archive:
        infos = {info.filename: info for info in archive.infolist()}
        begin = archive.start_dir
    first, second = infos["good/data/0"], infos["good/data/1"]
    # the directory sends data/1 to the header of data/0
    at = data.find(b"good/data/1", begin) - 4
    assert struct.unpack_from("<I", data, at)[0] == second.header_offset
    struct.pack_into("<I", data, at, first.header_offset)
    path = tmp_path / "shared.pt"
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=r"shared\.pt"):
        open_torch_file(path)


def test_a_moved_directory_is_refused(tmp_path: Path, good: Path) -> None:
    data = bytearray(good.read_bytes())
    with zipfile.ZipFile(good) as archive:
        begin = archive.start_dir
    end = len(data) - 22
    path = tmp_path / "moved.pt"
    for place, text in (
        (end + 16, struct.pack("<I", begin - 1)),
        (end - 12, b"\1"),
        (end - 28, b"\1"),
    ):
        path.write_bytes(data[:place] + text + data[place + len(text) :])
        with pytest.raises(CorruptError, match=r"moved\.pt"):
            open_torch_file(path)


def test_a_flipped_payload_byte_is_found_when_it_is_read(tmp_path: Path, good: Path) -> None:
    ours = open_torch_file(good)
    data = bytearray(good.read_bytes())
    data[ours.members["0"].offset + 5] ^= 1
    path = tmp_path / "bits.pt"
    path.write_bytes(data)
    damaged = open_torch_file(path)
    with pytest.raises(CorruptError, match=r"bits\.pt, good/data/0: CRC-32"):
        read_tensor(damaged, damaged.value["a"])
    path.write_bytes(data[: ours.members["0"].offset + 9])
    with pytest.raises(CorruptError, match="has 9 bytes, not 400"):
        read_tensor(damaged, damaged.value["a"])


def test_other_files_are_named_for_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    with pytest.raises(NotFoundError, match=r"file\.pt"):
        open_torch_file(path)
    with pytest.raises(CorruptError, match="regular"):
        open_torch_file(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CorruptError, match="regular"):
        open_torch_file(tmp_path / "pipe")
    for content, message in ((b"", "empty"), (b"\x93NUMPY", "isn't a file of torch"),
                             (b"PK\x03\x04" + b"\0" * 60, "truncated")):  # fmt: skip
        path.write_bytes(content)
        with pytest.raises(CorruptError, match=rf"file\.pt: .*{message}"):
            open_torch_file(path)
    torch.save(torch.ones(3), path, _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedError, match=r"file\.pt: .*legacy"):
        open_torch_file(path)


@pytest.mark.filterwarnings("ignore")
def test_torchscript_is_refused(tmp_path: Path) -> None:
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "script.pt")
    with pytest.raises(UnsupportedError, match=r"script\.pt: .*TorchScript"):
        open_torch_file(tmp_path / "script.pt")


def test_a_tensor_of_another_file_has_no_extent(good: Path) -> None:
    ours = open_torch_file(good)
    for tensor in (
        StoredTensor.whole("9", "float32", (1,)),
        StoredTensor.whole("0", "float32", (99,)),
    ):
        with pytest.raises(CorruptError, match=r"good\.pt"):
            ours.extent(tensor)
