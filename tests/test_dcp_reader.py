"""Does ``dcp.load`` bring a checkpoint of any format into a sharded model, and read no more?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reshard.api import consolidate, convert
from reshard.conversion import Wanted
from reshard.errors import RequestError
from reshard.execute import Options

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.state_dict_loader import load  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import save  # noqa: E402

from reshard.box import Box  # noqa: E402
from reshard.dcp import ZReader  # noqa: E402
from reshard.dcp import reader as reader_module  # noqa: E402
from tests import deepspeed_truth as deepspeed  # noqa: E402
from tests import scalar_group  # noqa: E402
from tests.dcp_ranks import (  # noqa: E402
    load_large,
    load_saved,
    save_large,
    save_trained,
)
from tests.ranks import run_ranks  # noqa: E402

FAST = Options(sync=False)


def _same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, np.ndarray):
            assert found[key].tobytes() == value.tobytes(), key
        else:
            assert found[key] == value, key


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("saved") / "ckpt"
    return folder, run_ranks(save_trained, 2, str(folder))[0]


@pytest.mark.parametrize(("kind", "flat"), [("dcp", False), ("native", False), ("native", True)])
def test_a_sharded_model_resumes(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path, kind: str, flat: bool
) -> None:
    folder, expected = saved
    if kind == "native":
        convert(folder, tmp_path / "native", Wanted(world=5, format="native"), FAST)
        folder = tmp_path / "native"
    found = run_ranks(load_saved, 3, str(folder), flat, True)[0]
    assert found["epoch"] == 4
    assert found["unread"] == (), "only values weren't asked for"
    _same(found["before"], expected["before"])


def test_a_group_of_one_scalar_parameter(tmp_path: Path) -> None:
    optimizer, model = scalar_group.stepped()
    inner = optimizer.state_dict()
    names = {0: "w", 1: "heat"}
    state = {
        "model": model,
        "optim": {
            "state": {names[i]: dict(one) for i, one in inner["state"].items()},
            "param_groups": [
                {**{k: v for k, v in g.items() if k != "param_names"}, "params": [names[i]]}
                for i, g in enumerate(inner["param_groups"])
            ],
        },
    }
    save(state, checkpoint_id=tmp_path / "ckpt")
    scalar_group.check(tmp_path / "ckpt", optimizer)


def _state(truth: dict[str, Any]) -> dict[str, Any]:
    """A state dict of zeros for the model of the golden checkpoints."""
    names = [k.partition(".")[2] for k in truth if k.startswith("fp32.")]
    assert len(names) > 20
    return {
        "model": {n: torch.zeros(truth[f"fp32.{n}"].shape) for n in names},
        "optim": {
            "state": {
                n: {
                    "exp_avg": torch.zeros(truth[f"exp_avg.{n}"].shape),
                    "step": torch.zeros(()),
                }
                for n in names
                if f"exp_avg.{n}" in truth
            }
        },
        "step": 0,
    }


@pytest.fixture(scope="module")
def truth(golden_dir: Path) -> dict[str, Any]:
    return {key: a for _, key, a in deepspeed.truth(golden_dir / "z2_p4_bf16")}


def test_deepspeed_without_a_conversion(golden_dir: Path, truth: dict[str, Any]) -> None:
    state = _state(truth)
    load(state, storage_reader=ZReader(golden_dir / "z2_p4_bf16" / "ckpt"))
    assert state["step"] == 3
    for name, tensor in state["model"].items():
        assert np.array_equal(tensor.numpy(), truth[f"fp32.{name}"]), name
    for name, states in state["optim"]["state"].items():
        assert np.array_equal(states["exp_avg"].numpy(), truth[f"exp_avg.{name}"]), name
        assert float(states["step"]) == 3.0


def test_safetensors_into_the_model_s_own_dict(
    golden_dir: Path, tmp_path: Path, truth: dict[str, Any]
) -> None:
    consolidate(golden_dir / "z2_p4_bf16" / "ckpt", tmp_path / "model.safetensors", options=FAST)
    state = _state(truth)["model"]
    reader = ZReader(tmp_path / "model.safetensors", model="")
    load(state, storage_reader=reader)
    for name, tensor in state.items():
        assert np.array_equal(tensor.numpy(), truth[f"fp32.{name}"]), name


def test_masters_into_a_16_bit_model(golden_dir: Path, truth: dict[str, Any]) -> None:
    """They are rounded as the engine rounded them."""
    weights = {k[3:]: v for k, v in truth.items() if k.startswith("lp.")}
    names = {k for k, v in weights.items() if v.dtype.name == "bfloat16"}
    assert len(names) > 20
    state = {"model": {n: torch.zeros(weights[n].shape, dtype=torch.bfloat16) for n in names}}
    load(state, storage_reader=ZReader(golden_dir / "z2_p4_bf16" / "ckpt"))
    for name, tensor in state["model"].items():
        found = tensor.view(torch.int16).numpy()
        assert np.array_equal(found, weights[name].view(np.int16)), name


def _tensor_of(tmp_path: Path, tensor: Any) -> Path:
    from torch.distributed.checkpoint.state_dict_saver import save

    save({"model": {"weight": tensor}}, checkpoint_id=tmp_path / "one")
    return tmp_path / "one"


def test_a_value_that_overflows_is_an_error(tmp_path: Path) -> None:
    folder = _tensor_of(tmp_path, torch.tensor([1.0, 70000.0]))
    state = {"model": {"weight": torch.zeros(2, dtype=torch.float16)}}
    with pytest.raises(CheckpointException, match="70000"):
        load(state, storage_reader=ZReader(folder))


def test_integers_are_not_converted(tmp_path: Path) -> None:
    folder = _tensor_of(tmp_path, torch.tensor([1, 2]))
    state = {"model": {"weight": torch.zeros(2)}}
    with pytest.raises(CheckpointException, match="int64 in the checkpoint and float32"):
        load(state, storage_reader=ZReader(folder))


def test_what_nobody_asks_for_is_told(golden_dir: Path, truth: dict[str, Any]) -> None:
    state = {"model": _state(truth)["model"]}
    reader = ZReader(golden_dir / "z2_p4_bf16" / "ckpt")
    load(state, storage_reader=reader)
    assert "optim.state.tok.weight.exp_avg" in reader.unread
    assert "model.tok.weight" not in reader.unread
    strict = ZReader(golden_dir / "z2_p4_bf16" / "ckpt", strict=True)
    with pytest.raises(CheckpointException, match="doesn't ask for"):
        load(state, storage_reader=strict)


def test_a_rank_reads_what_it_keeps(tmp_path: Path) -> None:
    """Saved by four ranks, loaded by eight: no more than 1.02 times the bytes of the shard."""
    run_ranks(save_large, 4, str(tmp_path / "ckpt"), 4001, 50)
    for read, kept, equal in run_ranks(load_large, 8, str(tmp_path / "ckpt"), 4001, 50):
        assert equal
        assert kept <= read <= 1.02 * kept


def test_large_boxes_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "PIECE", 100)
    box = Box((3, 1), (40, 6))
    found = list(reader_module.pieces(box, 4))
    assert found[0].start == (3, 1)
    assert found[-1].stop == (40, 6)
    assert [a.stop[0] for a in found[:-1]] == [b.start[0] for b in found[1:]]
    assert all(piece.numel * 4 <= 100 for piece in found)
    assert list(reader_module.pieces(Box((), ()), 4)) == [Box((), ())]


def test_pieces_make_up_the_tensor(
    golden_dir: Path, truth: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "PIECE", 100)
    test_deepspeed_without_a_conversion(golden_dir, truth)


def test_torch_is_loaded_late() -> None:
    import subprocess
    import sys

    code = "import sys, reshard.dcp; assert 'torch' not in sys.modules; reshard.dcp.ZReader"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_checkpoint(tmp_path: Path) -> None:
    assert not ZReader.validate_checkpoint_id(tmp_path / "nothing")
    with pytest.raises(CheckpointException, match="no checkpoint"):
        load({"a": torch.zeros(1)}, storage_reader=ZReader(tmp_path))
    assert issubclass(RequestError, Exception)
