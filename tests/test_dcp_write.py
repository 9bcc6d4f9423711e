"""Does torch's own DCP load what is written here, and does it come back from everywhere?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reshard
from reshard.api import convert, open_manifest
from reshard.conversion import Wanted
from reshard.errors import RequestError
from reshard.execute import Options
from reshard.manifest import Manifest
from reshard.plain import encode
from tests import dcp_files as dcp
from tests import deepspeed_truth as deepspeed

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: E402
from torch.distributed.checkpoint.state_dict_loader import load as torch_load  # noqa: E402

from tests.dcp_ranks import load_saved, save_trained  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

FAST = Options(sync=False)
GOLDEN = ("z2_p4_bf16", "z3_p2_bf16_frozen_tied")


def _same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, np.ndarray):
            assert found[key].tobytes() == value.tobytes(), key
        else:
            assert found[key] == value, key


@pytest.fixture(scope="module", params=[False, True], ids=["nested", "flat"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint of two ranks, whether it is flat, and what was in it."""
    folder = tmp_path_factory.mktemp("saved") / "ckpt"
    return folder, request.param, run_ranks(save_trained, 2, str(folder), request.param)[0]


def test_torch_resumes_at_another_world_size(saved: Any, tmp_path: Path) -> None:
    """By way of the native format at 5 ranks, written for 3, loaded by 2: each step is the same."""
    folder, flat, expected = saved
    convert(folder, tmp_path / "native", Wanted(world=5, format="native"), FAST)
    convert(tmp_path / "native", tmp_path / "dcp", Wanted(world=3, format="dcp"), FAST)
    assert reshard.open(tmp_path / "dcp").world == 3
    found = run_ranks(load_saved, 2, str(tmp_path / "dcp"), flat)[0]
    _same(found["before"], expected["before"])
    _same(found["after"], expected["after"])
    assert found["epoch"] == 4


def _rest(manifest: Manifest) -> object:
    groups = [encode((dict(g.settings), dict(g.scalars), g.optimizer)) for g in manifest.groups]
    return encode(dict(manifest.objects)), groups


@pytest.mark.parametrize("name", [*dcp.GOOD, "dtypes_p1"])
def test_real_checkpoints_there_and_back(fixtures_dir: Path, tmp_path: Path, name: str) -> None:
    folder = fixtures_dir / "dcp" / name
    source = open_manifest(folder / "ckpt")
    convert(source, tmp_path / "native", Wanted(world=8, format="native"), FAST)
    convert(tmp_path / "native", tmp_path / "dcp", Wanted(world=3, format="dcp"), FAST)
    checkpoint = reshard.open(tmp_path / "dcp")
    assert set(checkpoint.manifest.tensors) == set(source.tensors)
    assert _rest(checkpoint.manifest) == _rest(source)
    for tensor, state, raw in dcp.truth(folder):
        assert dcp.held(checkpoint, tensor, state) == raw.tobytes(), (tensor, state)


def test_every_element_type_is_torch_s(fixtures_dir: Path, tmp_path: Path) -> None:
    folder = fixtures_dir / "dcp" / "dtypes_p1"
    convert(folder / "ckpt", tmp_path / "dcp", Wanted(world=2, format="dcp"), FAST)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    for name, _, raw in dcp.truth(folder):
        if not name.startswith("py."):
            tensor = found[name]
            assert tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() == (
                raw.tobytes()
            ), name
    assert found["py"]["tuple"] == (1, 2)
    assert found["py"]["bytes"] == b"abc"


