"""Does training go on bit for bit when it resumes on other ranks and at another stage?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_resume import Run, Trainer, differing, joined
from ranks import run_ranks

from reshard.engine import Precision

BEFORE, AFTER = 3, 3
BF16 = Precision(param=torch.bfloat16)


def begin(folder: Path, stage: int, precision: Precision | None, optimizer: str) -> Run:
    """Train, save, and go on as if nothing had been."""
    trainer = Trainer(stage, precision=precision, optimizer=optimizer)
    trainer.train(BEFORE)
    trainer.save(folder / "saved")
    trainer.train(AFTER)
    return trainer.end()


def resume(
    folder: Path, stages: list[int], steps: int, precision: Precision | None, optimizer: str
) -> list[Run]:
    """Begin elsewhere, load, and train; once a stage."""
    runs = []
    for stage in stages:
        trainer = Trainer(stage, precision=precision, optimizer=optimizer, seed=99)
        trainer.load(folder / "saved")
        trainer.train(steps)
        runs.append(trainer.end())
    return runs


def uninterrupted(
    tmp: Path, P: int, stage: int, precision: Precision | None = None, optimizer: str = "adamw"
) -> list[Run]:
    return run_ranks(begin, P, tmp, stage, precision, optimizer)


def check(first: list[Run], folder: Path, P: int, stages: list[int], *settings: Any) -> None:
    """The rest of a run is the same, bit for bit."""
    settings = settings or (None, "adamw")
    ranks = run_ranks(resume, P, folder, stages, AFTER, *settings)
    losses = joined(first)
    for number, stage in enumerate(stages):
        runs = [rank[number] for rank in ranks]
        rest = joined(runs)
        where = (P, stage)
        assert rest == {k: v for k, v in losses.items() if k[0] >= BEFORE}, where
        assert not differing(first[0].state, runs[0].state), where
        assert runs[0].rates == first[0].rates[BEFORE:], where
        read = sorted(s for one in (*first, *runs) for s in one.samples)
        again = sorted(s for one in first for s in one.samples[len(one.samples) // 2 :])
        assert sorted(s for one in runs for s in one.samples) == again
        assert len(read) == 3 * len(again)


def test_saved_by_four_ranks_at_stage_3(tmp_path: Path) -> None:
    first = uninterrupted(tmp_path, 4, 3)
    for P, stages in ((1, [3]), (2, [1, 2]), (8, [3])):
        check(first, tmp_path, P, stages)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_saved_by_two_ranks_at_other_stages(tmp_path: Path, stage: int) -> None:
    first = uninterrupted(tmp_path, 2, stage)
    check(first, tmp_path, 4, [3])


@pytest.mark.parametrize(("precision", "optimizer"), [(BF16, "fused"), (None, "sgd")])
def test_other_types_and_optimizers(
    tmp_path: Path, precision: Precision | None, optimizer: str
) -> None:
    first = uninterrupted(tmp_path, 2, 3, precision, optimizer)
    check(first, tmp_path, 4, [1], precision, optimizer)


def load_only(folder: Path) -> Any:
    trainer = Trainer(3, seed=99)
    trainer.load(folder / "saved")
    return trainer.end().state


def test_three_ranks_restore_the_same_bits(tmp_path: Path) -> None:
    """Three doesn't divide the micro-batches of a step, so only the state can be compared."""
    first = run_ranks(begin_and_stop, 4, tmp_path)
    for P in (3, 5):
        assert not differing(first[0], run_ranks(load_only, P, tmp_path)[0])


def begin_and_stop(folder: Path) -> Any:
    trainer = Trainer(3)
    trainer.train(BEFORE)
    trainer.save(folder / "saved")
    return trainer.end().state
