"""Files of ``torch.save``: read as what torch made, and written so that plain torch goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

import reshard  # noqa: E402
from reshard.conversion import Wanted  # noqa: E402
from reshard.errors import (  # noqa: E402
    CorruptError,
    IncompleteError,
    InconsistentError,
    RequestError,
    ReshardError,
    UnsafeError,
    UnsupportedError,
)
from reshard.execute import Options  # noqa: E402
from reshard.formats import detect  # noqa: E402
from tests import scalar_group  # noqa: E402

QUICK = Options(sync=False)
WITH_OPTIMIZER = Wanted(format="torch", optimizer=True)


def model() -> Any:
    """A model with weights, running statistics and a tied weight."""
    found = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 7), torch.nn.Linear(7, 7)
    )
    found[3].weight = found[2].weight
    return found


def optimizer_of(module: Any, *, names: bool) -> Any:
    """AdamW with two groups, which know their parameters' names or not."""
    groups: list[dict[str, Any]] = []
    for decay, dims in ((0.1, (2,)), (0.0, (0, 1))):
        some = [(n, p) for n, p in module.named_parameters() if p.ndim in dims]
        params: Any = some if names else [p for _, p in some]
        groups.append({"params": params, "weight_decay": decay})
    return torch.optim.AdamW(groups, lr=1e-3)


def train(module: Any, optimizer: Any, steps: int, seed: int = 0) -> list[float]:
    """Train on numbers that depend on the seed alone; returns the losses."""
    random = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module(torch.randn(8, 5, generator=random)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A file as training scripts save them."""
    torch.manual_seed(3)
    module = model()
    optimizer = optimizer_of(module, names=True)
    train(module, optimizer, 3)
    value = {
        "model": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "step": 3,
        "scheduler": {"last_epoch": 3, "_last_lr": [0.001]},
        "rng": torch.get_rng_state(),
    }
    torch.save(value, tmp_path / "last.pt")
    return tmp_path / "last.pt"


def same(one: Any, other: Any, path: str = "") -> None:
    """Values are equal, in every type and bit."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, path
        assert one.shape == other.shape, path
        assert one.numpy().tobytes() == other.numpy().tobytes(), path
    elif isinstance(one, dict):
        assert set(one) == set(other), path
        for key in one:
            same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, (list, tuple)):
        assert type(one) is type(other), path
        assert len(one) == len(other), path
        for at, (mine, its) in enumerate(zip(one, other, strict=True)):
            same(mine, its, f"{path}/{at}")
    else:
        assert type(one) is type(other), path
        assert one == other, path


def raw_bytes(tensor: Any) -> bytes:
    """A tensor's row-major bytes, whatever its type."""
    flat = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)
    return bytes(flat.view(torch.uint8).numpy())


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 3, 8])
def test_there_and_back(trained: Path, tmp_path: Path, stage: int, world: int) -> None:
    """By way of native at any world size and stage, all of the file comes back."""
    native = Wanted(format="native", world=world, stage=stage)
    reshard.convert(trained, tmp_path / "native", native, QUICK)
    reshard.convert(tmp_path / "native", tmp_path / "back.pt", WITH_OPTIMIZER, QUICK)
    same(torch.load(trained), torch.load(tmp_path / "back.pt"))


