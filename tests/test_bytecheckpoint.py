"""Do ByteCheckpoint's checkpoints read as what the live ranks held, and are their faults found?

The checkpoints were written by ByteCheckpoint 0.0.2; the truth was gathered from the ranks.
"""

from __future__ import annotations

import io
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

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

CASES = ("ddp_ws2", "fsdp_ws2", "fsdp2_ws2")
FAST = Options(sync=False)
PICKLER: Any = vars(pickle)["_Pickler"]  # the one in Python, which can be told of names
ORDER = ("0.weight", "0.bias", "1.weight", "1.bias")


@pytest.fixture(scope="module")
def real(fixtures_dir: Path) -> Path:
    path = fixtures_dir / "bytecheckpoint"
    if not path.is_dir():
        pytest.skip("there are no checkpoints of ByteCheckpoint among the fixtures")
    return path


@pytest.fixture
def copy(real: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a checkpoint, to be damaged."""

    def made(case: str) -> Path:
        root = Path(shutil.copytree(real / case / "ckpt", tmp_path / case))
        for path in root.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        return root

    return made


def ours(case: str, name: str) -> tuple[str, str]:
    """What a tensor of the truth is called here: DDP's optimizer has numbers for names."""
    if not name.startswith("optimizer."):
        return f"module.{name}" if case == "ddp_ws2" else name, "param"
    name, _, state = name.removeprefix("optimizer.").rpartition(".")
    return f"optimizer.{ORDER.index(name)}" if case == "ddp_ws2" else name, state


@pytest.mark.parametrize("case", CASES)
def test_reads_equal_to_the_truth(real: Path, case: str) -> None:
    format_, found = detect(real / case / "ckpt")
    assert format_.name == "bytecheckpoint"
    checkpoint = Checkpoint(format_.open(found.root))
    assert checkpoint.world == 2
    truth = load_file(real / case / "truth.safetensors")
    for name, expected in truth.items():
        array = checkpoint[ours(case, name)].numpy()
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape), name
        assert array.tobytes() == expected.tobytes(), name
    assert set(checkpoint.manifest.tensors) == {ours(case, name) for name in truth}


@pytest.mark.parametrize("case", CASES)
def test_goes_into_native(real: Path, tmp_path: Path, case: str) -> None:
    source = open_manifest(real / case / "ckpt")
    reshard.convert(source, tmp_path / "native", Wanted(world=3, format="native"), FAST)
    before, after = Checkpoint(source), reshard.open(tmp_path / "native")
    for key in source.tensors:
        assert after[key].numpy().tobytes() == before[key].numpy().tobytes(), key
    assert after.objects == before.objects


def test_groups_and_extra_state_are_kept(real: Path) -> None:
    objects = open_manifest(real / "fsdp2_ws2" / "ckpt").objects["bytecheckpoint"]
    assert objects["extra_state"] == [{"s": 1}, {"s": 1}]
    (group,) = objects["optimizer"]["param_groups"]
    assert group["lr"] == 0.1
    assert sorted(group["params"]) == sorted(ORDER)


# -- faults -------------------------------------------------------------------------------------


