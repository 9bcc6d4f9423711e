"""Is everything that can be wrong with a Megatron-Core checkpoint refused, or told?"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.api import convert, open_manifest
from reshard.conversion import Wanted
from reshard.errors import (
    CorruptError,
    IncompleteError,
    InconsistentError,
    NotFoundError,
    ReshardError,
    UnsafeError,
    UnsupportedError,
)
from reshard.execute import Options
from reshard.formats import detect, named
from reshard.manifest import Manifest
from reshard.store import EntryStore
from tests import megatron_files as megatron

FAST = Options(sync=False)
STACKED, SINGLE, BUCKETS = megatron.GPT[1], megatron.GPT[2], megatron.GPT[5]
GATHERED, FLAT, ZARR = megatron.GPT[4], megatron.GPT[3], megatron.RAW[0]

Copy = Callable[[str], Path]


@pytest.fixture
def copy(fixtures_dir: Path, tmp_path: Path) -> Copy:
    def make(name: str) -> Path:
        return megatron.copy(fixtures_dir / "megatron" / name / "ckpt", tmp_path / name)

    return make


def swap(path: Path, old: bytes, new: bytes, count: int | None = None) -> None:
    """Change bytes of a file, which keeps its length."""
    content = path.read_bytes()
    assert len(old) == len(new)
    assert old in content
    path.write_bytes(content.replace(old, new, -1 if count is None else count))


def place(manifest: Manifest, name: str, state: str) -> tuple[Path, int]:
    """The file and first byte of a tensor's first box."""
    space_index, entry = manifest.tensors[name, state].places[0]
    store = manifest.stores[manifest.space(space_index).name, state]
    assert isinstance(store, EntryStore)
    return manifest.path(int(store.files[entry])), int(store.offsets[entry])


def flip(path: Path, offset: int, bit: int = 0x10) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ bit]))


# -- unfinished, and other formats ----------------------------------------------------------------


@pytest.mark.parametrize("name", [FLAT, ZARR])
def test_a_save_that_was_not_finished(copy: Copy, name: str) -> None:
    root = copy(name)
    (root / "metadata.json").unlink()
    assert detect(root)[0].name == "megatron"
    with pytest.raises(IncompleteError, match="wasn't finished"):
        open_manifest(root)


def test_a_save_that_was_not_finished_looks_like_dcp(copy: Copy) -> None:
    root = copy(STACKED)
    (root / "metadata.json").unlink()
    with pytest.raises(UnsupportedError, match=r"Megatron-Core.*written last"):
        open_manifest(root)


@pytest.mark.parametrize("name", [STACKED, FLAT])
def test_it_is_not_read_as_dcp(copy: Copy, name: str) -> None:
    root = copy(name)
    assert detect(root)[0].name == "megatron", "and not one of two formats"
    with pytest.raises(UnsupportedError, match="Megatron-Core"):
        named("dcp").open(root)


def test_a_json_file_of_another_program(copy: Copy) -> None:
    root = copy(STACKED)
    (root / "metadata.json").write_text('{"kind": "music"}', encoding="utf-8")
    assert named("megatron").detect(root) is None
    for path in (*root.glob("*.distcp"), root / ".metadata"):
        path.unlink()
    with pytest.raises(NotFoundError):
        detect(root)


def test_another_backend(copy: Copy) -> None:
    root = copy(STACKED)
    text = json.dumps({"sharded_backend": "fsdp_dtensor", "sharded_backend_version": 1})
    (root / "metadata.json").write_text(text, encoding="utf-8")
    with pytest.raises(UnsupportedError, match="fsdp_dtensor"):
        open_manifest(root)


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [STACKED, BUCKETS, GATHERED, FLAT])
def test_a_missing_or_truncated_file(copy: Copy, name: str) -> None:
    root = copy(name)
    for path in sorted(root.iterdir()):
        if path.name == "metadata.json" or (path.suffix == ".distcp" and not path.stat().st_size):
            continue
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(ReshardError):
            open_manifest(root)
        path.unlink()
        with pytest.raises(ReshardError):
            named("megatron").open(root)
        path.write_bytes(content)
    open_manifest(root)


