"""Is what an engine saves a good checkpoint, or nothing at all?"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tensorstore as ts
import torch
import zarr
from engine_resume import Trainer, raw
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from standin import SHAPES, Meeting, Standin, good, on_ranks, wholes
from torch.optim import SGD, Adam, AdamW, RMSprop

import reshard
from reshard.digest import CRC64NVME
from reshard.engine import board
from reshard.engine.save import save
from reshard.engine.state import NotAtSafePoint
from reshard.engine.writer import SliceWriter
from reshard.errors import (
    InconsistentError,
    RequestError,
    ReshardError,
    TargetError,
    UnsupportedError,
)
from reshard.formats import native

SCHEMA = Path(reshard.__file__).parent / "schema" / "manifest-1.schema.json"


def saved(folder: Path, P: int, *, steps: int = 2, **made: Any) -> list[Standin]:
    """Save on P ranks; returns their engines."""

    def run(rank: int, meeting: Meeting) -> Standin:
        engine = Standin(rank, meeting, **made)
        for _ in range(steps):
            engine.step()
        save(engine, folder, client={"epoch": 3})
        return engine

    return good(on_ranks(P, run))


@pytest.mark.parametrize("P", [1, 2, 3, 7])
def test_a_checkpoint_holds_what_the_ranks_held(tmp_path: Path, P: int) -> None:
    buffers = {"running": torch.arange(3.0), "count": torch.tensor(7)}
    engines = saved(
        tmp_path / "ck", P, frozen=("head",), buffers=buffers, aliases={"tied": "embed"}
    )
    found = reshard.open(tmp_path / "ck")
    expected = wholes(engines)
    assert set(expected) == {"master", "exp_avg", "exp_avg_sq", "param"}
    for state, tensors in expected.items():
        for name, tensor in tensors.items():
            assert found[name, state].shape == SHAPES[name]
            assert found[name, state].numpy().tobytes() == raw(tensor).tobytes(), (state, name)
    assert np.array_equal(found["running"].numpy(), [0, 1, 2])
    assert found["count"].numpy() == 7
    assert np.array_equal(found["tied"].numpy(), found["embed"].numpy())
    assert found.world == P
    assert found.objects["step"] == 2
    assert found.objects["client"] == {"epoch": 3}
    assert [g.scalars for g in found.groups] == [{"step": 2}] * 2
    assert [g.settings["weight_decay"] for g in found.groups] == [0.1, 0.0]
    assert reshard.verify(tmp_path / "ck").problems == ()


def test_the_manifest_is_valid_by_the_published_schema(tmp_path: Path) -> None:
    saved(tmp_path / "ck", 3)
    document = json.loads((tmp_path / "ck" / native.MANIFEST).read_bytes())
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    (mixed,) = [s for s in document["spaces"] if isinstance(s.get("group"), list)][:1]
    assert len(mixed["group"]) == len(mixed["entries"])


def test_other_libraries_open_the_arrays(tmp_path: Path) -> None:
    """Chunk r is rank r's slice."""
    engines = saved(tmp_path / "ck", 3)
    flat = engines[0].flats[0]
    for space in reshard.open_manifest(tmp_path / "ck").layout.spaces[:1]:
        path = f"{space.name}.master"
        array = zarr.open_group(tmp_path / "ck", mode="r")[path]
        assert isinstance(array, zarr.Array)
        opened = np.asarray(array[:])
        kvstore = {"driver": "file", "path": f"{tmp_path / 'ck' / path}/"}
        store = ts.open({"driver": "zarr3", "kvstore": kvstore}, read=True).result()
        assert np.array_equal(store.read().result(), opened)
        for rank, engine in enumerate(engines):
            own = engine.parts(flat, "master")[0][1].numpy()
            assert np.array_equal(opened[rank * len(own) : (rank + 1) * len(own)], own)


def test_digests_are_those_of_a_conversion(tmp_path: Path) -> None:
    saved(tmp_path / "ck", 3, frozen=("head",))
    source = reshard.open_manifest(tmp_path / "ck")
    reshard.convert(tmp_path / "ck", tmp_path / "32", reshard.Wanted(world=32))
    target = reshard.open_manifest(tmp_path / "32")
    assert source.digests.keys() == source.tensors.keys()
    assert target.digests == source.digests
    assert {s.group for s in target.layout.spaces} == {0, 1, None}
    found = reshard.diff(tmp_path / "ck", tmp_path / "32")
    assert found.same, found