@pytest.mark.parametrize("name", GOLDEN)
def test_deepspeed_s_state_is_loaded_by_torch(golden_dir: Path, tmp_path: Path, name: str) -> None:
    """Masters are the weights, tied names and buffers are there, and the steps."""
    wanted = Wanted(world=3, format="dcp", drop=("deepspeed",))
    convert(golden_dir / name / "ckpt", tmp_path / "dcp", wanted, FAST)
    truth = {key: array for _, key, array in deepspeed.truth(golden_dir / name)}
    names = {k.partition(".")[2] for k in truth if k.startswith("fp32.")}
    assert len(names) > 20
    state: dict[str, Any] = {"model": {}, "optim": {"state": {}}, "step": 0}
    for key in names:
        shape = truth[f"fp32.{key}"].shape
        state["model"][key] = torch.zeros(shape)
        if f"exp_avg.{key}" in truth:
            moments = {s: torch.zeros(shape) for s in ("exp_avg", "exp_avg_sq")}
            state["optim"]["state"][key] = {**moments, "step": torch.zeros(())}
    torch_load(state, checkpoint_id=tmp_path / "dcp")
    assert state["step"] == 3
    for key in names:
        assert np.array_equal(state["model"][key].numpy(), truth[f"fp32.{key}"]), key
        for one in ("exp_avg", "exp_avg_sq"):
            if f"{one}.{key}" in truth:
                moment = state["optim"]["state"][key][one].numpy()
                assert np.array_equal(moment, truth[f"{one}.{key}"]), key
                assert float(state["optim"]["state"][key]["step"]) == 3.0
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "all.pt")
    everything = torch.load(tmp_path / "all.pt", weights_only=True)
    groups = everything["optim"]["param_groups"]
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert sorted(n for g in groups for n in g["params"]) == sorted(everything["optim"]["state"])
    assert everything["my_iteration"] == 3
    if "tied" in name:
        tied = everything["model"]
        assert torch.equal(tied["head.weight"], tied["tok.weight"])


def test_what_is_lost_is_listed(golden_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(
        RequestError,
        match=r"deepspeed \(global_samples, .* more\): a distributed checkpoint has no place",
    ):
        convert(golden_dir / GOLDEN[0] / "ckpt", tmp_path / "dcp", Wanted(format="dcp"), FAST)


def test_a_stage_makes_no_sense(golden_dir: Path, tmp_path: Path) -> None:
    wanted = Wanted(format="dcp", stage=2)
    with pytest.raises(RequestError, match="of stage 3, not 2"):
        convert(golden_dir / GOLDEN[0] / "ckpt", tmp_path / "dcp", wanted, FAST)


def test_weights_are_cast_and_nothing_else(golden_dir: Path, tmp_path: Path) -> None:
    wanted = Wanted(format="dcp", dtype="bf16", keep=("lnf.*",), drop=("*",))
    convert(golden_dir / GOLDEN[0] / "ckpt", tmp_path / "dcp", wanted, FAST)
    checkpoint = reshard.open(tmp_path / "dcp")
    assert checkpoint["tok.weight"].dtype.name == "bfloat16"
    assert checkpoint["lnf.weight"].dtype.name == "float32"
    assert checkpoint["tok.weight", "exp_avg"].dtype.name == "float32"


def test_rows_are_cut_as_fsdp2_cuts_them(saved: Any, tmp_path: Path) -> None:
    """Where the world size is the same, so are the boxes."""
    folder, _, _ = saved
    convert(folder, tmp_path / "dcp", Wanted(world=2, format="dcp"), FAST)
    boxes = [
        sorted(
            (e.name, state, e.region.start, e.region.stop)
            for s in manifest.layout.spaces
            for state in s.states
            for e in s.entries
        )
        for manifest in (open_manifest(folder), open_manifest(tmp_path / "dcp"))
    ]
    assert boxes[0] == boxes[1]


def test_torch_is_not_needed(golden_dir: Path, tmp_path: Path) -> None:
    code = (
        "import sys, reshard; from reshard import Wanted;"
        "reshard.convert(sys.argv[1], sys.argv[2], Wanted(format='dcp', drop=('*',)));"
        "assert 'torch' not in sys.modules"
    )
    source = golden_dir / GOLDEN[0] / "ckpt"
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "dcp")]
    subprocess.run(command, check=True)
