"""Which faults of a distributed checkpoint does torch load without a word, and are they found?

Each of these was seen to load with torch 2.13 (but where the test says otherwise).
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.api import convert, open_manifest
from reshard.conversion import Wanted
from reshard.errors import (
    CorruptError,
    IncompleteError,
    RequestError,
    UnsafeError,
    UnsupportedError,
)
from reshard.execute import Options
from tests import dcp_files as dcp

torch = pytest.importorskip("torch")

FAST = Options(sync=False)


@pytest.fixture(scope="module")
def real(fixtures_dir: Path) -> Path:
    return fixtures_dir / "dcp"


@pytest.fixture
def ckpt(real: Path, tmp_path: Path) -> Path:
    return dcp.copy(real / "fsdp2_p2" / "ckpt", tmp_path / "ckpt")


def _drop_blob(metadata: Any, key: str) -> None:
    index = next(i for i in metadata.storage_data if i.fqn == key)
    del metadata.storage_data[index]


def _drop_key(metadata: Any, key: str) -> None:
    for index in [i for i in metadata.storage_data if i.fqn == key]:
        del metadata.storage_data[index]
    del metadata.state_dict_metadata[key]
    del metadata.planner_data[key]


def _drop_chunk(metadata: Any, key: str) -> None:
    chunk = metadata.state_dict_metadata[key].chunks.pop()
    index = next(
        i for i in metadata.storage_data if i.fqn == key and tuple(i.offset) == tuple(chunk.offsets)
    )
    del metadata.storage_data[index]


def test_a_chunk_that_is_in_no_file(ckpt: Path) -> None:
    dcp.change(ckpt, lambda m: _drop_blob(m, "model.tok.weight"))
    with pytest.raises(IncompleteError, match=r"hole: model\.tok\.weight"):
        reshard.open(ckpt)


def test_a_chunk_that_is_gone(ckpt: Path) -> None:
    dcp.change(ckpt, lambda m: _drop_chunk(m, "model.tok.weight"))
    with pytest.raises(IncompleteError, match=r"tok\.weight \[101, 36\] has a hole at index \[51"):
        reshard.open(ckpt)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("model.tok.weight", "which the model"),
        ("optim.state.tok.weight.exp_avg", "lacks exp_avg"),
        ("optim.state.tok.weight.step", "lacks step"),
        ("optim.param_groups.1.params", "which parameters it has"),
    ],
)
def test_a_key_that_is_gone(ckpt: Path, key: str, text: str) -> None:
    dcp.change(ckpt, lambda m: _drop_key(m, key))
    with pytest.raises(IncompleteError, match=text):
        reshard.open(ckpt)


def test_chunks_that_overlap(ckpt: Path) -> None:
    def widen(metadata: Any) -> None:
        chunk = metadata.state_dict_metadata["model.tok.weight"].chunks[1]
        key = next(
            i
            for i in metadata.storage_data
            if i.fqn == "model.tok.weight" and tuple(i.offset) == tuple(chunk.offsets)
        )
        info = metadata.storage_data.pop(key)
        moved = torch.Size([50, 0])
        metadata.storage_data[type(key)(key.fqn, moved, key.index)] = info
        chunk.offsets = moved

    dcp.change(ckpt, widen)
    with pytest.raises(reshard.ReshardError, match="overlap"):
        reshard.open(ckpt)


def test_a_chunk_outside_of_its_tensor(ckpt: Path) -> None:
    def shrink(metadata: Any) -> None:
        metadata.state_dict_metadata["model.tok.weight"].size = torch.Size([100, 36])

    dcp.change(ckpt, shrink)
    with pytest.raises(CorruptError, match="doesn't lie inside"):
        reshard.open(ckpt)


def test_a_missing_file(ckpt: Path) -> None:
    (ckpt / "__1_0.distcp").unlink()
    with pytest.raises(IncompleteError, match=r"__1_0\.distcp: is missing"):
        reshard.open(ckpt)


def test_a_truncated_file(ckpt: Path) -> None:
    path = ckpt / "__1_0.distcp"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CorruptError, match="is truncated"):
        reshard.open(ckpt)


def test_no_metadata(ckpt: Path) -> None:
    (ckpt / ".metadata").unlink()
    with pytest.raises(IncompleteError, match="the save wasn't finished"):
        reshard.open(ckpt)


def test_a_flipped_bit_of_the_payload(ckpt: Path, tmp_path: Path) -> None:
    manifest = open_manifest(ckpt)
    space = next(s for s in manifest.layout.spaces if s.group == 0)
    store = manifest.stores[space.name, "exp_avg"]
    path, at = manifest.path(int(store.files[3])), int(store.offsets[3])
    content = bytearray(path.read_bytes())
    content[at + 1] ^= 4
    path.write_bytes(content)
    with pytest.raises(CorruptError, match="checksum"):
        convert(ckpt, tmp_path / "native", Wanted(format="native"), FAST)
    assert not (tmp_path / "native").exists()


def test_a_flipped_bit_of_a_step(ckpt: Path) -> None:
    metadata = pickle.loads((ckpt / ".metadata").read_bytes())
    info = next(i for k, i in metadata.storage_data.items() if k.fqn.endswith(".step"))
    path = ckpt / info.relative_path
    content = bytearray(path.read_bytes())
    blob = content[info.offset : info.offset + info.length]
    content[info.offset + blob.index(b"\x00\x00\x40\x40") + 2] ^= 1  # of 3.0
    path.write_bytes(content)
    with pytest.raises(CorruptError, match="CRC-32"):
        reshard.open(ckpt)


def test_data_of_another_save(real: Path, ckpt: Path) -> None:
    """A torn overwrite that changed sizes: the old metadata with another run's file."""
    shutil.copy(real / "fsdp2_p2" / "ckpt" / "__0_0.distcp", ckpt / "__1_0.distcp")
    with pytest.raises(CorruptError):
        reshard.open(ckpt)


