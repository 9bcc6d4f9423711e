"""Does every rank get the right elements, summed in the right order?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from reshard.engine.counter import pairwise_sum
from reshard.engine.ranksum import RankSum
from reshard.engine.tagged import Tagged
from reshard.engine.transport import Alone, Transport, connect
from reshard.engine.watch import Watch

GATHERED = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
REDUCED = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float64),
    (torch.int64, torch.int64),
]


def even(n: int, ranks: int) -> list[int]:
    return [rank * n // ranks for rank in range(ranks + 1)]


def lengths(ranks: int) -> list[list[int]]:
    """Bounds that are even, uneven, with empty slices, and of fewer elements than ranks."""
    ragged = [0, *[7 * r * r for r in range(1, ranks + 1)]]
    holes = [0, *[10 * ((r + 1) // 2) for r in range(1, ranks + 1)]]
    return [even(4096, ranks), even(1003, ranks), even(ranks - 1, ranks), ragged, holes]


def values(seed: int, n: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(n, generator=generator).to(dtype)
    return torch.randint(0, 100, (n,), generator=generator).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def check_gathers(transport: Transport) -> None:
    for bounds in lengths(transport.size):
        for dtype in GATHERED:
            truth = values(1, bounds[-1], dtype)
            flat = torch.zeros_like(truth)
            run = slice(bounds[transport.rank], bounds[transport.rank + 1])
            flat[run] = truth[run]
            transport.gather(flat, bounds, "flat").wait()
            assert same(flat, truth), (dtype, bounds)


def check_reduces(transport: Transport) -> None:
    for bounds in lengths(transport.size):
        for dtype, wide in REDUCED:
            parts = [values(seed, bounds[-1], dtype) for seed in range(transport.size)]
            run = slice(bounds[transport.rank], bounds[transport.rank + 1])
            truth = pairwise_sum([part[run].to(wide, copy=True) for part in parts])
            flat = parts[transport.rank].clone()
            out = torch.full_like(truth, 7)
            transport.reduce(flat, bounds, out, "flat").wait()
            assert same(out, truth), (dtype, wide, bounds)
            assert same(flat, parts[transport.rank]), "the flat was written"


def _everything() -> None:
    transport = connect()
    check_gathers(transport)
    check_reduces(transport)
    rank, ranks = transport.rank, transport.size
    assert transport.agree(torch.tensor([rank, 2]), "max", "m").tolist() == [ranks - 1, 2]
    assert transport.agree(torch.tensor(rank == 1), "max", "bit").item() == (ranks > 1)
    norms = [values(seed, 5, torch.float64) for seed in range(ranks)]
    total = transport.agree(norms[rank].view(5, 1), "sum", "norm")
    assert same(total, pairwise_sum([norm.clone() for norm in norms]).view(5, 1))
    assert transport.agree(torch.zeros(0), "sum", "nothing").shape == (0,)
    said: Any = {"rank": rank, "text": "ü" * 100 * rank, "none": None}
    assert [s["rank"] for s in transport.exchange(said, "words")] == list(range(ranks))
    transport.close()


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
def test_gather_reduce_and_agree_are_exact(world: int) -> None:
    run_ranks(_everything, world)


def test_one_rank_needs_no_process_group() -> None:
    transport = connect()
    assert isinstance(transport, Alone)
    check_gathers(transport)
    check_reduces(transport)


@pytest.mark.parametrize("ranks", range(1, 18))
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16])
def test_a_sum_in_blocks_is_the_counters_sum(ranks: int, wide: torch.dtype) -> None:
    for n in (0, 1, 5000, 70_000):
        parts = [values(seed, n, torch.bfloat16) for seed in range(ranks)]
        kept = [part.clone() for part in parts]
        out = torch.empty(n, dtype=wide)
        RankSum(ranks).into(out, parts)
        assert same(out, pairwise_sum([part.to(wide, copy=True) for part in parts]))
        assert all(same(a, b) for a, b in zip(parts, kept, strict=True))


def _many_in_flight(pooled: int) -> None:
    """Flats of many sizes, started in one order and waited for in another, some names twice."""
    group = dist.group.WORLD
    assert group is not None
    transport = Tagged(group, Watch(), pooled=pooled)
    rank, ranks = transport.rank, transport.size
    sizes = [3_000_001, 10, 1_000_000, 3_000_001, 3_000_001, 0, 77]
    names = ["a", "b", "c", "a", "a", "e", "b"]
    for _ in range(3):
        checks = []
        for k, (n, name) in enumerate(zip(sizes, names, strict=True)):
            bounds = even(n, ranks)
            run = slice(bounds[rank], bounds[rank + 1])
            parts = [values(100 * k + seed, n, torch.float32) for seed in range(ranks)]
            out = torch.empty(bounds[rank + 1] - bounds[rank])
            sent = parts[rank].clone()
            pending = transport.reduce(sent, bounds, out, name)
            checks.append((pending, out, pairwise_sum([part[run].clone() for part in parts])))
            truth = values(k, n, torch.float32)
            flat = torch.zeros(n)
            flat[run] = truth[run]
            checks.append((transport.gather(flat, bounds, name), flat, truth))
        for pending, got, truth in [*checks[rank % 3 :], *checks[: rank % 3]]:
            pending.wait()
            assert same(got, truth)
            pending.wait()
    transport.close()


@pytest.mark.parametrize("pooled", [1, 64 << 20])
def test_many_may_be_in_flight_and_wait_is_idempotent(pooled: int) -> None:
    run_ranks(_many_in_flight, 3, pooled)


def _twenty_of_one_name() -> None:
    transport = connect()
    pending = []
    flats = []
    for k in range(20):
        flat = torch.zeros(2)
        flat[transport.rank] = k
        flats.append(flat)
        pending.append(transport.gather(flat, [0, 1, 2], "same"))
    for one in reversed(pending):
        one.wait()
    assert [flat.tolist() for flat in flats] == [[k, k] for k in range(20)]


def test_a_name_may_fly_more_often_than_there_are_numbers() -> None:
    run_ranks(_twenty_of_one_name, 2)


def _returns_at_once() -> Sequence[float]:
    transport = connect()
    flat, out = torch.ones(1000), torch.zeros(500)
    transport.exchange("both are here", "start")
    if transport.rank == 1:
        time.sleep(1.5)
    start = time.monotonic()
    a = transport.reduce(flat, [0, 500, 1000], out, "a")
    b = transport.gather(flat, [0, 500, 1000], "b")
    issued = time.monotonic() - start
    b.wait()
    a.wait()
    assert out.tolist() == [2.0] * 500
    return issued, time.monotonic() - start


def test_a_call_returns_before_the_other_rank_has_come() -> None:
    (issued, waited), _ = run_ranks(_returns_at_once, 2)
    assert issued < waited / 2


def _parameters() -> None:
    """A flat that is a parameter is filled without autograd noticing."""
    transport = connect()
    flat = torch.nn.Parameter(torch.full((10,), float(transport.rank)))
    square = (flat * flat).sum()
    transport.gather(flat, [0, 5, 10], "parameter").wait()
    square.backward()  # would raise, had the version counter moved
    assert flat.tolist() == [0.0] * 5 + [1.0] * 5


def test_a_gather_leaves_version_counters_alone() -> None:
    run_ranks(_parameters, 2)