def test_a_group_of_one_scalar_parameter(tmp_path: Path) -> None:
    optimizer, model_dict = scalar_group.stepped()
    state = {"model": model_dict, "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "in.pt")
    scalar_group.check(tmp_path / "in.pt", optimizer)
    native = Wanted(format="native", world=3, stage=3)
    reshard.convert(tmp_path / "in.pt", tmp_path / "native", native, QUICK)
    reshard.convert(tmp_path / "native", tmp_path / "back.pt", WITH_OPTIMIZER, QUICK)
    same(torch.load(tmp_path / "in.pt"), torch.load(tmp_path / "back.pt"))


def test_training_goes_on(trained: Path, tmp_path: Path) -> None:
    """A new model and optimizer that load what was written train to the same losses."""
    reshard.convert(trained, tmp_path / "again.pt", WITH_OPTIMIZER, QUICK)
    losses = []
    for path in (trained, tmp_path / "again.pt"):
        module = model()
        optimizer = optimizer_of(module, names=False)
        saved = torch.load(path)
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        losses.append(train(module, optimizer, 3, seed=1))
    assert losses[0] == losses[1]


def test_a_state_dict_alone(trained: Path, tmp_path: Path) -> None:
    """Without the optimizer the file is what ``load_state_dict`` takes."""
    reshard.convert(trained, tmp_path / "w.pth", Wanted(format="torch", drop=("*",)), QUICK)
    saved = torch.load(tmp_path / "w.pth")
    same(dict(saved), dict(torch.load(trained)["model"]))
    assert saved["2.weight"].data_ptr() == saved["3.weight"].data_ptr(), "tied"
    model().load_state_dict(saved, strict=True)


def test_deepspeed_comes_to_torch(golden_dir: Path, tmp_path: Path) -> None:
    """Masters, moments, steps and groups of a ZeRO checkpoint, in the optimizer's form."""
    source = golden_dir / "z2_p4_bf16" / "ckpt"
    wanted = Wanted(format="torch", optimizer=True, drop=("*",))
    reshard.convert(source, tmp_path / "w.pt", wanted, QUICK)
    checkpoint, saved = reshard.open(source), torch.load(tmp_path / "w.pt")
    number = 0
    for group in saved["optimizer"]["param_groups"]:
        for at, name in zip(group["params"], group["param_names"], strict=True):
            assert at == number
            number += 1
            state = saved["optimizer"]["state"][at]
            for kind in ("exp_avg", "exp_avg_sq"):
                same(state[kind], torch.from_numpy(checkpoint[name, kind].numpy()))
            assert state["step"].dtype == torch.float32
            assert state["step"].item() == 3
            same(saved["model"][name], torch.from_numpy(checkpoint[name, "master"].numpy()))
    assert number == len(checkpoint.state("exp_avg"))


# -- whose state is whose -------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["zero_p2", "zero_p4_tied"])
@pytest.mark.parametrize("grouped", [True, False])
def test_zero_redundancy_optimizer(
    fixtures_dir: Path, tmp_path: Path, case: str, grouped: bool
) -> None:
    """Its consolidated files number parameters; the user's list names them."""
    folder = fixtures_dir / "dcp" / case
    path = tmp_path / "consolidated.pt"
    shutil.copy(folder / "ckpt" / "consolidated.pt", path)
    names = json.loads((folder / "info.json").read_text())["group_names"]
    listed = names if grouped else [name for some in names for name in some]
    (tmp_path / "consolidated.pt.names.json").write_text(json.dumps(listed))
    checkpoint = reshard.open(path)
    compared = 0
    for key, value in load_file(folder / "truth.safetensors").items():
        kind, name = key.split(".", 1)
        if kind == "model":
            same(value, torch.from_numpy(checkpoint[name, "param"].numpy()), key)
        elif name.endswith(".step"):
            assert [g.scalars["step"] for g in checkpoint.groups] == [value, value]
        else:
            name, _, state = name.rpartition(".")
            same(value, torch.from_numpy(checkpoint[name, state].numpy()), key)
        compared += 1
    assert compared > 100


def test_without_names_it_is_kept_by_number(fixtures_dir: Path, tmp_path: Path) -> None:
    """Nothing is guessed, a note says what to do, and nothing is lost."""
    path = fixtures_dir / "dcp" / "zero_p2" / "ckpt" / "consolidated.pt"
    checkpoint = reshard.open(path)
    (note,) = checkpoint.manifest.notes
    assert "consolidated.pt.names.json" in note.text
    assert not checkpoint.groups
    native = Wanted(format="native", world=2, stage=1)
    reshard.convert(path, tmp_path / "native", native, QUICK)
    reshard.convert(tmp_path / "native", tmp_path / "back.pt", WITH_OPTIMIZER, QUICK)
    same(torch.load(path), torch.load(tmp_path / "back.pt"))


def numbered(tmp_path: Path) -> Path:
    """A file whose optimizer has no names."""
    module = model()
    optimizer = optimizer_of(module, names=False)
    train(module, optimizer, 1)
    torch.save(
        {"model": module.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt"
    )
    return tmp_path / "a.pt"


@pytest.mark.parametrize(
    ("names", "error", "text"),
    [
        (["0.weight"], InconsistentError, "lists 1 names, and the optimizer has 7 parameters"),
        ([["0.weight"], []], InconsistentError, r"for \[1, 0\] parameters, .* have \[2, 5\]"),
        (
            ["2.weight", "0.weight", "0.bias", "1.weight", "1.bias", "2.bias", "3.bias"],
            InconsistentError,
            r"2.weight is \[7, 7\] in the model, and its optimizer state is .*\[7, 5\]",
        ),
        (
            ["0.weight", "9.weight", "0.bias", "1.weight", "1.bias", "2.bias", "3.bias"],
            InconsistentError,
            "state of 9.weight, which the model doesn't have",
        ),
        (
            ["0.weight", "2.weight", "0.bias", "0.bias", "1.bias", "2.bias", "3.bias"],
            InconsistentError,
            "two parameters are named '0.bias'",
        ),
        ({"0.weight": 0}, CorruptError, "should be a list of names"),
        ("{", CorruptError, "isn't JSON"),
    ],
)
def test_names_that_do_not_fit(
    tmp_path: Path, names: Any, error: type[ReshardError], text: str
) -> None:
    """A list that can't be right is refused: too short, another order, strange names."""
    path = numbered(tmp_path)
    content = names if isinstance(names, str) else json.dumps(names)
    path.with_name("a.pt.names.json").write_text(content)
    with pytest.raises(error, match=text):
        reshard.open(path)


def test_the_right_names(tmp_path: Path) -> None:
    path = numbered(tmp_path)
    names = [["0.weight", "2.weight"], ["0.bias", "1.weight", "1.bias", "2.bias", "3.bias"]]
    path.with_name("a.pt.names.json").write_text(json.dumps(names))
    saved = torch.load(path)["optimizer"]["state"]
    checkpoint = reshard.open(path)
    for at, name in enumerate(name for some in names for name in some):
        same(saved[at]["exp_avg"], torch.from_numpy(checkpoint[name, "exp_avg"].numpy()), name)


# -- what a file can look like --------------------------------------------------------------------


class Counting(torch.nn.Linear):  # type: ignore[misc]
    """A module with extra state, as some quantized ones have."""

    def get_extra_state(self) -> dict[str, int]:
        return {"count": 5}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


def test_extra_state(tmp_path: Path) -> None:
    """What modules add to a state dict that isn't a tensor comes back too."""
    module = torch.nn.Sequential(Counting(3, 3))
    torch.save(module.state_dict(), tmp_path / "a.pt")
    reshard.convert(tmp_path / "a.pt", tmp_path / "native", Wanted(format="native"), QUICK)
    reshard.convert(tmp_path / "native", tmp_path / "b.pt", Wanted(format="torch"), QUICK)
    same(dict(torch.load(tmp_path / "a.pt")), dict(torch.load(tmp_path / "b.pt")))


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "module"])
@pytest.mark.parametrize("optimizer", ["optimizer_state_dict", "optim", "optimizer_states"])
def test_other_keys(tmp_path: Path, key: str, optimizer: str) -> None:
    """The keys that other scripts use are found, and written again."""
    module = model()
    adam = optimizer_of(module, names=True)
    train(module, adam, 1)
    state: Any = adam.state_dict()
    listed = optimizer == "optimizer_states"
    torch.save(
        {key: module.state_dict(), optimizer: [state] if listed else state}, tmp_path / "a.pt"
    )
    checkpoint = reshard.open(tmp_path / "a.pt")
    assert len(checkpoint.state("exp_avg")) == 7
    reshard.convert(tmp_path / "a.pt", tmp_path / "b.pt", WITH_OPTIMIZER, QUICK)
    same(torch.load(tmp_path / "a.pt"), torch.load(tmp_path / "b.pt"))


