"""Do snapshots of torchsnapshot read as what the live ranks held, and are their faults found?

The real one was written by torchsnapshot 0.1.0. Chunked and sharded tensors are listed by hand, as
its manifest.py describes them.
"""

from __future__ import annotations

import base64
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import reshard
from reshard import Options, Wanted
from reshard.api import open_manifest
from reshard.checkpoint import Checkpoint
from reshard.errors import (
    CorruptError,
    IncompleteError,
    InconsistentError,
    ReshardError,
    UnsafeError,
    UnsupportedError,
)
from reshard.formats import detect

FAST = Options(sync=False)
METADATA = ".snapshot_metadata"


@pytest.fixture(scope="module")
def real(fixtures_dir: Path) -> Path:
    path = fixtures_dir / "torchsnapshot" / "ddp_ws2"
    if not path.is_dir():
        pytest.skip("there is no snapshot among the fixtures")
    return path


@pytest.fixture
def copy(real: Path, tmp_path: Path) -> Path:
    """A copy of the snapshot, to be damaged."""
    root = Path(shutil.copytree(real / "ckpt", tmp_path / "copy"))
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return root


def edit(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads((root / METADATA).read_bytes())
    change(document)
    (root / METADATA).write_text(json.dumps(document), encoding="utf-8")


def test_reads_equal_to_the_truth(real: Path) -> None:
    format_, found = detect(real / "ckpt")
    assert format_.name == "torchsnapshot"
    checkpoint = Checkpoint(format_.open(found.root))
    assert checkpoint.world == 2
    for name, expected in load_file(real / "truth.safetensors").items():
        array = checkpoint[f"module.{name}"].numpy()
        assert (array.dtype, array.tobytes()) == (expected.dtype, expected.tobytes()), name
    kinds = ("step", "exp_avg", "exp_avg_sq")
    states = {(f"optim.state.{i}.{s}", "client") for i in (0, 1) for s in kinds}
    weights = {(f"module.{n}", "param") for n in ("weight", "bias")}
    assert set(checkpoint.manifest.tensors) == states | weights
    assert checkpoint["optim.state.0.exp_avg", "client"].shape == (4, 6)
    assert checkpoint["optim.state.0.step", "client"].numpy() > 0


def test_every_ranks_own_copy_is_read_and_compared(real: Path, copy: Path, tmp_path: Path) -> None:
    """Optimizer states weren't declared as replicated: each rank has stored them."""
    tensor = open_manifest(real / "ckpt").tensors["optim.state.0.exp_avg", "client"]
    assert len(tensor.places) == 2
    entries = json.loads((copy / METADATA).read_bytes())["manifest"]
    entry = entries["1/optim/state/0/exp_avg"]
    path = copy / entry["location"]
    content = bytearray(path.read_bytes())
    content[entry["byte_range"][0]] ^= 1
    path.write_bytes(content)
    with pytest.raises(InconsistentError, match=r"optim\.state\.0\.exp_avg"):
        reshard.convert(copy, tmp_path / "out", Wanted(format="native"), FAST)


def test_values_are_kept(real: Path) -> None:
    objects = open_manifest(real / "ckpt").objects["torchsnapshot"]["all"]
    assert objects["extra"] == {"step": 3, "name": "x"}
    (group,) = objects["optim"]["param_groups"]
    assert (group["lr"], group["betas"], group["foreach"]) == (1e-3, (0.9, 0.999), None)
    assert (group["amsgrad"], group["params"]) == (False, [0, 1])


def test_goes_into_native(real: Path, tmp_path: Path) -> None:
    source = open_manifest(real / "ckpt")
    reshard.convert(source, tmp_path / "native", Wanted(world=3, format="native"), FAST)
    before, after = Checkpoint(source), reshard.open(tmp_path / "native")
    for key in source.tensors:
        assert after[key].numpy().tobytes() == before[key].numpy().tobytes(), key
    assert after.objects == before.objects


def test_values_that_differ_by_rank(copy: Path) -> None:
    edit(copy, lambda d: d["manifest"]["1/extra/step"].update(serialized_value="4"))
    ranks = open_manifest(copy).objects["torchsnapshot"]["ranks"]
    assert [rank["extra"]["step"] for rank in ranks] == [3, 4]


# -- chunks and shards --------------------------------------------------------------------------


def tensor_of(array: np.ndarray, location: str, begin: int | None = None) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "type": "Tensor",
        "location": location,
        "serializer": "buffer_protocol",
        "dtype": f"torch.{array.dtype.name}",
        "shape": list(array.shape),
        "replicated": False,
        "byte_range": None if begin is None else [begin, begin + array.nbytes],
    }
    return entry


