"""Does a save beside the training hold the state of its moment, and tell its errors?"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from engine_resume import Trainer, raw
from ranks import run_ranks
from standin import Meeting, Standin, good, on_ranks, wholes

import reshard
from reshard.engine.save import save
from reshard.engine.writer import SliceWriter
from reshard.errors import TargetError


class Gate:
    """Holds writers up until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        plain = SliceWriter.write

        def write(writer: SliceWriter, sources: Any) -> Any:
            assert self.open.wait(30)
            return plain(writer, sources)

        monkeypatch.setattr(SliceWriter, "write", write)


def equals(path: Path, expected: Any) -> None:
    found = reshard.open(path)
    for state, tensors in expected.items():
        for name, tensor in tensors.items():
            assert found[name, state].numpy().tobytes() == raw(tensor).tobytes(), (state, name)


def test_the_state_is_that_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)

    def run(rank: int, meeting: Meeting) -> Any:
        engine = Standin(rank, meeting)
        engine.step()
        before = engine.whole()
        running = save(engine, tmp_path / "ck", blocking=False)
        assert not running.done
        for _ in range(3):
            engine.step()
        meeting.exchange(rank, None)
        gate.open.set()
        assert running.wait() == tmp_path / "ck"
        assert running.done
        running.wait()
        return before

    parts = good(on_ranks(3, run))
    whole: dict[str, Any] = {}
    for rank in parts:
        for state, tensors in rank.items():
            for name, part in tensors.items():
                mine = whole.setdefault(state, {}).setdefault(name, part.clone())
                mine[~part.isnan()] = part[~part.isnan()]
    equals(tmp_path / "ck", whole)
    assert reshard.verify(tmp_path / "ck").problems == ()


def test_the_memory_is_used_again(tmp_path: Path) -> None:
    def run(rank: int, meeting: Meeting) -> None:
        engine = Standin(rank, meeting)
        places = set()
        for step in range(3):
            engine.step()
            save(engine, tmp_path / f"s{step}", blocking=False)
            memory = engine.saving.area._memory
            assert memory is not None
            places.add(memory.data_ptr())
        engine.saving.settle()
        assert len(places) == 1

    good(on_ranks(2, run))
    assert len(list(tmp_path.iterdir())) == 3


def test_memory_that_is_made_ready_is_the_memory_of_the_save(tmp_path: Path) -> None:
    trainer = Trainer(2)
    trainer.train(1)
    area = trainer.engine.saving.area
    trainer.engine.ready_to_save()
    area._wait()
    memory: Any = area._memory
    assert (memory[::4096] == 0).all()
    trainer.save(tmp_path / "ck", blocking=False).wait()
    assert area._memory is memory
    engine = trainer.engine
    parts = [p for f in engine.flats for s in engine.states(f) for p in engine.parts(f, s)]
    assert memory.numel() >= sum(tensor.nbytes for _, tensor in parts) > 0
    assert reshard.verify(tmp_path / "ck").problems == ()


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)

    def run(rank: int, meeting: Meeting) -> Standin:
        engine = Standin(rank, meeting)
        engine.step()
        first = save(engine, tmp_path / "a", blocking=False)
        if rank == 0:
            threading.Timer(0.2, gate.open.set).start()
        save(engine, tmp_path / "b")
        assert first.done
        assert (tmp_path / "a").is_dir()
        return engine

    expected = wholes(good(on_ranks(2, run)))
    equals(tmp_path / "a", expected)
    equals(tmp_path / "b", expected)


def test_the_writers_error_is_raised_by_the_next_save_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = SliceWriter._piece
    broken = threading.Event()
    broken.set()

    def full(self: SliceWriter, *args: Any) -> int:
        if self._shard == 1 and broken.is_set():
            raise OSError(28, "No space left on device")
        return plain(self, *args)

    monkeypatch.setattr(SliceWriter, "_piece", full)

    def run(rank: int, meeting: Meeting) -> None:
        engine = Standin(rank, meeting)
        engine.step()
        running = save(engine, tmp_path / "a", blocking=False)
        with pytest.raises(TargetError, match="No space left"):
            save(engine, tmp_path / "b")
        running.wait()
        meeting.exchange(rank, None)
        broken.clear()
        save(engine, tmp_path / "c")

    good(on_ranks(3, run))
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def beside(folder: Path) -> bool:
    """Train on while checkpoints are written; nothing may change, and each must be whole."""
    runs = []
    for saving in (True, False):
        trainer = Trainer(3)
        states = {}
        for step in range(4):
            trainer.train(1)
            if saving:
                trainer.save(folder / f"s{step}", blocking=False)
                state = trainer.engine.full_state_dict(masters=True)
                states[step] = {n: raw(t).tobytes() for n, t in state.items()}
        runs.append(
            (trainer.run.losses, {n: raw(t).tobytes() for n, t in trainer.end().state.items()})
        )
        trainer.engine.saving.settle()
        for step, state in states.items():
            found = reshard.open(folder / f"s{step}")
            assert {n: found[n].numpy().tobytes() for n in found} == state
    return runs[0] == runs[1]


def test_training_goes_on_beside_it(tmp_path: Path) -> None:
    assert run_ranks(beside, 2, tmp_path) == [True, True]
