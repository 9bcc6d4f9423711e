"""Do Orbax checkpoints read as what the live program held, and are their faults found?

The checkpoints were written by Orbax 0.12; the truth was taken from the program.
"""

from __future__ import annotations

import json
import shutil
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
    UnsupportedError,
)
from reshard.formats import detect

CASES = (
    "default_ocdbt",
    "ocdbt_zarr3",
    "zarr2_noocdbt",
    "zarr3_noocdbt",
    "mp2_ocdbt",
    "manager_composite",
)
FAST = Options(sync=False)


@pytest.fixture(scope="module")
def real(fixtures_dir: Path) -> Path:
    path = fixtures_dir / "orbax"
    if not path.is_dir():
        pytest.skip("there are no Orbax checkpoints among the fixtures")
    return path


@pytest.fixture
def copy(real: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a checkpoint, to be damaged."""

    def made(case: str) -> Path:
        return Path(shutil.copytree(real / case / "ckpt", tmp_path / case))

    return made


def ours(name: str) -> tuple[str, str]:
    """What a leaf of the fixtures is called here."""
    if name.startswith("opt.mu."):
        return name.replace("opt.mu.", "params."), "exp_avg"
    return name, "param" if name.startswith("params.") else "client"


@pytest.mark.parametrize("case", CASES)
def test_reads_equal_to_the_truth(real: Path, case: str) -> None:
    format_, found = detect(real / case / "ckpt")
    assert format_.name == "orbax"
    checkpoint = Checkpoint(format_.open(found.root))
    truth = load_file(real / case / "truth.safetensors")
    for name, expected in truth.items():
        array = checkpoint[ours(name)].numpy()
        assert array.shape == expected.shape, name
        assert array.dtype == expected.dtype, name
        assert array.tobytes() == expected.tobytes(), name
    others = set(checkpoint.manifest.tensors) - set(map(ours, truth))
    assert others <= {("step", "client"), ("lr", "client")}


@pytest.mark.parametrize("case", CASES)
def test_goes_into_native_and_back_out(real: Path, tmp_path: Path, case: str) -> None:
    source = open_manifest(real / case / "ckpt")
    reshard.convert(source, tmp_path / "native", Wanted(world=3, format="native"), FAST)
    before, after = Checkpoint(source), reshard.open(tmp_path / "native")
    assert set(after.manifest.tensors) == set(source.tensors)
    for key in source.tensors:
        assert after[key].numpy().tobytes() == before[key].numpy().tobytes(), key
    assert after.objects == before.objects


@pytest.mark.parametrize("case", CASES)
def test_slices(real: Path, case: str) -> None:
    checkpoint = Checkpoint(open_manifest(real / case / "ckpt"))
    for name, expected in load_file(real / case / "truth.safetensors").items():
        if expected.ndim == 2:
            found = checkpoint[ours(name)][1:-1, 1:3]
            assert found.tobytes() == np.ascontiguousarray(expected[1:-1, 1:3]).tobytes(), name


def test_scalars_texts_and_empty_leaves(real: Path) -> None:
    checkpoint = Checkpoint(open_manifest(real / "default_ocdbt" / "ckpt"))
    assert checkpoint["step", "client"].numpy() == 100
    assert checkpoint["lr", "client"].numpy() == 1e-3
    item = checkpoint.objects["orbax"][""]
    assert item["strings"] == {"name": "run1"}
    kinds = {".".join(k for k, _ in keys): (kind, key) for keys, kind, key in item["tree"]}
    assert kinds["empty"] == ("Dict", [])
    assert kinds["none"] == ("None", [])
    assert kinds["name"] == ("string", [])
    assert kinds["opt.mu.dense.kernel"] == ("jax.Array", ["params.dense.kernel", "exp_avg"])


def test_typed_keys_are_kept(real: Path) -> None:
    """``head.w`` is one key, ``layers.0`` an index of a list: names alone don't tell."""
    item = open_manifest(real / "default_ocdbt" / "ckpt").objects["orbax"][""]
    keys = {key[0]: keys for keys, _, key in item["tree"] if key}
    assert keys["params.head.w"] == [["params", 2], ["head.w", 2]]
    assert keys["params.layers.0"] == [["params", 2], ["layers", 2], ["0", 1]]


def test_a_manager_folder(real: Path) -> None:
    root = real / "manager_composite" / "ckpt"
    _, found = detect(root)
    assert found.root == root / "2"
    assert found.others == (root / "1",)
    assert Checkpoint(open_manifest(root / "1"))["step", "client"].numpy() == 1
    assert open_manifest(root).objects["orbax"]["meta"] == {"json": {"a": 1}}
    assert len(open_manifest(root / "1" / "state").tensors) == len(open_manifest(root).tensors)


def test_several_trees_in_a_step(copy: Callable[[str], Path]) -> None:
    root = copy("manager_composite") / "2"
    shutil.copytree(root / "state", root / "ema")
    manifest = open_manifest(root)
    assert ("ema.params.dense.kernel", "param") in manifest.tensors
    assert ("state.params.dense.kernel", "exp_avg") in manifest.tensors


def test_moments_without_their_weight(copy: Callable[[str], Path]) -> None:
    """Another shape, or no such weight: they keep their own name."""
    root = copy("zarr2_noocdbt")
    edit(root / "params.dense.kernel" / ".zarray", lambda d: d.update(shape=[7, 6]))
    assert ("opt.mu.dense.kernel", "client") in open_manifest(root).tensors
    name = "('params', 'dense', 'kernel')"
    edit(root / "_METADATA", lambda d: d["tree_metadata"].pop(name))
    assert ("opt.mu.dense.kernel", "client") in open_manifest(root).tensors


def test_without_params_everything_is_a_weight(copy: Callable[[str], Path]) -> None:
    root = copy("zarr2_noocdbt")

    def change(document: Any) -> None:
        tree = document["tree_metadata"]
        for name in [name for name in tree if "params" in name]:
            del tree[name]

    edit(root / "_METADATA", change)
    found = open_manifest(root).tensors
    assert ("opt.mu.dense.kernel", "param") in found
    assert {state for _, state in found} == {"param"}


# -- faults -------------------------------------------------------------------------------------

CHUNKS = {"zarr2_noocdbt": "params.dense.kernel/1.0", "zarr3_noocdbt": "params.dense.kernel/c/1/0"}


@pytest.mark.parametrize("case", CHUNKS)
def test_a_missing_chunk(copy: Callable[[str], Path], case: str) -> None:
    """tensorstore, and Orbax with it, gives zeros for it."""
    root = copy(case)
    (root / CHUNKS[case]).unlink()
    with pytest.raises(IncompleteError, match=rf"{CHUNKS[case]} is missing"):
        open_manifest(root)


@pytest.mark.parametrize("case", ["default_ocdbt", "ocdbt_zarr3"])
def test_a_chunk_missing_in_the_database(copy: Callable[[str], Path], case: str) -> None:
    import tensorstore

    root = copy(case)
    base = {"driver": "file", "path": f"{root}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    key = next(k for k in store.list().result() if b"dense.kernel/" in k and k.endswith(b"0"))
    store.delete_range(tensorstore.KvStore.KeyRange(key, key + b"\0")).result()
    with pytest.raises(IncompleteError, match=f"{key.decode()} is missing"):
        open_manifest(root)


@pytest.mark.parametrize("case", CHUNKS)
def test_a_chunk_outside_of_the_grid(copy: Callable[[str], Path], case: str) -> None:
    path = copy(case) / CHUNKS[case]
    stray = path.with_name(path.name.replace("0", "7"))
    shutil.copy(path, stray)
    with pytest.raises(CorruptError, match="outside of its shape"):
        open_manifest(path.parents[0 if case.startswith("zarr2") else 2].parent)


@pytest.mark.parametrize("case", CHUNKS)
def test_a_truncated_chunk(copy: Callable[[str], Path], tmp_path: Path, case: str) -> None:
    root = copy(case)
    path = root / CHUNKS[case]
    content = path.read_bytes()
    for length in (0, 1, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        source = open_manifest(root)
        with pytest.raises(CorruptError, match=r"can't be decoded") as caught:
            Checkpoint(source)["params.dense.kernel", "param"].numpy()
        assert caught.value.where == str(path)
        with pytest.raises(CorruptError):
            reshard.convert(source, tmp_path / "target", Wanted(format="native"), FAST)


def test_a_shard_without_one_of_its_chunks(copy: Callable[[str], Path]) -> None:
    path = copy("zarr3_noocdbt") / CHUNKS["zarr3_noocdbt"]
    content = path.read_bytes()
    import google_crc32c

    index = b"\xff" * 16
    path.write_bytes(content[:-20] + index + google_crc32c.value(index).to_bytes(4, "little"))
    source = open_manifest(path.parents[3])
    with pytest.raises(CorruptError, match="chunk 0 of the shard is missing"):
        Checkpoint(source)["params.dense.kernel", "param"].numpy()


def test_an_uncompressed_chunk_is_a_plain_file(copy: Callable[[str], Path]) -> None:
    """Its bytes are read where they lie, and its length is checked."""
    root = copy("zarr2_noocdbt")
    rng = np.random.default_rng(1)
    kernel = rng.normal(size=(8, 6)).astype(np.float32)
    metadata = json.loads((root / "params.dense.kernel/.zarray").read_bytes())
    metadata |= {"compressor": None, "chunks": [5, 4]}  # chunks reach over the edges
    (root / "params.dense.kernel/.zarray").write_text(json.dumps(metadata), encoding="utf-8")
    padded = np.zeros((10, 8), np.float32)
    padded[:8, :6] = kernel
    for i in range(2):
        for j in range(2):
            chunk = np.ascontiguousarray(padded[5 * i : 5 * i + 5, 4 * j : 4 * j + 4])
            (root / f"params.dense.kernel/{i}.{j}").write_bytes(chunk.tobytes())
    manifest = open_manifest(root)
    assert any(f.decoder is None and f.path.endswith("kernel/1.1") for f in manifest.files)
    assert (Checkpoint(manifest)["params.dense.kernel", "param"].numpy() == kernel).all()
    (root / "params.dense.kernel/1.1").write_bytes(bytes(79))
    with pytest.raises(CorruptError, match="has 79 bytes and should have 80"):
        open_manifest(root)


@pytest.mark.parametrize("compressor", ["zlib", "gzip", "blosc", "bz2"])
def test_other_codecs_and_edges(copy: Callable[[str], Path], compressor: str) -> None:
    import tensorstore

    root = copy("zarr2_noocdbt")
    shutil.rmtree(root / "params.dense.kernel")
    kernel = np.random.default_rng(1).normal(size=(8, 6)).astype(np.float32)
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{root}/params.dense.kernel/"},
        "metadata": {
            "shape": [8, 6], "chunks": [5, 4], "dtype": "<f4", "order": "F",
            "compressor": {"id": compressor},
        },
        "create": True,
    }  # fmt: skip
    tensorstore.open(spec).result().write(kernel).result()
    found = Checkpoint(open_manifest(root))["params.dense.kernel", "param"]
    assert (found.numpy() == kernel).all()
    assert (found[4:7, 2:] == kernel[4:7, 2:]).all()


@pytest.mark.parametrize("case", ["default_ocdbt", "mp2_ocdbt"])
def test_a_file_of_the_database_is_gone(copy: Callable[[str], Path], case: str) -> None:
    """Each of its files in turn: an error of ours, or (if nothing needs it) the same tensors."""
    root = copy(case)
    whole = read_all(root)
    lost = 0
    for path in sorted(p for p in root.rglob("*") if p.parent.name == "d"):
        content = path.read_bytes()
        path.unlink()
        try:
            found = read_all(root)
        except CorruptError:
            lost += 1
        else:
            assert all(found[k].tobytes() == whole[k].tobytes() for k in whole)
        path.write_bytes(content)
    assert lost > 0


def test_an_array_is_missing(copy: Callable[[str], Path]) -> None:
    root = copy("zarr3_noocdbt")
    shutil.rmtree(root / "params.head.w")
    with pytest.raises(IncompleteError, match=r"params\.head\.w is missing: the tree lists it"):
        open_manifest(root)


def test_the_manifest_of_the_database_is_missing(copy: Callable[[str], Path]) -> None:
    root = copy("default_ocdbt")
    (root / "manifest.ocdbt").unlink()
    with pytest.raises(IncompleteError, match="database's manifest is missing"):
        open_manifest(root)


def test_an_unfinished_folder(copy: Callable[[str], Path]) -> None:
    root = copy("manager_composite")
    unfinished = root / "3.orbax-checkpoint-tmp-1700000000"
    shutil.copytree(root / "2", unfinished)
    assert detect(root)[1].root == root / "2"
    with pytest.raises(IncompleteError, match="never finished"):
        open_manifest(unfinished)


def test_a_lost_commit_marker_is_told(copy: Callable[[str], Path]) -> None:
    root = copy("default_ocdbt")
    assert not open_manifest(root).notes
    (root / "commit_success.txt").unlink()
    assert [n.text for n in open_manifest(root).notes] == ["has no commit marker"]


def read_all(root: Path) -> dict[tuple[str, str], np.ndarray]:
    checkpoint = Checkpoint(open_manifest(root))
    return {key: checkpoint[key].numpy() for key in checkpoint.manifest.tensors}


def edit(path: Path, change: Callable[[Any], None]) -> None:
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")


def test_two_leaves_of_one_name(copy: Callable[[str], Path]) -> None:
    root = copy("zarr2_noocdbt")

    def change(document: Any) -> None:
        tree = document["tree_metadata"]
        twin = json.loads(json.dumps(tree["('params', 'head.w')"]))
        keys = [{"key": k, "key_type": 2} for k in ("params", "head", "w")]
        tree["('params', 'head', 'w')"] = {**twin, "key_metadata": keys}

    edit(root / "_METADATA", change)
    with pytest.raises(InconsistentError, match=r"two leaves are stored as params\.head\.w"):
        open_manifest(root)


def test_a_name_that_leaves_the_folder(copy: Callable[[str], Path]) -> None:
    root = copy("zarr2_noocdbt")

    def change(document: Any) -> None:
        leaf = document["tree_metadata"]["('lr',)"]
        leaf["key_metadata"] = [{"key": "../../etc", "key_type": 2}]

    edit(root / "_METADATA", change)
    with pytest.raises(UnsupportedError, match="a leaf is called"):
        open_manifest(root)


@pytest.mark.parametrize(
    ("case", "field", "value"),
    [
        ("zarr2_noocdbt", "dtype", "|r16"),
        ("zarr2_noocdbt", "dtype", "|V2"),
        ("zarr2_noocdbt", "dtype", ">f4"),
        ("zarr2_noocdbt", "filters", [{"id": "delta"}]),
        ("zarr2_noocdbt", "compressor", {"id": "lzma"}),
        ("zarr2_noocdbt", "shape", [8, -6]),
        ("zarr2_noocdbt", "shape", [8, 1 << 70]),
        ("zarr2_noocdbt", "shape", [1 << 40, 6]),
        ("zarr2_noocdbt", "chunks", [0, 3]),
        ("zarr2_noocdbt", "chunks", [4]),
        ("zarr3_noocdbt", "data_type", "r16"),
        ("zarr3_noocdbt", "data_type", "int4"),
        ("zarr3_noocdbt", "data_type", {"name": "struct"}),
        ("zarr3_noocdbt", "codecs", [{"name": "strange"}]),
        ("zarr3_noocdbt", "codecs", []),
        ("zarr3_noocdbt", "chunk_grid", {"name": "irregular"}),
        ("zarr3_noocdbt", "storage_transformers", [{"name": "x"}]),
    ],
)
def test_metadata_that_are_strange(
    copy: Callable[[str], Path], case: str, field: str, value: Any
) -> None:
    """Refused by us: tensorstore would abort the process on some."""
    root = copy(case)
    name = ".zarray" if case.startswith("zarr2") else "zarr.json"
    edit(root / "params.dense.kernel" / name, lambda document: document.update({field: value}))
    with pytest.raises(ReshardError):
        read_all(root)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"[" * 100_000, b'{"tree_metadata": {"a": {}}}'])
def test_a_tree_that_makes_no_sense(copy: Callable[[str], Path], raw: bytes) -> None:
    root = copy("zarr2_noocdbt")
    (root / "_METADATA").write_bytes(raw)
    with pytest.raises(CorruptError, match="isn't the metadata of a tree"):
        open_manifest(root)


def test_texts_that_are_missing(copy: Callable[[str], Path]) -> None:
    root = copy("default_ocdbt")
    (root / "_strings.json").write_text("{}", encoding="utf-8")
    with pytest.raises(IncompleteError, match="lacks texts"):
        open_manifest(root)
