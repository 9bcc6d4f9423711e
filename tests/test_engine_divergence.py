"""Ranks that go different ways: is it right, or told by name on all ranks, and soon?"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_models import Odd, tokens
from ranks import rank_outcomes
from torch.optim import AdamW

from reshard.engine import RankFailed, RanksDisagree, ZeroEngine
from reshard.engine.failures import EngineError

SOON = 20
"""Seconds in which every rank must have raised; the promise is 5, on a machine that isn't busy."""


def one_backward_more(engine: ZeroEngine, rank: int, folder: Path) -> None:
    for _ in range(1 + rank):
        engine.backward(engine(tokens(1)[0]))
    engine.step()


def a_step_more(engine: ZeroEngine, rank: int, folder: Path) -> None:
    for _ in range(1 + rank):
        engine.backward(engine(tokens(1)[0]))
        engine.step()
    engine.full_state_dict()


def one_saves(engine: ZeroEngine, rank: int, folder: Path) -> None:
    if rank:
        engine.save(folder / "ck")
    engine.backward(engine(tokens(1)[0]))
    engine.step()


def one_evaluates(engine: ZeroEngine, rank: int, folder: Path) -> None:
    """At stage 3 a forward gathers, with or without gradients."""
    if rank:
        with torch.no_grad():
            engine(tokens(1)[0])
    engine.full_state_dict()


def one_fails(engine: ZeroEngine, rank: int, folder: Path) -> None:
    if rank:
        raise ZeroDivisionError("on purpose")
    engine.backward(engine(tokens(1)[0]))
    engine.step()


def one_stops_early(engine: ZeroEngine, rank: int, folder: Path) -> None:
    if rank:
        raise SystemExit(3)
    for _ in range(3):
        engine.backward(engine(tokens(1)[0]))
        engine.step()


def diverge(way: Callable[..., None], stage: int, folder: Path) -> tuple[str, str, float]:
    torch.manual_seed(0)
    rank = dist.get_rank()
    engine = ZeroEngine(Odd(), lambda groups: AdamW(groups, lr=0.01), stage=stage)
    engine.backward(engine(tokens(1)[0]))
    engine.step()
    start = time.monotonic()
    try:
        way(engine, rank, folder)
    except EngineError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "nothing", "", 0.0


WAYS: list[tuple[Any, list[int], tuple[type[EngineError], ...]]] = [
    (one_backward_more, [0, 1, 2, 3], (RanksDisagree,)),
    (a_step_more, [3], (RanksDisagree,)),
    (one_saves, [1, 3], (RanksDisagree,)),
    (one_evaluates, [3], (RanksDisagree,)),
    (one_fails, [1, 3], (RankFailed,)),
    (one_stops_early, [2, 3], (RankFailed,)),
]


@pytest.mark.parametrize(
    ("way", "stage", "kinds"),
    [(way, stage, kinds) for way, stages, kinds in WAYS for stage in stages],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_ranks_that_go_different_ways(
    tmp_path: Path, way: Any, stage: int, kinds: tuple[type[EngineError], ...]
) -> None:
    ends = rank_outcomes(diverge, 2, way, stage, tmp_path)
    told = [end.result for end in ends if end.result is not None]
    left = [end for end in ends if end.result is None]
    assert len(told) == 2 or (kinds == (RankFailed,) and [end.rank for end in left] == [1])
    for kind, text, seconds in told:
        assert kind in [one.__name__ for one in kinds], (kind, text)
        assert "rank 0:" in text and "rank 1:" in text, text
        assert seconds < SOON
    for end in left:
        assert "still there" not in (end.error or ""), end
    assert not any(tmp_path.iterdir())
