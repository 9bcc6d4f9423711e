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


TWELVE = 12
"""Micro-batches of a step that both 3 and 4 ranks can share."""


def begin_with_twelve(folder: Path) -> tuple[Run, Any]:
    trainer = Trainer(3, M=TWELVE)
    trainer.train(BEFORE)
    trainer.save(folder / "saved")
    between = trainer.engine.full_state_dict(masters=True)
    trainer.train(AFTER)
    return trainer.end(), between


def resume_with_twelve(folder: Path, stages: list[int]) -> list[tuple[Run, Any]]:
    found = []
    for stage in stages:
        trainer = Trainer(stage, seed=99, M=TWELVE)
        trainer.load(folder / "saved")
        between = trainer.engine.full_state_dict(masters=True)
        trainer.train(AFTER)
        found.append((trainer.end(), between))
    return found


def test_three_ranks_go_on_within_rounding(tmp_path: Path) -> None:
    """Sums over three ranks are paired otherwise; what was loaded has the very bits."""
    first = run_ranks(begin_with_twelve, 4, tmp_path)
    losses = joined([run for run, _ in first])
    ranks = run_ranks(resume_with_twelve, 3, tmp_path, [1, 3])
    for number in range(2):
        runs = [rank[number][0] for rank in ranks]
        assert not differing(first[0][1], ranks[0][number][1])
        rest = joined(runs)
        assert rest.keys() == {key for key in losses if key[0] >= BEFORE}
        assert max(abs(loss - losses[key]) for key, loss in rest.items()) <= 1e-6
        state = first[0][0].state
        far = [(runs[0].state[n] - v).abs().max() for n, v in state.items() if v.numel()]
        assert max(far) <= 1e-5


def load_only(folder: Path) -> Any:
    trainer = Trainer(3, seed=99)
    trainer.load(folder / "saved")
    return trainer.end().state


def test_three_ranks_restore_the_same_bits(tmp_path: Path) -> None:
    """Also five: neither divides the micro-batches of a step."""
    first = run_ranks(begin_and_stop, 4, tmp_path)
    for P in (3, 5):
        assert not differing(first[0], run_ranks(load_only, P, tmp_path)[0])


def begin_and_stop(folder: Path) -> Any:
    trainer = Trainer(3)
    trainer.train(BEFORE)
    trainer.save(folder / "saved")
    return trainer.end().state