def test_consolidated_weights_are_the_masters(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    engines = saved(tmp_path / "ck", 4)
    reshard.consolidate(tmp_path / "ck", tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    for name, tensor in wholes(engines)["master"].items():
        assert found[name].tobytes() == raw(tensor).tobytes()


def momentum(groups: Any) -> SGD:
    return SGD(groups, momentum=0.9)


@settings(max_examples=20)
@given(
    st.integers(1, 6),
    st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=6),
    st.integers(1, 3),
    st.sampled_from((AdamW, SGD, RMSprop, momentum, lambda g: Adam(g, amsgrad=True))),
    st.sampled_from((torch.float32, torch.bfloat16, torch.float64)),
)  # fmt: skip
def test_any_shapes_and_optimizers(
    tmp_path_factory: pytest.TempPathFactory,
    P: int,
    shapes: list[tuple[int, ...]],
    per_flat: int,
    optimizer: Callable[..., Any],
    dtype: torch.dtype,
) -> None:
    folder = tmp_path_factory.mktemp("any") / "ck"
    named = {f"p{i}": shape for i, shape in enumerate(shapes)}
    engines = saved(folder, P, shapes=named, per_flat=per_flat, optimizer=optimizer, dtype=dtype)
    found = reshard.open(folder)
    for state, tensors in wholes(engines).items():
        for name, tensor in tensors.items():
            data = found[name, state].numpy()
            assert data.tobytes() == raw(tensor).tobytes(), (state, name)
            assert found.manifest.digests[name, state] == CRC64NVME.of(data.tobytes())
    assert reshard.verify(folder).problems == ()
    shutil.rmtree(folder)


def test_large_slices_are_cut_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "SPLIT_ABOVE", 128)
    monkeypatch.setattr(native, "CHUNK", 48)
    engines = saved(tmp_path / "ck", 2)
    found = reshard.open(tmp_path / "ck")
    store = found.manifest.stores[found.manifest.space(0).name, "master"]
    assert isinstance(store, native.ShardStore)
    assert store.chunks_per_shard > 1
    for name, tensor in wholes(engines)["master"].items():
        assert found[name, "master"].numpy().tobytes() == raw(tensor).tobytes()
    assert reshard.verify(tmp_path / "ck").problems == ()


def test_replicas_write_nothing_twice(tmp_path: Path) -> None:
    engines = saved(tmp_path / "ck", 4, replicas=2)
    found = reshard.open(tmp_path / "ck")
    assert found.world == 2
    assert found.manifest.layout.mesh == {"shard": 2, "replicate": 2}
    for name, tensor in wholes(engines[:2])["exp_avg"].items():
        assert found[name, "exp_avg"].numpy().tobytes() == raw(tensor).tobytes()
    assert len(found.state("client")) == 4


# -- unusual optimizers ---------------------------------------------------------------------------


def test_counters_that_differ_are_kept_by_name(tmp_path: Path) -> None:
    def run(rank: int, meeting: Meeting) -> None:
        engine = Standin(rank, meeting)
        engine.step(skip=("embed", "layers.0.b"))
        engine.step(skip=("layers.0.b",))
        save(engine, tmp_path / "ck")

    good(on_ranks(3, run))
    found = reshard.open(tmp_path / "ck")
    steps = found.groups[0].scalars["step"]
    assert steps == {"embed": 1, "layers.0.w": 2, "layers.1.w": 2, "head": 2}
    assert found.groups[1].scalars == {"step": 2}
    assert found.objects["engine"]["unstepped"] == ["layers.0.b"]
    assert not found["layers.0.b", "exp_avg"].numpy().any()


class Matrix(AdamW):
    """Keeps something that is neither one value nor one an element."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["rows"] = torch.zeros(2, 3)
        return result


def test_state_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    def run(rank: int, meeting: Meeting) -> None:
        engine = Standin(rank, meeting, optimizer=Matrix)
        engine.step()
        save(engine, tmp_path / "ck")

    for error in on_ranks(2, run):
        assert isinstance(error, UnsupportedError)
        assert "rows of shape [2, 3]" in str(error)
    assert not any(tmp_path.iterdir())


# -- all or nothing -------------------------------------------------------------------------------


def failing(folder: Path, P: int, change: Callable[[Standin, dict[str, Any]], None]) -> list[Any]:
    """Save on P ranks, after something is changed; the ranks' errors."""

    def run(rank: int, meeting: Meeting) -> None:
        engine = Standin(rank, meeting)
        engine.step()
        settings: dict[str, Any] = {}
        change(engine, settings)
        before = engine.snapshot()
        try:
            save(engine, folder / "ck", **settings)
        finally:
            assert engine.snapshot() == before

    return on_ranks(P, run)


def test_in_the_middle_of_a_step_nothing_is_written(tmp_path: Path) -> None:
    def busy(engine: Standin, _: Any) -> None:
        engine.busy = "a backward is under way" if engine.rank == 1 else None

    for error in failing(tmp_path, 3, busy):
        assert isinstance(error, NotAtSafePoint)
        assert "a backward is under way" in str(error)
    assert not any(tmp_path.iterdir())


def test_ranks_that_differ_are_told_so(tmp_path: Path) -> None:
    def other_step(engine: Standin, _: Any) -> None:
        engine.counters["step"] += engine.rank == 2

    def other_client(engine: Standin, settings: dict[str, Any]) -> None:
        settings["client"] = {"seen": engine.rank}

    for change, text in ((other_step, "step differ"), (other_client, "client state differs")):
        for error in failing(tmp_path, 3, change):
            assert isinstance(error, InconsistentError)
            assert text in str(error)
    assert not any(tmp_path.iterdir())


