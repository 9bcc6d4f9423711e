"""Does ``dcp.save`` write a native checkpoint that holds what the ranks had?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reshard
from reshard.api import convert, open_manifest, verify
from reshard.checkpoint import Checkpoint
from reshard.conversion import Wanted
from reshard.execute import Options
from reshard.plain import encode

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint import state_dict_saver  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import save  # noqa: E402

from reshard.dcp import ZWriter  # noqa: E402
from tests.dcp_ranks import load_saved, save_beside, save_columns, save_trained  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

FAST = Options(sync=False)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_the_same_as_torch_s_own_save_converted(tmp_path: Path, flat: bool) -> None:
    """The state of two ranks, saved by both ways; then loaded by three."""
    expected = run_ranks(save_trained, 2, str(tmp_path / "native"), flat, True)[0]
    run_ranks(save_trained, 2, str(tmp_path / "dcp"), flat)
    ours, torch_s = (open_manifest(tmp_path / name) for name in ("native", "dcp"))
    assert (ours.format, torch_s.format) == ("native", "dcp")
    assert (ours.layout.world, ours.layout.stage) == (2, 3)
    assert set(ours.tensors) == set(torch_s.tensors)
    for key in torch_s.tensors:
        found, wanted = Checkpoint(ours)[key].numpy(), Checkpoint(torch_s)[key].numpy()
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), key
        assert found.tobytes() == wanted.tobytes(), key
    assert encode(dict(ours.objects)) == encode(dict(torch_s.objects))
    assert [encode([dict(g.settings), dict(g.scalars)]) for g in ours.groups] == [
        encode([dict(g.settings), dict(g.scalars)]) for g in torch_s.groups
    ]
    assert verify(tmp_path / "native").problems == ()
    assert set(ours.digests) == set(ours.tensors)
    loaded = run_ranks(load_saved, 3, str(tmp_path / "native"), flat, True)[0]
    for key, value in expected["before"].items():
        if isinstance(value, np.ndarray):
            assert loaded["before"][key].tobytes() == value.tobytes(), key
        else:
            assert loaded["before"][key] == value, key


@pytest.mark.skipif(
    not hasattr(state_dict_saver, "AsyncCheckpointerType"), reason="torch has no such choice yet"
)
@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_save_beside_the_training(tmp_path: Path, kind: str) -> None:
    """What ``async_save`` was given, not what the steps made of it meanwhile."""
    expected = run_ranks(save_beside, 2, str(tmp_path / "native"), kind)[0]
    assert verify(tmp_path / "native").problems == ()
    loaded = run_ranks(load_saved, 3, str(tmp_path / "native"), False, True)[0]["before"]
    for key, value in expected.items():
        if isinstance(value, np.ndarray):
            assert loaded[key].tobytes() == value.tobytes(), key
        else:
            assert loaded[key] == value, key


def test_it_is_converted_on_as_any_other(tmp_path: Path) -> None:
    run_ranks(save_trained, 2, str(tmp_path / "native"), False, True)
    convert(tmp_path / "native", tmp_path / "five", Wanted(world=5, format="native"), FAST)
    a, b = open_manifest(tmp_path / "native"), open_manifest(tmp_path / "five")
    assert a.digests == b.digests
    assert [s.group for s in b.layout.spaces if s.group is not None] == [0, 1]


def test_columns_and_replicas_and_the_script_s_own(tmp_path: Path) -> None:
    run_ranks(save_columns, 2, str(tmp_path / "native"), 33, 7)
    checkpoint = reshard.open(tmp_path / "native")
    assert verify(tmp_path / "native").problems == ()
    assert set(checkpoint.manifest.digests) == set(checkpoint.manifest.tensors)
    weight = np.arange(33 * 7, dtype=np.float32).reshape(33, 7)
    assert np.array_equal(checkpoint["weight"].numpy(), weight)
    assert np.array_equal(
        checkpoint["same"].numpy(), np.arange(15, dtype=np.float32).reshape(3, 5).T
    )
    assert checkpoint["none"].shape == (0, 4)
    client = checkpoint.objects["client"]
    assert np.array_equal(client["rng"], np.arange(7, dtype=np.uint8))
    assert client["nested"]["list"][1] == {"a": 1}
    assert np.array_equal(client["nested"]["list"][0], np.ones(2, np.float32))
    cache = np.arange(30000, dtype=np.float32).reshape(300, 100)
    assert np.array_equal(checkpoint[client["cache"].key].numpy(), cache)


def test_a_save_that_failed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ZWriter(tmp_path / "native")

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", fails)
        with pytest.raises(CheckpointException, match="No space left"):
            save({"model": {"a": torch.ones(2)}}, storage_writer=writer)
    assert not (tmp_path / "native").exists()
    save({"model": {"a": torch.ones(2)}}, storage_writer=writer)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["native"]


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine", encoding="utf-8")
    with pytest.raises(CheckpointException, match="exists already"):
        save({"a": torch.ones(2)}, storage_writer=ZWriter(tmp_path / "there"))
    assert (tmp_path / "there").read_text(encoding="utf-8") == "mine"


class _Own:
    pass


@pytest.mark.parametrize("value", [_Own(), (torch.zeros(1 << 15),)])
def test_what_a_native_checkpoint_cannot_hold(tmp_path: Path, value: Any) -> None:
    writer = ZWriter(tmp_path / "native")
    with pytest.raises(CheckpointException, match="can't hold"):
        save({"model": {"a": torch.ones(2)}, "own": value}, storage_writer=writer)
    assert not (tmp_path / "native").exists()
    save({"model": {"a": torch.ones(2)}}, storage_writer=writer)
    assert np.array_equal(reshard.open(tmp_path / "native")["a"].numpy(), np.ones(2, np.float32))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["native"]
