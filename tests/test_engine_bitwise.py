"""Is training the same, bit for bit, at every stage, world size and accumulation?

The truth is plain torch in one process over all micro-batches.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_models import (
    OPTIMIZERS,
    STEPS,
    Odd,
    engine_run,
    reference,
    same,
    spread,
    tokens,
    two_groups,
)  # fmt: skip
from ranks import run_ranks
from torch import Tensor

from reshard.engine import ZeroEngine, assembly


def make(seed: int = 0) -> Odd:
    torch.manual_seed(seed)
    return Odd()


@cache
def truth(optimizer: str, M: int) -> tuple[list[float], dict[str, Tensor]]:
    data = [tokens(M, seed) for seed in range(STEPS)]
    return reference(make(), OPTIMIZERS[optimizer], data)


def train(cases: list[tuple[Any, ...]], alone: int = assembly.ALONE) -> list[tuple[Any, ...]]:
    """Train each (stage, accumulation, optimizer, units); tell what differs from the truth."""
    assembly.ALONE = alone
    torch.set_num_threads(1)
    rank, P = dist.get_rank(), dist.get_world_size()
    found: list[tuple[Any, ...]] = []
    for stage, A, optimizer, *units in cases:
        more: dict[str, Any] = {"units": units[0]} if units else {}
        data = [tokens(P * A, seed) for seed in range(STEPS)]
        # The other ranks begin elsewhere: they must take rank 0's values.
        engine = ZeroEngine(
            make(rank), OPTIMIZERS[optimizer], groups=two_groups, stage=stage, **more
        )
        losses = engine_run(engine, data, rank, P)
        expected, state = truth(optimizer, P * A)
        ours = engine.full_state_dict()
        far = max((ours[n] - state[n]).abs().max().item() for n in state if state[n].numel())
        apart = max(
            abs(a - b) for a, b in zip(losses, spread(data, expected, rank, P), strict=True)
        )
        found.append((stage, A, optimizer, same(ours, state), far, apart))
    return found


CASES = [
    *((stage, 1, optimizer) for stage in (0, 1, 2, 3) for optimizer in OPTIMIZERS),
    *((stage, A, "fused") for stage in (0, 1, 2, 3) for A in (2, 4)),
    *((stage, 2, "sgd") for stage in (1, 2, 3)),
    # How parameters are packed must not change a bit.
    *(
        (stage, 1, "adamw", rule)
        for stage in (2, 3)
        for rule in ("root", ["blocks", "blocks.1.up"])
    ),
]


@pytest.mark.parametrize("P", [1, 2, 3, 4])
def test_training_is_that_of_one_process(P: int) -> None:
    for results in run_ranks(train, P, CASES, limit=120):
        for stage, A, optimizer, differing, far, apart in results:
            where = f"stage {stage}, P={P}, A={A}, {optimizer}"
            if P == 3 and A > 1:  # three isn't a power of two: the sums are paired otherwise
                assert far <= 1e-5 and apart <= 1e-6, (where, far, apart)
            else:
                assert not differing and apart == 0, (where, differing, far, apart)


@pytest.mark.parametrize("P", [1, 2, 4])
def test_it_is_where_large_parameters_of_the_root_lie_apart(P: int) -> None:
    cases = [
        *((stage, A, "fused") for stage in (0, 1, 2, 3) for A in (1, 2)),
        *((stage, 1, "sgd", "root") for stage in (1, 2, 3)),
    ]
    for results in run_ranks(train, P, cases, 1, limit=120):
        for stage, A, optimizer, differing, _, apart in results:
            assert not differing and apart == 0, (stage, A, optimizer, differing, apart)
