"""Are the bytes that a transport counts those of the theory, and those on the wire?"""

from __future__ import annotations

import re
import sys
from typing import Any

import netns
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from reshard.engine.counting import Counting, Tally
from reshard.engine.transport import Alone, connect

N = 1 << 20
WORLDS = (2, 3, 4)


def even(n: int, ranks: int) -> list[int]:
    return [rank * n // ranks for rank in range(ranks + 1)]


def _counts() -> Any:
    transport = Counting(connect())
    rank, ranks = transport.rank, transport.size
    bounds = even(1000, ranks)
    for _ in range(2):
        transport.gather(torch.zeros(1000), bounds, "a").wait()
    transport.gather(torch.zeros(1000, dtype=torch.bfloat16), bounds, "b").wait()
    out = torch.zeros(bounds[rank + 1] - bounds[rank])
    transport.reduce(torch.zeros(1000, dtype=torch.bfloat16), bounds, out, "a").wait()
    transport.agree(torch.zeros(3, dtype=torch.float64), "sum", "norm")
    transport.exchange([1, 2], "words")
    tallies = transport.tallies
    total = transport.total("gather")
    transport.reset()
    assert transport.total() == Tally()
    transport.close()
    return tallies, total


@pytest.mark.parametrize("world", [1, 2, 4])
def test_bytes_and_calls_by_kind_and_label(world: int) -> None:
    own = 1000 // world
    for tallies, total in run_ranks(_counts, world):
        assert tallies == {
            ("gather", "a"): Tally(2, 2 * 4 * own * (world - 1)),
            ("gather", "b"): Tally(1, 2 * own * (world - 1)),
            ("reduce", "a"): Tally(1, 2 * (1000 - own)),
            ("agree", "norm"): Tally(1, 24 * (world - 1)),
            ("exchange", "words"): Tally(1, 0),
        }
        assert total == Tally(3, 10 * own * (world - 1))


def test_a_rank_alone_sends_nothing() -> None:
    transport = Counting(Alone())
    transport.gather(torch.zeros(10), [0, 10], "a").wait()
    assert transport.total() == Tally(1, 0)


def _carry() -> list[tuple[str, int]]:
    """Bytes that all ranks together put on the loopback."""
    transport = connect()
    bounds = even(N, transport.size)
    flat = torch.ones(N)
    out = torch.zeros(bounds[transport.rank + 1] - bounds[transport.rank])
    found = []
    for kind in ("gather", "reduce"):
        dist.barrier()
        before = netns.sent("lo")
        dist.barrier()
        for _ in range(4):
            if kind == "gather":
                transport.gather(flat, bounds, "flat").wait()
            else:
                transport.reduce(flat, bounds, out, "flat").wait()
        dist.barrier()
        found.append((kind, netns.sent("lo") - before))
        dist.barrier()
    return found


def test_bytes_on_the_wire() -> None:
    """N(P-1)/P elements a rank, within two per cent, counted by the kernel."""
    text = netns.alone(sys.executable, __file__)
    found = re.findall(r"wire (\w+) (\d) (\d+)", text)
    assert len(found) == 2 * len(WORLDS)
    for kind, world, sent in found:
        theory = 4 * N * (int(world) - 1) * 4
        assert theory <= int(sent) <= 1.02 * theory, (kind, world)


if __name__ == "__main__":
    for world in WORLDS:
        for kind, sent in run_ranks(_carry, world)[0]:
            print(f"wire {kind} {world} {sent}")