def test_strides_offsets_and_types(tmp_path: Path) -> None:
    """Views, transposed tensors, 0-d, empty and every type torch has here."""
    base = torch.arange(60, dtype=torch.float32)
    value = {
        "view": base[3:9],
        "transposed": base.reshape(6, 10).t(),
        "column": base.reshape(6, 10)[:, 2],
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        **{
            str(kind): torch.arange(5).to(kind)
            for kind in (torch.bool, torch.int64, torch.uint8, torch.float16, torch.bfloat16)
        },
        "f8": torch.arange(5, dtype=torch.float32).to(torch.float8_e4m3fn),
    }
    torch.save(value, tmp_path / "a.pt")
    checkpoint = reshard.open(tmp_path / "a.pt")
    for name, tensor in value.items():
        found = checkpoint[name].numpy()
        assert found.tobytes() == raw_bytes(tensor), name
        assert found.shape == tuple(tensor.shape)
    reshard.convert(tmp_path / "a.pt", tmp_path / "b.pt", Wanted(format="torch"), QUICK)
    again = torch.load(tmp_path / "b.pt")
    for name, tensor in value.items():
        assert again[name].dtype == tensor.dtype
        assert again[name].shape == tensor.shape
        assert raw_bytes(again[name]) == raw_bytes(tensor), name


