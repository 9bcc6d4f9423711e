"""Pieces of tensors in safetensors files, as torch's distributed checkpoints write them."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import reshard
from reshard.conversion import Wanted
from reshard.errors import (
    CorruptError,
    IncompleteError,
    InconsistentError,
    ReshardError,
    UnsupportedError,
)
from reshard.execute import Options

CASES = {
    "hf_p4_sharded": "ckpt",
    "hf_p4_consol": "ckpt/sharded",
    "hf_p4_consol_float": "ckpt/sharded",
}
INFO = "DCP_SHARDING_INFO"


@pytest.mark.parametrize("case", CASES)
def test_reads_equal_to_the_truth(fixtures_dir: Path, tmp_path: Path, case: str) -> None:
    """Every tensor, and a file made of them, is what the live ranks held."""
    folder = fixtures_dir / "dcp" / case
    checkpoint = reshard.open(folder / CASES[case])
    wanted = Wanted(format="safetensors")
    reshard.convert(folder / CASES[case], tmp_path / "w.safetensors", wanted, Options(sync=False))
    written = load_file(tmp_path / "w.safetensors")
    truth = load_file(folder / "truth.safetensors")
    model = {k.removeprefix("model."): v for k, v in truth.items() if k.startswith("model.")}
    assert set(checkpoint) == set(written)
    left = set(model) ^ set(written)
    assert left == ({"pos_ids", "n_seen", "logit_scale"} if case == "hf_p4_consol_float" else set())
    if left:  # the model was saved without its integers, and with a scalar more
        assert written["logit_scale"] == 2.5
    for name in set(model) & set(written):
        expected = model[name]
        for found in (checkpoint[name].numpy(), written[name]):
            assert found.dtype == expected.dtype
            assert found.shape == expected.shape
            assert found.tobytes() == expected.tobytes(), name


def test_a_consolidation_that_lost_scalars(fixtures_dir: Path) -> None:
    """torch wrote ``logit_scale`` as 0.0; the pieces beside it say 2.5."""
    with pytest.raises(InconsistentError, match="0-d 'logit_scale' isn't what it is in") as found:
        reshard.open(fixtures_dir / "dcp" / "hf_p4_consol_float" / "ckpt")
    assert "sharded instead" in str(found.value.hint)


def edited(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change a header in place; the payload stays."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def _offsets(header: dict[str, Any], change: Callable[[dict[str, Any]], None]) -> None:
    info = json.loads(header["__metadata__"][INFO])
    change(info)
    header["__metadata__"][INFO] = json.dumps(info)


def _moved(header: dict[str, Any], row: int) -> None:
    _offsets(header, lambda info: info["tok.weight"].update(saved_offsets=[row, 0]))


def _missing(folder: Path) -> None:
    (folder / "shard-00003-model-00001-of-00002.safetensors").unlink()


def _last_missing(folder: Path) -> None:
    (folder / "shard-00004-model-00002-of-00002.safetensors").unlink()


def _other_model(folder: Path) -> None:
    (folder / "shard-00004-model-00002-of-00002.safetensors").rename(
        folder / "shard-00004-model-00002-of-00003.safetensors"
    )


def _no_offsets(folder: Path) -> None:
    path = folder / "shard-00002-model-00001-of-00002.safetensors"
    edited(path, lambda h: _offsets(h, lambda info: info.pop("tok.weight")))


def _negative(folder: Path) -> None:
    path = folder / "shard-00002-model-00001-of-00002.safetensors"
    edited(path, lambda h: _moved(h, -1))


def _overlap(folder: Path) -> None:
    path = folder / "shard-00002-model-00001-of-00002.safetensors"
    edited(path, lambda h: _moved(h, 25))


def _hole(folder: Path) -> None:
    path = folder / "shard-00004-model-00001-of-00002.safetensors"
    edited(path, lambda h: _moved(h, 90))


@pytest.mark.parametrize(
    ("damage", "error", "text"),
    [
        (_missing, IncompleteError, "shard-00003-model-00001-of-00002.safetensors is missing"),
        (_last_missing, IncompleteError, "shard-00004-model-00002-of-00002.safetensors is missing"),
        (_other_model, InconsistentError, "models of 2 and 3 files"),
        (_no_offsets, CorruptError, r"no offsets of 'tok.weight' \[26, 36\]"),
        (_negative, CorruptError, "the offsets of 'tok.weight'"),
        (_overlap, ReshardError, r"tok\.weight"),
        (_hole, ReshardError, r"tok\.weight"),
    ],
)
def test_damage(
    fixtures_dir: Path,
    tmp_path: Path,
    damage: Callable[[Path], None],
    error: type[ReshardError],
    text: str,
) -> None:
    """What torch fills with zeros, or shrinks a tensor for, is found."""
    folder = tmp_path / "ckpt"
    shutil.copytree(fixtures_dir / "dcp" / "hf_p4_sharded" / "ckpt", folder)
    reshard.open(folder)
    damage(folder)
    with pytest.raises(error, match=text):
        reshard.open(folder)


def test_one_file_alone(fixtures_dir: Path) -> None:
    """A rank's file isn't a model."""
    folder = fixtures_dir / "dcp" / "hf_p4_sharded" / "ckpt"
    with pytest.raises(UnsupportedError, match="holds pieces of tensors"):
        reshard.open(folder / "shard-00001-model-00001-of-00002.safetensors")