def test_what_is_no_data_is_refused_by_its_place(tmp_path: Path) -> None:
    def strange(engine: Standin, settings: dict[str, Any]) -> None:
        settings["client"] = {"model": [object()]}

    for error in failing(tmp_path, 2, strange):
        assert isinstance(error, RequestError)
        assert "client/model/0" in str(error)


def test_a_path_that_is_taken(tmp_path: Path) -> None:
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck" / "mine").write_text("x")
    for error in failing(tmp_path, 3, lambda engine, settings: None):
        assert isinstance(error, TargetError)
        assert "exists already" in str(error)
    assert [p.name for p in tmp_path.rglob("*")] == ["ck", "mine"]


@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("blocking", [True, False])
def test_a_rank_that_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: int, blocking: bool
) -> None:
    plain = SliceWriter._piece

    def full(self: SliceWriter, *args: Any) -> int:
        if self._shard == where:
            raise OSError(28, "No space left on device")
        return plain(self, *args)

    monkeypatch.setattr(SliceWriter, "_piece", full)

    def run(rank: int, meeting: Meeting) -> None:
        engine = Standin(rank, meeting)
        engine.step()
        save(engine, tmp_path / "ck", blocking=blocking).wait()

    for error in on_ranks(3, run):
        assert isinstance(error, TargetError), error
        assert "No space left" in str(error)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["write_metadata", "check_files"])
def test_a_failure_at_the_very_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def fail(*_: Any) -> None:
        raise TargetError("no more", where=what)

    monkeypatch.setattr(native, what, fail)
    for error in failing(tmp_path, 3, lambda engine, settings: None):
        assert isinstance(error, TargetError)
        assert "no more" in str(error)
    assert not any(tmp_path.iterdir())


def test_a_rank_that_falls_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was killed: neither word nor sign."""
    monkeypatch.setattr(board, "PATIENCE", 0.3)
    plain, alive = board.Board.tell, board.Board.alive

    def silent(self: Any, what: Any) -> None:
        if self._rank != 1:
            plain(self, what)

    monkeypatch.setattr(board.Board, "tell", silent)
    monkeypatch.setattr(
        board.Board, "alive", lambda self: alive(self) if self._rank != 1 else nullcontext()
    )
    for error in failing(tmp_path, 3, lambda engine, settings: None):
        assert isinstance(error, ReshardError)
        assert "no sign of rank" in str(error)
    assert not any(tmp_path.iterdir())


def test_a_rank_that_is_only_slow_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board, "PATIENCE", 0.5)
    monkeypatch.setattr(board, "PULSE", 0.02)
    plain = SliceWriter.write

    def slow(self: Any, sources: Any) -> Any:
        if self._shard == 1:
            time.sleep(1.5)
        return plain(self, sources)

    monkeypatch.setattr(SliceWriter, "write", slow)
    saved(tmp_path / "ck", 3)
    assert reshard.verify(tmp_path / "ck").problems == ()


def test_two_engines_save_in_one_process_group(tmp_path: Path) -> None:
    """What the first one's ranks told each other isn't taken for the second one's."""

    def run(rank: int, meeting: Meeting) -> None:
        for number in range(2):
            engine = Standin(rank, meeting, seed=number)
            if rank == 1:
                time.sleep(0.1 * number)
            save(engine, tmp_path / f"ck{number}")

    good(on_ranks(2, run))
    for number in range(2):
        assert reshard.verify(tmp_path / f"ck{number}").problems == ()


# -- the real engine ------------------------------------------------------------------------------


def in_the_middle(folder: Path) -> Any:
    """Ask for a save at every wrong moment; the run must be the same as without."""
    losses = []
    for disturbed in (True, False):
        trainer = Trainer(3)
        trainer.train(1)
        refused = 0
        for j in range(2):
            trainer.backward(1, j)
            if disturbed:
                try:
                    trainer.save(folder / "ck")
                except NotAtSafePoint:
                    refused += 1
        trainer.engine.step()
        trainer.train(1)
        assert refused == 2 * disturbed
        losses.append(
            (trainer.run.losses, {n: raw(t).tobytes() for n, t in trainer.end().state.items()})
        )
    return losses[0] == losses[1]


def test_a_refused_save_leaves_training_as_it_was(tmp_path: Path) -> None:
    assert run_ranks(in_the_middle, 2, tmp_path) == [True, True]
    assert not any(tmp_path.iterdir())


def train_and_save(folder: Path, stage: int) -> Any:
    trainer = Trainer(stage)
    trainer.train(2)
    trainer.save(folder / "ck")
    return trainer.end().state


@pytest.mark.parametrize(("P", "stage"), [(2, 3), (3, 1), (2, 0)])
def test_the_engine_saves_what_it_is(tmp_path: Path, P: int, stage: int) -> None:

    state = run_ranks(train_and_save, P, tmp_path, stage)[0]
    found = reshard.open(tmp_path / "ck")
    assert set(found) == set(state)
    for name, tensor in state.items():
        assert found[name].numpy().tobytes() == raw(tensor).tobytes(), name
    assert found.stage == stage
    reshard.convert(tmp_path / "ck", tmp_path / "32", reshard.Wanted(world=32))
    assert reshard.diff(tmp_path / "ck", tmp_path / "32").same