class _Named:
    """An object of a class that isn't there, to write a pickle again as it was."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __reduce_ex__(self, protocol: int) -> Any:  # type: ignore[override]
        return type(self), getattr(self, "args", ()), self.state


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the fields of a ``.metadata``."""
    kinds: dict[tuple[str, str], type] = {}

    class Load(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module in ("builtins", "collections"):
                return super().find_class(module, name)
            if module == "torch" and name == "Size":
                kind: type = type(name, (tuple,), {})
            elif (
                module == "torch.serialization"
                or name == "_MEM_FORMAT_ENCODING"
                or (module == "torch" and name != "Size")
            ):
                import torch
                import torch.distributed.checkpoint.metadata as m

                return {"torch": torch, m.__name__: m, "torch.serialization": torch.serialization}[
                    module
                ].__dict__[name]
            else:
                kind = kinds.setdefault((module, name), type(name, (_Named,), {}))
            kinds[module, name] = kind
            kind.__module__ = module
            return kind

    class Dump(PICKLER):
        def save_global(self, obj: Any, name: str | None = None) -> None:
            for (module, label), kind in kinds.items():
                if kind is obj:
                    self.write(pickle.GLOBAL + f"{module}\n{label}\n".encode())
                    return
            super().save_global(obj, name)

        dispatch: ClassVar[Any] = {**PICKLER.dispatch, type: save_global}

    document = Load(io.BytesIO(path.read_bytes())).load()
    change(document.state)
    out = io.BytesIO()
    Dump(out, protocol=2).dump(document)
    path.write_bytes(out.getvalue())


def first(fields: dict[str, Any], name: str) -> Any:
    return next(k for k in fields["storage_data"] if k.state["fqn"] == name)


def test_rewriting_changes_nothing_by_itself(copy: Callable[[str], Path]) -> None:
    root = copy("fsdp2_ws2")
    rewrite(root / "model" / ".metadata", lambda fields: None)
    checkpoint = Checkpoint(open_manifest(root))
    assert checkpoint["0.weight"].shape == (5, 7)


def place_lost(fields: dict[str, Any]) -> None:
    del fields["storage_data"][first(fields, "0.weight")]


def chunk_lost(fields: dict[str, Any]) -> None:
    place_lost(fields)
    fields["state_dict_metadata"]["0.weight"].state["chunks"].pop(0)


def name_lost(fields: dict[str, Any]) -> None:
    del fields["state_dict_metadata"]["0.weight"]


def place_elsewhere(fields: dict[str, Any]) -> None:
    fields["storage_data"][first(fields, "0.weight")].state["relative_path"] = "../../x"


def place_short(fields: dict[str, Any]) -> None:
    fields["storage_data"][first(fields, "0.weight")].state["length"] -= 4


def place_far(fields: dict[str, Any]) -> None:
    fields["storage_data"][first(fields, "0.weight")].state["offset"] = 1 << 40


def place_negative(fields: dict[str, Any]) -> None:
    fields["storage_data"][first(fields, "0.weight")].state["offset"] = -1


def chunk_outside(fields: dict[str, Any]) -> None:
    fields["state_dict_metadata"]["0.weight"].state["size"] = (4, 7)


def newer(fields: dict[str, Any]) -> None:
    fields["bytecheckpoint_version"] = "1.0"


def flat(fields: dict[str, Any]) -> None:
    fields["user_defined_dict"] = {"fsdp_flat_param_to_fqns": {"_flat_param": ["0.weight"]}}


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (place_lost, IncompleteError, "doesn't say where"),
        (chunk_lost, CorruptError, "has a place for a piece of 0.weight|hole|covered|miss"),
        (name_lost, CorruptError, "has a place for 0.weight"),
        (place_elsewhere, UnsafeError, "outside of its folder"),
        (place_short, CorruptError, "gives a piece"),
        (place_far, CorruptError, "a piece ends at byte"),
        (place_negative, CorruptError, "makes no sense"),
        (chunk_outside, CorruptError, "makes no sense"),
        (newer, UnsupportedError, "ByteCheckpoint '1.0'"),
        (flat, UnsupportedError, "flat parameters"),
    ],
)
def test_metadata_that_do_not_fit(
    copy: Callable[[str], Path],
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    error: type[ReshardError],
    says: str,
) -> None:
    root = copy("fsdp2_ws2")
    rewrite(root / "model" / ".metadata", change)
    with pytest.raises(error, match=says):
        reshard.convert(root, tmp_path / "out", Wanted(format="native"), FAST)


def test_a_missing_file(copy: Callable[[str], Path]) -> None:
    root = copy("fsdp2_ws2")
    (root / "model" / "__1_0.distcp").unlink()
    with pytest.raises(IncompleteError, match=r"__1_0\.distcp: is missing"):
        open_manifest(root)


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_truncated_file(copy: Callable[[str], Path], part: str) -> None:
    root = copy("fsdp2_ws2")
    path = root / part / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptError, match="a piece ends at byte"):
        open_manifest(root)


def test_a_rank_without_its_state(copy: Callable[[str], Path]) -> None:
    root = copy("fsdp2_ws2")
    (root / "extra_state" / "extra_state_rank_0.pt").unlink()
    with pytest.raises(IncompleteError, match="the state of rank 0 is missing"):
        open_manifest(root)


def test_pieces_that_overlap(copy: Callable[[str], Path], tmp_path: Path) -> None:
    root = copy("fsdp2_ws2")

    def change(fields: dict[str, Any]) -> None:
        what = fields["state_dict_metadata"]["0.weight"].state
        what["chunks"][1].state["offsets"] = (2, 0)
        for table in ("storage_data", "all_tensor_metadata"):
            for key in fields[table]:
                if key.state["fqn"] == "0.weight" and tuple(key.state["offset"]) == (3, 0):
                    key.state["offset"] = (2, 0)

    rewrite(root / "model" / ".metadata", change)
    with pytest.raises(InconsistentError, match="overlapping"):
        reshard.convert(root, tmp_path / "out", Wanted(format="native"), FAST)


def test_a_pickle_that_runs_code(copy: Callable[[str], Path]) -> None:
    root = copy("fsdp2_ws2")
    path = root / "model" / ".metadata"
    path.write_bytes(b"cos\nsystem\n(S'true # bytecheckpoint'\ntR.")
    with pytest.raises(UnsafeError):
        open_manifest(root)


def test_a_piece_with_strides(copy: Callable[[str], Path]) -> None:
    """The pickled tensor says how a piece's elements lie in its bytes."""
    import torch

    root = copy("ddp_ws2")

    def change(fields: dict[str, Any]) -> None:
        for key in fields["all_tensor_metadata"]:
            if key.state["fqn"] == "module.0.weight":
                meta = fields["all_tensor_metadata"][key]
                assert b"K\x07K\x01\x86" in meta  # strides (7, 1)
                fields["all_tensor_metadata"][key] = meta.replace(
                    b"K\x07K\x01\x86", b"K\x01K\x05\x86"
                )

    before = Checkpoint(open_manifest(root))["module.0.weight"].numpy()
    rewrite(root / "model" / ".metadata", change)
    after = Checkpoint(open_manifest(root))["module.0.weight"].numpy()
    expected = torch.from_numpy(before.copy()).flatten().as_strided((5, 7), (1, 5)).numpy()
    assert (after == expected).all()
    assert not np.array_equal(after, before)
