"""What a training script stored beside the model comes back as it was, by way of native too.

The values are pickled by torch itself and, in the target, loaded by torch itself.
"""

from __future__ import annotations

import enum
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reshard.api import convert, open_manifest
from reshard.builder import Builder
from reshard.conversion import Wanted
from reshard.errors import CorruptError, RequestError
from reshard.execute import Options
from reshard.formats._torch import Values
from reshard.pickle_write import Call, Global, NewObj
from reshard.plain import LeftOut, NumpyArray
from reshard.stored import Device, DTypeName
from reshard.torchfile import open_torch_file
from reshard.torchfile_write import write_torch_file

torch = pytest.importorskip("torch")

FAST = Options(sync=False, workers=2)
MODEL = "mp_rank_00_model_states.pt"


class Kind(enum.Enum):
    """Of a training script: its class isn't known to anybody else."""

    LEARNED = 1


def arguments() -> Namespace:
    """As Megatron keeps them: a namespace with an element type in it."""
    return Namespace(
        params_dtype=torch.bfloat16,
        device=torch.device("cuda", 1),
        lr=3e-4,
        shape=(2, 3),
        nested=Namespace(rope=True, table={1: "a"}),
        empty=Namespace(),
        loss=np.float32(2.5),
    )


def values() -> dict[str, Any]:
    """One of each kind."""
    return {
        "args": arguments(),
        "numpy_rng": np.random.RandomState(7).get_state(),
        "history": np.arange(12, dtype=np.float32).reshape(3, 4).T,
        "big_endian": np.arange(3, dtype=">i4"),
        "empty": np.zeros((0, 3), np.int8),
        "zero_dims": np.array(4.5),
        "flags": np.array([True, False]),
        "complex": np.array([1 + 2j]),
        "large": np.arange(100_000, dtype=np.int64),
        "numbers": [np.float64(0.1), np.float32(0.1), np.int64(-7), np.bool_(True)],
        "tensor": torch.arange(4),
        "large_tensor": torch.arange(100_000),
        "dtypes": {torch.float16: "half", "default": torch.float32},
        "devices": [torch.device("cpu"), torch.device("cuda:0")],
        "sets": [{1, 2}, frozenset((1, 2))],
        "plain": {"a": (1, 2.5, None, True, b"\x00\xff"), 3: "b"},
    }