def test_a_file_that_was_written_after_the_metadata(ckpt: Path) -> None:
    """A torn overwrite that kept sizes can't be proved, and is told."""
    times = [n for n in open_manifest(ckpt).notes if "two steps" in n.text]
    assert times == []
    for path in ckpt.iterdir():
        os.utime(path, (1000, 1000))
    os.utime(ckpt / "__1_0.distcp", (5000, 5000))
    (note,) = [n for n in open_manifest(ckpt).notes if "two steps" in n.text]
    assert "__1_0.distcp" in note.text


def test_files_of_an_earlier_save(ckpt: Path) -> None:
    shutil.copy(ckpt / "__1_0.distcp", ckpt / "__7_0.distcp")
    (note,) = [n for n in open_manifest(ckpt).notes if "earlier save" in n.text]
    assert "__7_0.distcp" in note.text


def test_metadata_that_run_code(ckpt: Path) -> None:
    class Canary:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {ckpt}/ran",)

    dcp.change(ckpt, lambda m: setattr(m, "planner_data", Canary()))
    with pytest.raises(UnsafeError, match=r"posix\.system"):
        reshard.open(ckpt)
    assert not (ckpt / "ran").exists()


def test_a_value_that_runs_code(ckpt: Path) -> None:
    class Canary:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {ckpt}/ran",)

    buffer = io.BytesIO()
    torch.save(Canary(), buffer)
    path = ckpt / "__0_0.distcp"
    begin = path.stat().st_size
    path.write_bytes(path.read_bytes() + buffer.getvalue())

    def point_there(metadata: Any) -> None:
        index = next(i for i in metadata.storage_data if i.fqn == "sched.name")
        info = metadata.storage_data[index]
        info.relative_path, info.offset, info.length = path.name, begin, len(buffer.getvalue())

    dcp.change(ckpt, point_there)
    with pytest.raises(UnsafeError):
        reshard.open(ckpt)
    assert not (ckpt / "ran").exists()


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/passwd", "a/../../b"])
def test_files_outside_of_the_folder(ckpt: Path, name: str) -> None:
    def point_there(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).relative_path = name

    dcp.change(ckpt, point_there)
    with pytest.raises(UnsafeError, match="outside of its folder"):
        reshard.open(ckpt)


# -- traps among the real checkpoints -------------------------------------------------------------


def test_an_optimizer_that_is_one_rank_s_pickle(real: Path, tmp_path: Path) -> None:
    folder = real / "fsdp2_p4_unflat"
    checkpoint = reshard.open(folder / "ckpt")
    for name, state, raw in dcp.truth(folder):
        if state == "param":
            assert dcp.held(checkpoint, name, state) == raw.tobytes()
    assert checkpoint.states == ("param",)
    (note,) = [n for n in checkpoint.manifest.notes if n.kind == "left-out"]
    assert note.where == "optim"
    assert "never saved" in note.text
    with pytest.raises(RequestError, match="optim: sharded tensors of rank 3"):
        convert(folder / "ckpt", tmp_path / "native", Wanted(format="native"), FAST)
    wanted = Wanted(format="native", drop=("optim",))
    assert convert(folder / "ckpt", tmp_path / "native", wanted, FAST).done


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fsdp2_p4_stfmt/ckpt", "SerializationFormat.SAFETENSORS"),
        ("tc_p4/ckpt", "another library"),
        ("fsdp1_p2_local_orig/ckpt_dcp", "local state"),
        ("fsdp1_p4_local_flat/ckpt_dcp", "local state"),
    ],
)
def test_what_nobody_can_read_is_named(real: Path, name: str, text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        reshard.open(real / name)


def test_a_damaged_zstd_stream(real: Path, tmp_path: Path) -> None:
    """A flipped bit is found when a chunk is opened or moved, or was in bytes that mean nothing."""
    folder = tmp_path / "ckpt"
    shutil.copytree(real / "fsdp2_p4_zstd" / "ckpt", folder)
    sound = reshard.open(real / "fsdp2_p4_zstd" / "ckpt")
    path = folder / "__2_0.distcp"
    whole = path.read_bytes()
    found = 0
    for number, at in enumerate(range(40, len(whole), len(whole) // 12)):
        data = bytearray(whole)
        data[at] ^= 16
        path.write_bytes(data)
        target = tmp_path / f"native{number}"
        try:
            convert(folder, target, Wanted(format="native"), FAST)
        except CorruptError as error:
            found += "__2_0" in str(error) and not target.exists()
            continue
        made = reshard.open(target)
        for name, state in sound.manifest.tensors:
            assert made[name, state].numpy().tobytes() == sound[name, state].numpy().tobytes()
    assert found >= 8


def test_a_truncated_zstd_stream(real: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    shutil.copytree(real / "fsdp2_p4_zstd" / "ckpt", folder)
    path = folder / "__2_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorruptError, match="truncated"):
        reshard.open(folder)