def test_folder_of_transformers(tmp_path: Path) -> None:
    """``pytorch_model.bin.index.json`` decides which file a tensor comes from."""
    folder = tmp_path / "hf"
    folder.mkdir()
    torch.save(
        {"a": torch.ones(3), "stale": torch.zeros(2)}, folder / "pytorch_model-00001-of-00002.bin"
    )
    torch.save({"b": torch.full((2, 2), 7.0)}, folder / "pytorch_model-00002-of-00002.bin")
    index = {
        "metadata": {"total_size": 28},
        "weight_map": {
            "a": "pytorch_model-00001-of-00002.bin",
            "b": "pytorch_model-00002-of-00002.bin",
        },
    }
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    checkpoint = reshard.open(folder)
    assert set(checkpoint) == {"a", "b"}
    np.testing.assert_array_equal(checkpoint["b"].numpy(), np.full((2, 2), 7.0))
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(IncompleteError, match=r"00002-of-00002\.bin"):
        reshard.open(folder)
    index["weight_map"]["b"] = "../b.bin"  # type: ignore[index]
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsafeError):
        reshard.open(folder)


def test_into_a_folder(trained: Path, tmp_path: Path) -> None:
    reshard.convert(trained, tmp_path / "out", Wanted(format="torch", drop=("*",)), QUICK)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["pytorch_model.bin"]
    assert detect(tmp_path / "out")[0].name == "torch"


# -- what is refused ------------------------------------------------------------------------------


def _local(fixtures_dir: Path) -> Path:
    return fixtures_dir / "dcp" / "fsdp1_p4_local_flat" / "ckpt" / "rank_0_of_4.pt"


def _renamed(path: Path, fixtures_dir: Path) -> Path:
    shutil.copy(_local(fixtures_dir), path / "state.pt")
    return path / "state.pt"


def test_a_rank_of_fsdp(fixtures_dir: Path, tmp_path: Path) -> None:
    """FSDP1's local state: what it is and how to get out of it, whatever the file is called."""
    with pytest.raises(UnsupportedError, match="one rank's part") as first:
        reshard.open(_local(fixtures_dir))
    assert "sharded" in str(first.value.hint)
    with pytest.raises(UnsupportedError, match="_flat_param is an object of") as second:
        reshard.open(_renamed(tmp_path, fixtures_dir))
    assert "names and shapes the file doesn't say" in str(second.value.hint)


def _legacy(path: Path) -> Path:
    torch.save({"a": torch.ones(3)}, path / "old.bin", _use_new_zipfile_serialization=False)
    return path / "old.bin"


def _tensor(path: Path) -> Path:
    torch.save(torch.ones(3), path / "a.pt")
    return path / "a.pt"


def _two_models(path: Path) -> Path:
    torch.save({"model": {"a": torch.ones(3)}, "net": {"a": torch.ones(3)}}, path / "a.pt")
    return path / "a.pt"


def _no_model(path: Path) -> Path:
    torch.save({"weights": {"a": torch.ones(3)}, "x": 1}, path / "a.pt")
    return path / "a.pt"


def _stray_state(path: Path) -> Path:
    value = {"state": {5: {"exp_avg": torch.ones(3)}}, "param_groups": [{"params": [0], "lr": 1.0}]}
    torch.save({"model": {"a": torch.ones(3)}, "optimizer": value}, path / "a.pt")
    return path / "a.pt"


def _empty(path: Path) -> Path:
    (path / "a.pt").write_bytes(b"")
    return path / "a.pt"


class Canary:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return eval, ("open('/dev/null')",)


def _code(path: Path) -> Path:
    torch.save({"a": torch.ones(3), "b": Canary()}, path / "a.pt")
    return path / "a.pt"


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (_legacy, UnsupportedError, "legacy format"),
        (_tensor, UnsupportedError, "holds a tensor, not a state dict"),
        (_two_models, RequestError, "several models: model, net"),
        (_no_model, UnsupportedError, "its keys are 'weights', 'x'"),
        (_stray_state, InconsistentError, "optimizer state of 5, which is in no parameter group"),
        (_empty, CorruptError, "a.pt"),
        (_code, UnsafeError, "eval"),
    ],
)
def test_refused(
    tmp_path: Path, make: Callable[[Path], Path], error: type[ReshardError], text: str
) -> None:
    """Each with an error that says what it is."""
    with pytest.raises(error, match=text):
        reshard.open(make(tmp_path))


def test_a_flipped_bit(trained: Path, tmp_path: Path) -> None:
    """torch loads it; the zip's own checksum finds it."""
    data = bytearray(trained.read_bytes())
    at = data.index(torch.load(trained)["model"]["0.weight"].numpy().tobytes())
    data[at + 5] ^= 4
    trained.write_bytes(data)
    torch.load(trained)
    with pytest.raises(CorruptError, match=r"last.pt.*data/0"):
        reshard.convert(trained, tmp_path / "b.pt", WITH_OPTIMIZER, QUICK)
    assert not (tmp_path / "b.pt").exists()