@pytest.fixture
def saved(golden_dir: Path, tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """Save values with a real checkpoint, as a script gives them to ``save_checkpoint``."""

    def save(client: dict[str, Any]) -> Path:
        shutil.copytree(golden_dir / "z2_p4_bf16" / "ckpt", tmp_path / "ckpt")
        path = tmp_path / "ckpt" / "global_step3" / MODEL
        state = torch.load(path, weights_only=False)
        torch.save({**state, **client}, path)
        return tmp_path / "ckpt"

    return save


def loaded(root: Path) -> dict[str, Any]:
    """The model file as torch loads it."""
    state: dict[str, Any] = torch.load(root / "global_step3" / MODEL, weights_only=False)
    return state


def same(a: Any, b: Any) -> bool:
    """Equal in value and type."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Namespace):
        return same(vars(a), vars(b))
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype.newbyteorder("=") == b.dtype.newbyteorder("=") and np.array_equal(a, b)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("way", ["deepspeed", "native"])
def test_values_come_back_as_they_were(
    saved: Callable[[dict[str, Any]], Path], tmp_path: Path, way: str, stage: int
) -> None:
    source = saved(values())
    assert not [n for n in open_manifest(source).notes if n.kind == "left-out"]
    convert(source, tmp_path / "there", Wanted(format=way, world=3, stage=stage), FAST)
    convert(tmp_path / "there", tmp_path / "back", Wanted(format="deepspeed", world=4), FAST)
    name = MODEL if stage < 3 else f"zero_pp_rank_3_{MODEL}"
    found = torch.load(tmp_path / "back" / "global_step3" / name, weights_only=False)
    for key, value in values().items():
        assert same(found[key], value), key


def test_what_the_reader_gives(saved: Callable[[dict[str, Any]], Path]) -> None:
    client = open_manifest(saved(values())).objects["client"]
    args = client["args"]
    assert type(args) is Namespace
    assert (type(args.params_dtype), args.params_dtype) == (DTypeName, "bfloat16")
    assert (type(args.device), args.device) == (Device, "cuda:1")
    assert args.nested.table == {1: "a"}
    assert type(args.loss) is np.float32
    assert type(client["history"]) is NumpyArray
    assert np.array_equal(client["history"], values()["history"])
    assert type(client["tensor"]) is np.ndarray
    assert client["sets"] == [{1, 2}, frozenset((1, 2))]
    assert [type(s) for s in client["sets"]] == [set, frozenset]


def test_a_value_of_another_class_leaves_a_hole(
    saved: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    odd = {
        "args": Namespace(kind=Kind.LEARNED, lr=0.5),
        "objects": [np.array([None, "a"], object), np.array(["text"]), 1],
        "function": {"hook": torch.nn.functional.relu, "a": 1},
        "set": {torch.zeros(1)},
        "keys": {torch.zeros(1): 1},
    }
    source = saved(odd)
    holes = {
        "client:args/kind": "Kind",
        "client:objects/0": "numpy.ndarray",
        "client:objects/1": "numpy.ndarray",
        "client:function/hook": "torch.nn.functional.relu",
        "client:set": "set",
    }
    notes = [n for n in open_manifest(source).notes if n.kind == "left-out"]
    assert [f"client:{n.where}" for n in notes] == list(holes)
    for format_name in ("deepspeed", "native"):
        target = tmp_path / format_name
        with pytest.raises(RequestError) as error:
            convert(source, target, Wanted(format=format_name, world=2), FAST)
        for hole, what in holes.items():
            place = hole if format_name == "deepspeed" else hole.removeprefix("client:")
            assert place in str(error.value)
            assert what in str(error.value)
        convert(source, target, Wanted(format=format_name, world=2, drop=("*",)), FAST)
        convert(target, tmp_path / f"{format_name}.back", Wanted(format="deepspeed", drop=("*",)))
        found = loaded(tmp_path / f"{format_name}.back")
        assert same(found["args"], Namespace(lr=0.5))
        assert found["objects"] == [None, None, 1]
        assert found["function"] == {"a": 1}


def test_a_namespace_that_is_more_than_that(tmp_path: Path) -> None:
    """Nothing that a file says of a namespace is run or reaches outside of its attributes."""
    namespace = Global("argparse", "Namespace")
    odd = {
        "called": Call(namespace, (1,), {"a": 1}),
        "attributes": NewObj(namespace, {"__class__": "x", "__dict__": {}, "a": 1}),
    }
    write_torch_file(tmp_path / "odd.pt", odd)
    file = open_torch_file(tmp_path / "odd.pt")
    builder = Builder("", tmp_path)
    found = Values(builder, file).plain(file.value)
    assert found["called"] == LeftOut("argparse.Namespace")
    assert type(found["attributes"]) is Namespace
    assert vars(found["attributes"]) == {"__class__": "x", "__dict__": {}, "a": 1}
    write_torch_file(tmp_path / "bad.pt", {"a": NewObj(namespace, {1: 2})})
    bad = open_torch_file(tmp_path / "bad.pt")
    with pytest.raises(CorruptError, match="isn't attributes"):
        Values(builder, bad).plain(bad.value)


def test_a_device_that_is_none(tmp_path: Path) -> None:
    for args in (("cuda:0:1",), ("cuda", -1), ("CUDA 0",), (0,), ("cpu", "0"), ("cpu\n",)):
        write_torch_file(tmp_path / "d.pt", {"a": Call(Global("torch", "device"), args)})
        with pytest.raises(CorruptError, match="a device is"):
            open_torch_file(tmp_path / "d.pt")
