"""Whenever training is killed: is there a whole checkpoint, and does training go on from it?"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from engine_resume import Run, Trainer, joined
from ranks import rank_outcomes, run_ranks

from reshard.engine import board
from reshard.engine.keep import checkpoints
from reshard.engine.writer import SliceWriter
from reshard.errors import ReshardError

STEPS = 6


def train(folder: Path, stage: int) -> Run:
    """Train from the newest checkpoint, or from the beginning, and save after every step."""
    trainer = Trainer(stage)
    if checkpoints(folder):
        trainer.load(folder)
    while trainer.engine.counters["step"] < STEPS:
        trainer.train(1)
        step = trainer.engine.counters["step"]
        trainer.save(folder / f"step{step}", blocking=step % 2 == 0, keep_last=3)
    trainer.engine.saving.settle()
    return trainer.end()


def killed(folder: Path, stage: int, rank: int, after: float) -> Run:
    """Train, and be killed without warning some time after the first step on one rank."""
    trainer = Trainer(stage)
    if trainer.rank == rank:
        threading.Thread(target=_kill, args=(folder, after), daemon=True).start()
    del trainer
    return train(folder, stage)


def _kill(folder: Path, after: float) -> None:
    while not any(folder.iterdir()):
        time.sleep(0.001)
    time.sleep(after)
    os.kill(os.getpid(), signal.SIGKILL)


def attempts(tmp: Path, count: int, seed: int, stage: int, P: int, Q: int) -> None:
    """Kill some runs at random moments; each must go on to the same losses on other ranks."""
    (tmp / "whole").mkdir()
    expected = joined(run_ranks(train, P, tmp / "whole", stage))
    chance = random.Random(seed)
    died = 0
    for number in range(count):
        folder = tmp / f"run{number}"
        folder.mkdir()
        ends = rank_outcomes(
            killed, P, folder, stage, chance.randrange(P), chance.uniform(0, 0.3), limit=30
        )
        died += any(end.code == -signal.SIGKILL for end in ends)
        kept = checkpoints(folder)
        runs = run_ranks(train, Q, folder, chance.choice((1, 2, 3)))
        rest = joined(runs)
        first = kept[-1].step if kept else 0
        assert rest == {k: v for k, v in expected.items() if k[0] >= first}, (number, first)
        left = sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))
        assert left[-1:] == [f"step{STEPS}"], left
    assert died, "none was killed in time"


def test_killed_at_random(tmp_path: Path) -> None:
    attempts(tmp_path, 2, 1, stage=3, P=2, Q=4)


@pytest.mark.slow
def test_killed_at_random_often(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--hypothesis-profile") != "torture":
        pytest.skip("twenty kills take minutes: make torture")
    attempts(tmp_path, 20, 2, stage=3, P=2, Q=4)


def killed_while_saving(folder: Path) -> str:
    """Rank 1 is killed while its part is being written; nobody uses the process group then."""
    board.PATIENCE = 2.0
    trainer = Trainer(2)
    trainer.train(1)
    running = None
    if trainer.rank:
        SliceWriter.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
    running = trainer.save(folder / "ck", blocking=False)
    try:
        running.wait()
    except ReshardError as error:
        return str(error)
    return "nothing"


def test_killed_while_others_write(tmp_path: Path) -> None:
    first, second = rank_outcomes(killed_while_saving, 2, tmp_path, limit=40)
    assert second.code == -signal.SIGKILL
    assert "no sign of rank 1" in first.result, first
    assert not any(tmp_path.iterdir())
