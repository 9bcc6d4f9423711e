"""Which files at a path are the model, what does an index decide, and what is refused?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_safetensors import INDEX, put, some_arrays, texts, whole

from reshard.errors import (
    CorruptError,
    IncompleteError,
    NotFoundError,
    RequestError,
    UnsafeError,
    UnsupportedError,
)
from reshard.format import Request
from reshard.formats import detect
from reshard.formats.safetensors import FORMAT
from reshard.layout import PARAM
from reshard.read import Reader


def put_index(folder: Path, weight_map: Any, **more: Any) -> Path:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map, **more}))
    return folder / INDEX


def test_what_is_recognised(tmp_path: Path) -> None:
    file = put(tmp_path / "one", "weights.safetensors", some_arrays())
    assert FORMAT.detect(file) is not None
    found = FORMAT.detect(tmp_path / "one")
    assert found is not None
    assert found.root == tmp_path / "one"
    assert set(FORMAT.open(tmp_path / "one").tensors) == {(n, PARAM) for n in some_arrays()}
    plain = shutil.copy(file, tmp_path / "no-ending")
    assert FORMAT.detect(Path(plain)) is not None
    assert whole(FORMAT.open(Path(plain))) == whole(FORMAT.open(file))
    assert detect(file)[0] is FORMAT
    for name, raw in (("a.txt", b"{}"), ("b", b""), ("c", b"\x02" + bytes(7) + b"[]")):
        (tmp_path / name).write_bytes(raw)
        assert FORMAT.detect(tmp_path / name) is None
    (tmp_path / "empty").mkdir()
    assert FORMAT.detect(tmp_path / "empty") is None
    assert FORMAT.detect(tmp_path / "gone") is None
    with pytest.raises(NotFoundError):
        FORMAT.open(tmp_path / "empty")
    with pytest.raises(NotFoundError):
        FORMAT.open(tmp_path / "gone.safetensors")


def test_the_manifest_of_a_file(tmp_path: Path) -> None:
    path = put(tmp_path, "a.safetensors", some_arrays())
    manifest = FORMAT.open(path)
    assert manifest.format == "safetensors"
    assert manifest.root == path
    assert manifest.path(0) == path
    assert dict(manifest.layout.mesh) == {"shard": 1}
    assert manifest.layout.stage is None
    assert {d.name for s in manifest.layout.spaces for d in s.states.values()} == {
        "float16", "float32", "float64", "int64"
    }  # fmt: skip
    reader = Reader(manifest)
    for name, array in some_arrays().items():
        tensor = manifest.tensors[name, PARAM]
        box = manifest.space(tensor.places[0][0]).entries[tensor.places[0][1]].region
        assert np.array_equal(reader.region(tensor, box), array)


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    put(tmp_path, "a.safetensors", {"a": np.ones(1)})
    put(tmp_path, "b.safetensors", {"b": np.ones(1)})
    assert FORMAT.detect(tmp_path) is not None
    with pytest.raises(IncompleteError, match="2 safetensors files and no index"):
        FORMAT.open(tmp_path)
    put(tmp_path, "model.safetensors", {"m": np.ones(1)})
    manifest = FORMAT.open(tmp_path)
    assert set(manifest.tensors) == {("m", PARAM)}
    assert {n.where for n in manifest.notes} == {"a.safetensors", "b.safetensors"}


def test_numbered_files_without_their_index_are_refused(tmp_path: Path) -> None:
    file = put(tmp_path, "model-00001-of-00002.safetensors", {"a": np.ones(1)})
    with pytest.raises(IncompleteError, match="numbered shards"):
        FORMAT.open(tmp_path)
    assert "one of 2 files" in texts(FORMAT.open(file).notes)
    put(tmp_path, "model.safetensors", {"m": np.ones(1)})
    with pytest.raises(IncompleteError, match="numbered shards"):
        FORMAT.open(tmp_path)
    single = put(tmp_path / "x", "model-00001-of-00001.safetensors", {"a": np.ones(1)})
    assert FORMAT.open(single.parent).notes == ()


def two_shards(folder: Path, **more: Any) -> Path:
    put(folder, "model-00001-of-00002.safetensors", {"a": np.ones(2), "b": np.ones(3, np.int8)})
    put(folder, "model-00002-of-00002.safetensors", {"c": np.zeros((2, 2), np.float16)})
    one, two = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    put_index(folder, {"a": one, "b": one, "c": two}, **more)
    return folder


def test_an_index_is_followed(tmp_path: Path) -> None:
    folder = two_shards(tmp_path / "m", metadata={"total_size": 27, "total_parameters": 9})
    for path in (folder, folder / INDEX):
        found = FORMAT.detect(path)
        assert found is not None
        manifest = FORMAT.open(found.root)
        assert manifest.root == folder
        assert set(manifest.tensors) == {(n, PARAM) for n in "abc"}
        assert manifest.notes == ()


def test_the_hub_keeps_its_files_as_links(tmp_path: Path) -> None:
    folder = two_shards(tmp_path / "m")
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(tmp_path / "blobs" / str(number))
        file.symlink_to(Path("..") / "blobs" / str(number))
    assert set(FORMAT.open(folder).tensors) == {(n, PARAM) for n in "abc"}


def test_the_index_decides_over_stale_tensors(tmp_path: Path) -> None:
    folder = two_shards(tmp_path)
    put(folder, "model-00002-of-00002.safetensors", {"c": np.ones(7), "a": np.zeros(9)})
    put(folder, "old.safetensors", {"x": np.ones(1)})
    manifest = FORMAT.open(folder)
    assert manifest.tensors["a", PARAM].shape == (2,)
    assert manifest.tensors["c", PARAM].shape == (7,)
    assert "model-00002-of-00002.safetensors: holds tensors that the index" in texts(manifest.notes)
    assert "old.safetensors: isn't named by the index" in texts(manifest.notes)


def test_what_the_index_says_of_sizes_is_compared(tmp_path: Path) -> None:
    folder = two_shards(tmp_path, metadata={"total_size": 99, "made_by": "x"})
    notes = texts(FORMAT.open(folder).notes)
    assert "total_size is 99, but the tensors take 27 bytes" in notes
    assert "left-out" in notes
    assert "'made_by'" in notes


def test_missing_shards_and_tensors(tmp_path: Path) -> None:
    folder = two_shards(tmp_path)
    put(folder, "model-00002-of-00002.safetensors", {"x": np.ones(7)})
    with pytest.raises(IncompleteError, match=r"'c' in model-00002-of-00002\.safetensors"):
        FORMAT.open(folder)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(CorruptError, match=r"model-00002-of-00002\.safetensors: has 0 bytes"):
        FORMAT.open(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(IncompleteError, match="model-00002-of-00002"):
        FORMAT.open(folder)
    (folder / "model-00002-of-00002.safetensors").mkdir()
    with pytest.raises(IncompleteError, match="model-00002-of-00002"):
        FORMAT.open(folder)


@pytest.mark.parametrize(
    "name",
    ["../x", "/x", "a/../../x", "C:x", "c:\\x", "a\\b", "", ".", "..", "a//b", "a/", "./a", "a\0b"],
)
def test_names_that_leave_the_folder_are_unsafe(tmp_path: Path, name: str) -> None:
    put(tmp_path / "m", "a.safetensors", {"a": np.ones(1)})
    put(tmp_path, "x", {"a": np.ones(1)})
    put_index(tmp_path / "m", {"a": name})
    with pytest.raises(UnsafeError, match="outside its folder"):
        FORMAT.open(tmp_path / "m")


def test_a_file_in_a_folder_below(tmp_path: Path) -> None:
    put(tmp_path / "m" / "below", "a.safetensors", {"a": np.ones(1)})
    put_index(tmp_path / "m", {"a": "below/a.safetensors"})
    manifest = FORMAT.open(tmp_path / "m")
    assert manifest.path(0) == tmp_path / "m" / "below" / "a.safetensors"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "isn't valid JSON"),
        (b"[]", "not an object"),
        (b"{}", "no weight_map"),
        (b'{"weight_map": []}', "weight_map is"),
        (b'{"weight_map": {}}', "weight_map is empty"),
        (b'{"weight_map": {"a": 1, "b": null}}', r"2 problems(.|\n)*'a' is 1(.|\n)*'b' is None"),
        (b'{"weight_map": {"a": "x", "a": "y"}}', "'a' occurs more than once"),
        (b'{"weight_map": {"a": "x"}, "weight_map": {"a": "x"}}', "occurs more than once"),
        (b'{"weight_map": {"\\ud800": "x"}}', "Unicode"),
        (b'{"weight_map": {"a": "\\ud800"}}', "not text"),
        (b'{"weight_map": {"a": "x"}, "metadata": 3}', "metadata is 3"),
        (b'{"weight_map": {"a": "x"}}' + b" " * (10 << 20), "loaders refuse more than 10485760"),
    ],
)
def test_broken_indexes(tmp_path: Path, raw: bytes, message: str) -> None:
    (tmp_path / INDEX).write_bytes(raw)
    with pytest.raises(CorruptError, match=message) as caught:
        FORMAT.open(tmp_path)
    assert INDEX in str(caught.value)


def test_two_models_in_a_folder(tmp_path: Path) -> None:
    folder = two_shards(tmp_path)
    file = put(folder, "model.safetensors", {"a": np.ones(9)})
    with pytest.raises(RequestError, match="two models"):
        FORMAT.open(folder)
    assert FORMAT.open(file).tensors["a", PARAM].shape == (9,)
    put_index(folder, {"a": "model.safetensors"})
    assert set(FORMAT.open(folder).tensors) == {("a", PARAM)}


def test_several_indexes(tmp_path: Path) -> None:
    folder = two_shards(tmp_path)
    other = folder / "model.fp16.safetensors.index.json"
    shutil.copy(folder / INDEX, other)
    assert len(FORMAT.open(folder).tensors) == 3
    (folder / INDEX).rename(folder / "x.safetensors.index.json")
    with pytest.raises(RequestError, match="several indexes"):
        FORMAT.open(folder)
    assert len(FORMAT.open(other).tensors) == 3
    other.unlink()
    assert len(FORMAT.open(folder).tensors) == 3


def test_text_that_the_files_disagree_on(tmp_path: Path) -> None:
    put(tmp_path, "1.safetensors", {"a": np.ones(1)}, format="pt", step="1", only="x")
    put(tmp_path, "2.safetensors", {"b": np.ones(1)}, format="pt", step="2")
    put_index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    manifest = FORMAT.open(tmp_path)
    assert manifest.objects["safetensors"]["metadata"] == {"only": "x"}
    assert "left-out" in texts(manifest.notes)
    assert "'step'" in texts(manifest.notes)
    draft = FORMAT.draft(manifest, Request(), tmp_path / "x.safetensors")
    assert any("'step'" in loss.why for loss in draft.losses)


def test_pieces_of_tensors_are_refused(fixtures_dir: Path) -> None:
    folder = fixtures_dir / "dcp" / "hf_p4_sharded" / "ckpt"
    for file in sorted(folder.glob("*.safetensors"))[:2]:
        with pytest.raises(UnsupportedError, match="pieces of tensors"):
            FORMAT.open(file)