def snapshot(root: Path, entries: dict[str, Any], files: dict[str, bytes], world: int = 2) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    root.mkdir(exist_ok=True)
    document = {"version": "0.1.0", "world_size": world, "manifest": entries}
    (root / METADATA).write_text(json.dumps(document), encoding="utf-8")
    return root


def pieces(array: np.ndarray, rows: list[int], prefix: str) -> tuple[list[Any], dict[str, bytes]]:
    found, files = [], {}
    for a, b in zip([0, *rows], [*rows, len(array)], strict=True):
        part, name = array[a:b], f"{prefix}_{a}"
        found.append(
            {"offsets": [a, 0], "sizes": list(part.shape), "tensor": tensor_of(part, name)}
        )
        files[name] = part.tobytes()
    return found, files


@pytest.fixture
def array() -> np.ndarray:
    return np.arange(42, dtype=np.float32).reshape(7, 6)


def test_chunks(tmp_path: Path, array: np.ndarray) -> None:
    chunks, files = pieces(array, [3, 5], "replicated/model/w")
    entry = {
        "type": "ChunkedTensor", "dtype": "torch.float32", "shape": [7, 6], "chunks": chunks,
        "replicated": True,
    }  # fmt: skip
    entries = {"0/model": {"type": "dict", "keys": ["w"]}, "0/model/w": entry, "1/model/w": entry}
    found = Checkpoint(open_manifest(snapshot(tmp_path / "s", entries, files)))["w"]
    assert (found.numpy() == array).all()
    assert (found[2:6, 1] == array[2:6, 1]).all()


def test_shards_of_all_ranks(tmp_path: Path, array: np.ndarray) -> None:
    shards, files = pieces(array, [4], "sharded/model/w")
    entries = {
        f"{rank}/model/w": {"type": "ShardedTensor", "shards": [shard]}
        for rank, shard in enumerate(shards)
    }
    root = snapshot(tmp_path / "s", entries, files)
    assert (Checkpoint(open_manifest(root))["w"].numpy() == array).all()
    reshard.convert(root, tmp_path / "out", Wanted(format="native", world=3), FAST)
    assert (reshard.open(tmp_path / "out")["w"].numpy() == array).all()


def test_a_shard_that_is_not_listed(tmp_path: Path, array: np.ndarray) -> None:
    shards, files = pieces(array, [2, 4], "sharded/model/w")
    entries = {"0/model/w": {"type": "ShardedTensor", "shards": [shards[0], shards[2]]}}
    root = snapshot(tmp_path / "s", entries, files)
    with pytest.raises(IncompleteError):
        reshard.convert(root, tmp_path / "out", Wanted(format="native"), FAST)


def test_shapes_that_differ_by_rank(tmp_path: Path, array: np.ndarray) -> None:
    entries = {"0/m/w": tensor_of(array, "a"), "1/m/w": tensor_of(array[:3], "b")}
    files = {"a": array.tobytes(), "b": array[:3].tobytes()}
    with pytest.raises(InconsistentError, match="has the shapes"):
        open_manifest(snapshot(tmp_path / "s", entries, files))


def test_several_models_keep_their_keys(tmp_path: Path, array: np.ndarray) -> None:
    entries = {"0/a/w": tensor_of(array, "f"), "0/b/x%2Fy": tensor_of(array, "g")}
    root = snapshot(tmp_path / "s", entries, {"f": array.tobytes(), "g": array.tobytes()}, 1)
    assert set(open_manifest(root).tensors) == {("a.w", "param"), ("b.x/y", "param")}