@pytest.mark.parametrize("name", [STACKED, BUCKETS, GATHERED, FLAT])
@pytest.mark.parametrize("state", ["param", "exp_avg_sq"])
def test_a_flipped_bit_of_the_payload(copy: Copy, tmp_path: Path, name: str, state: str) -> None:
    root = copy(name)
    path, offset = place(open_manifest(root), "decoder.layers.2.mlp.linear_fc2.weight", state)
    flip(path, offset + 33)
    # where names are told by content, a changed weight fits nothing
    with pytest.raises(CorruptError):
        convert(open_manifest(root), tmp_path / "native", Wanted(format="native"), FAST)
    assert not (tmp_path / "native").exists()


def test_a_file_that_the_list_of_checksums_does_not_know(copy: Copy) -> None:
    """Changed metadata of DCP are told of, any other file that differs is an error."""
    root = copy("raw_tp2dp2_v019")
    (note,) = [n for n in open_manifest(root).notes if n.where == ".metadata"]
    assert "SHA-256" in note.text
    assert reshard.open(root)["scalar"].numpy() == 3.25
    content = (root / "metadata.json").read_bytes()
    (root / "metadata.json").write_bytes(content + b" ")
    with pytest.raises(CorruptError, match="SHA-256"):
        open_manifest(root)
    (root / "metadata.json").write_bytes(content)
    listed = json.loads((root / "integrity.json").read_bytes())
    listed["files"]["__4_0.distcp"] = "0" * 64
    (root / "integrity.json").write_text(json.dumps(listed), encoding="utf-8")
    with pytest.raises(IncompleteError, match="lists it"):
        open_manifest(root)
    listed["files"] = {"../secret": "0" * 64}
    (root / "integrity.json").write_text(json.dumps(listed), encoding="utf-8")
    with pytest.raises(UnsafeError):
        open_manifest(root)


def test_files_of_an_earlier_save(copy: Copy) -> None:
    root = copy(STACKED)
    (root / "__7_0.distcp").write_bytes(b"old")
    (note,) = [n for n in open_manifest(root).notes if n.where == root.name]
    assert "__7_0.distcp" in note.text


# -- metadata -------------------------------------------------------------------------------------


def rename(root: Path, old: str, new: str) -> None:
    """Give a key another name of the same length, in the metadata."""
    swap(root / ".metadata", old.encode(), new.encode())


def test_a_key_of_the_optimizer_that_is_gone(copy: Copy) -> None:
    root = copy(STACKED)
    key = "optimizer.state.exp_avg_sq.output_layer.weight"
    rename(root, key, key.replace("optimizer.state", "optimizer_state"))
    with pytest.raises(IncompleteError, match=r"output_layer\.weight lacks exp_avg_sq"):
        open_manifest(root)


def test_a_weight_that_is_gone(copy: Copy) -> None:
    root = copy(STACKED)
    content = (root / ".metadata").read_bytes()
    key = b"decoder.final_layernorm.weight"
    changed = re.sub(rb"(?<!\.)" + re.escape(key), key[:-1] + b"x", content)
    assert changed != content
    (root / ".metadata").write_bytes(changed)
    with pytest.raises(IncompleteError, match=r"final_layernorm\.weight, which the model lacks"):
        open_manifest(root)


def test_half_of_a_gated_mlp(copy: Copy) -> None:
    root = copy(SINGLE)
    rename(root, "layers.2.mlp.linear_fc1.weight_v", "layers.2.mlp.linear_fc1.weight_x")
    with pytest.raises(IncompleteError, match="the other half is missing"):
        open_manifest(root)