@pytest.mark.parametrize("value", [b"", b"\0\xff", 0.1, float("inf"), -0.0, True, 1 << 80, "ä/b"])
def test_values_in_place(tmp_path: Path, value: Any) -> None:
    raw = struct.pack("<d", value) if isinstance(value, float) else value
    text = base64.b64encode(raw).decode() if isinstance(raw, bytes) else str(value)
    kind = type(value).__name__
    entries = {"0/x/v": {"type": kind, "serialized_value": text, "replicated": False}}
    root = snapshot(tmp_path / "s", entries, {}, 1)
    found = open_manifest(root).objects["torchsnapshot"]["all"]["x"]["v"]
    assert type(found) is type(value)
    assert repr(found) == repr(value)


# -- faults -------------------------------------------------------------------------------------


def test_missing_and_truncated_files(copy: Path) -> None:
    for path in [p for p in copy.rglob("*") if p.is_file() and p.name != METADATA]:
        content = path.read_bytes()
        for damaged in (None, content[:-1], b""):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            with pytest.raises(CorruptError):
                open_manifest(copy)
            path.write_bytes(content)
    open_manifest(copy)


def test_a_snapshot_without_its_list_is_none(copy: Path) -> None:
    (copy / METADATA).unlink()
    with pytest.raises(ReshardError):
        detect(copy)


WEIGHT = "0/model/module.weight"


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("location", "../x", UnsafeError),
        ("location", "/etc/passwd", UnsafeError),
        ("location", 3, CorruptError),
        ("serializer", "torch_save", UnsupportedError),
        ("dtype", "torch.qint8", UnsupportedError),
        ("dtype", None, UnsupportedError),
        ("shape", [4, 7], CorruptError),
        ("shape", [-4, 6], CorruptError),
        ("byte_range", [0, 92], CorruptError),
        ("byte_range", [1 << 40, (1 << 40) + 96], CorruptError),
        ("byte_range", [0], CorruptError),
        ("byte_range", None, CorruptError),
        ("type", "Quantized", UnsupportedError),
    ],
)
def test_entries_that_make_no_sense(
    copy: Path, field: str, value: Any, error: type[ReshardError]
) -> None:
    edit(copy, lambda d: d["manifest"][WEIGHT].update({field: value}))
    with pytest.raises(error):
        open_manifest(copy)


@pytest.mark.parametrize("raw", [b"{", b"{}", b'{"world_size": 0, "manifest": {}}', b"{" * 100_000])
def test_lists_that_make_no_sense(copy: Path, raw: bytes) -> None:
    (copy / METADATA).write_bytes(raw)
    with pytest.raises(CorruptError, match="isn't a list of a snapshot"):
        open_manifest(copy)


def test_yaml_of_earlier_versions(copy: Path) -> None:
    (copy / METADATA).write_text("version: 0.0.1\nworld_size: 2\n", encoding="utf-8")
    with pytest.raises(UnsupportedError, match=r"isn't JSON(?s:.*)YAML"):
        open_manifest(copy)


@pytest.mark.parametrize("name", ["0/optim/state/1/step", WEIGHT, "0/extra/name"])
def test_a_key_without_its_entry(copy: Path, name: str) -> None:
    def change(document: dict[str, Any]) -> None:
        for rank in (0, 1):
            document["manifest"].pop(f"{rank}{name[1:]}", None)

    edit(copy, change)
    with pytest.raises(IncompleteError, match=f"lists a key {name[2:]} of rank 0"):
        open_manifest(copy)


def test_a_list_that_lacks_an_item(copy: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        for rank in (0, 1):
            document["manifest"].pop(f"{rank}/optim/param_groups/0/params/0")

    edit(copy, change)
    with pytest.raises(CorruptError, match="lacks items"):
        open_manifest(copy)