def test_one_tensor_under_two_keys(copy: Copy) -> None:
    pytest.importorskip("torch")
    from dataclasses import replace

    root = copy(SINGLE)
    key = "optimizer.state.exp_avg_sq.output_layer.weight"
    other = "chained_1.optimizer.state.exp_avg.output_layer.weight"

    def change(metadata: Any) -> None:
        described, storage = metadata.state_dict_metadata, metadata.storage_data
        described[other] = described.pop(key)
        for index in [i for i in storage if i.fqn == key]:
            storage[replace(index, fqn=other)] = storage.pop(index)

    _change(root, change)
    with pytest.raises(InconsistentError, match="stored under two keys"):
        open_manifest(root)


def test_a_shape_that_flat_ranges_do_not_fit(copy: Copy) -> None:
    pytest.importorskip("torch")
    root = copy(FLAT)
    _change(root, lambda m: m.mcore_data[KEY].update(nd_reformulated_orig_global_shape=(4, 81, 16)))
    with pytest.raises(CorruptError, match="can't be made of"):
        open_manifest(root)


def test_a_missing_layer(copy: Copy) -> None:
    pytest.importorskip("torch")
    root = copy(STACKED)
    key = "decoder.layers.mlp.linear_fc1.layer_norm_weight"

    def lose(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata[key].chunks
        storage = metadata.storage_data
        chunks[:] = [c for c in chunks if c.offsets[0] != 2]
        for index in [i for i in storage if i.fqn == key and i.offset[0] == 2]:
            del storage[index]

    _change(root, lose)
    with pytest.raises(IncompleteError, match="nothing of layer 2"):
        open_manifest(root)


def test_a_hole_in_a_tensor(copy: Copy, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    root = copy(STACKED)
    key = "decoder.layers.mlp.linear_fc1.weight"

    def lose(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata[key].chunks
        storage = metadata.storage_data
        gone = chunks.pop().offsets
        for index in [i for i in storage if i.fqn == key and i.offset == gone]:
            del storage[index]

    _change(root, lose)
    with pytest.raises(IncompleteError):
        convert(root, tmp_path / "native", Wanted(format="native"), FAST)


def test_a_chunk_that_is_in_no_file(copy: Copy) -> None:
    pytest.importorskip("torch")
    root = copy(STACKED)
    key = "decoder.layers.mlp.linear_fc1.weight"

    def lose(metadata: Any) -> None:
        storage = metadata.storage_data
        del storage[next(i for i in storage if i.fqn == key)]

    _change(root, lose)
    with pytest.raises(IncompleteError, match="hole"):
        open_manifest(root)


def test_a_missing_shard_of_an_object(copy: Copy) -> None:
    root = copy("raw_tp2dp2_v012_flat")
    rename(root, "rng_state/shard_2_4", "rng_state/shard_2_5")
    with pytest.raises(CorruptError, match="shards"):
        open_manifest(root)


def test_metadata_that_run_code(copy: Copy, tmp_path: Path) -> None:
    import pickle

    class Canary:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    root = copy(STACKED)
    (root / ".metadata").write_bytes(pickle.dumps(Canary()))
    with pytest.raises(UnsafeError):
        open_manifest(root)
    assert not (tmp_path / "ran").exists()


KEY = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight"


def _change(root: Path, how: Callable[..., object]) -> None:
    """Change the metadata as torch's own objects; classes of Megatron-Core are stood in for."""
    import pickle
    import sys
    import types

    names = ["megatron", "megatron.core", "megatron.core.dist_checkpointing"]
    names += [names[-1] + ".strategies", names[-1] + ".strategies.torch"]
    there = {name: sys.modules.get(name) for name in names}
    try:
        for name in names:
            sys.modules[name] = types.ModuleType(name)
        plan = type("MCoreSavePlan", (), {"__module__": names[-1]})
        sys.modules[names[-1]].MCoreSavePlan = plan  # type: ignore[attr-defined]
        path = root / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        how(metadata)
        path.write_bytes(pickle.dumps(metadata))
    finally:
        for name, module in there.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


# -- zarr -----------------------------------------------------------------------------------------


def test_a_missing_chunk_of_zarr(copy: Copy) -> None:
    root = copy(ZARR)
    (root / "grid.weight" / "1.0").unlink()
    with pytest.raises(IncompleteError, match=r"grid\.weight/1\.0"):
        open_manifest(root)


def test_a_short_chunk_of_zarr(copy: Copy) -> None:
    root = copy(ZARR)
    path = root / "grid.weight" / "1.0"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptError, match="63 bytes"):
        open_manifest(root)


def test_an_array_of_zarr_that_is_gone(copy: Copy) -> None:
    root = copy(ZARR)
    (root / "col.weight" / ".zarray").unlink()
    with pytest.raises(IncompleteError, match="neither"):
        open_manifest(root)


def test_a_missing_shard_of_an_object_of_zarr(copy: Copy) -> None:
    root = copy(ZARR)
    (root / "rng_state" / "shard_2_4.pt").unlink()
    with pytest.raises(IncompleteError, match="number 2 is missing"):
        open_manifest(root)


def test_lock_folders_are_no_arrays(copy: Copy) -> None:
    root = copy(ZARR)
    assert (root / "optimizer.state.exp_avg.col.weight.sync").is_dir()
    assert not [key for key in open_manifest(root).tensors if ".sync" in key[0]]


# -- buckets --------------------------------------------------------------------------------------


def test_a_weight_that_fits_nothing_in_the_buckets(copy: Copy) -> None:
    for name in (BUCKETS, GATHERED):
        root = copy(name)
        path, offset = place(open_manifest(root), "decoder.final_layernorm.weight", "param")
        flip(path, offset + 1, 0x01)
        with pytest.raises(IncompleteError, match="no weight of the model that is left"):
            open_manifest(root)


def test_two_weights_that_fit_one_place(copy: Copy) -> None:
    root = copy(BUCKETS)
    manifest = open_manifest(root)
    first, second = (
        f"decoder.layers.{n}.self_attention.linear_qkv.layer_norm_weight" for n in "01"
    )
    # a bucket begins with the last layers, so that the second of these comes first
    path, offset = place(manifest, second, "param")
    content = path.read_bytes()[offset : offset + 32]
    path, offset = place(manifest, first, "param")
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)
    with pytest.raises(UnsupportedError, match="can't be told: 2 weights") as error:
        open_manifest(root)
    assert first in str(error.value)
    assert second in str(error.value)


def test_ranks_of_different_steps(copy: Copy) -> None:
    pytest.importorskip("torch")
    import io

    import torch

    root = copy(BUCKETS)
    path = root / "__1_0.distcp"
    content = path.read_bytes()
    length = 1645  # the first value of rank 1: its parameter groups
    value = torch.load(io.BytesIO(content[:length]), weights_only=False)
    value[0]["param_groups"][0]["step"] = 1
    stream = io.BytesIO()
    torch.save(value, stream)
    changed = stream.getvalue()
    assert len(changed) <= length + 64
    _change(root, lambda m: _moved(m, path.name, length, len(changed) - length))
    path.write_bytes(changed + content[length:])
    with pytest.raises(InconsistentError, match="different steps"):
        open_manifest(root)


def _moved(metadata: Any, name: str, first: int, by: int) -> None:
    """Blobs of a file that lie behind the first one are moved."""
    for info in metadata.storage_data.values():
        if info.relative_path == name:
            if info.offset == 0:
                info.length = first + by
            else:
                info.offset += by


def test_a_bucket_that_lacks_a_state(copy: Copy) -> None:
    root = copy(BUCKETS)
    bucket = "idx_1.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
    rename(root, f"{bucket}.exp_avg_sq", f"{bucket}.exp_avg_xx")
    with pytest.raises(IncompleteError, match="lacks exp_avg"):
        open_manifest(root)
