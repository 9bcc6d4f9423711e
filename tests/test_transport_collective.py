"""Do the backend's own collectives give what the numbered messages give?"""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_transport import check_gathers, check_reduces, even, values

from reshard.engine.collective import Collective
from reshard.engine.failures import RanksDisagree
from reshard.engine.tagged import Tagged
from reshard.engine.transport import backend, connect
from reshard.engine.wants import Want
from reshard.engine.watch import Watch


def collective(ordered: bool = True) -> Collective:
    group = dist.group.WORLD
    assert group is not None
    return Collective(group, Watch(), device=torch.device("cpu"), ordered=ordered)


def _everything() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transport = collective()
        check_gathers(transport)
        check_reduces(transport)
        rank, ranks = transport.rank, transport.size
        assert transport.agree(torch.tensor([rank, 2]), "max", "m").tolist() == [ranks - 1, 2]
        assert transport.exchange({"r": rank}, "x") == [{"r": r} for r in range(ranks)]
        transport.close()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_collectives_are_exact(world: int) -> None:
    run_ranks(_everything, world)


def _unordered() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transport = collective(ordered=False)
        n = 1000 * transport.size
        parts = [values(seed, n, torch.float64) for seed in range(transport.size)]
        bounds = even(n, transport.size)
        out = torch.empty(1000, dtype=torch.float64)
        transport.reduce(parts[transport.rank], bounds, out, "a").wait()
        run = slice(bounds[transport.rank], bounds[transport.rank + 1])
        torch.testing.assert_close(out, torch.stack([part[run] for part in parts]).sum(0))
        # Where the backend can't widen or the slices differ, the sum is made here.
        check_wide(transport)


def check_wide(transport: Collective) -> None:
    n = 10 * transport.size + 1
    bounds = even(n, transport.size)
    length = bounds[transport.rank + 1] - bounds[transport.rank]
    out = torch.empty(length)
    transport.reduce(torch.ones(n, dtype=torch.bfloat16), bounds, out, "wide").wait()
    assert out.tolist() == [transport.size] * length


@pytest.mark.parametrize("world", [2, 3])
def test_a_backend_may_sum_in_its_own_order(world: int) -> None:
    run_ranks(_unordered, world)


def _disagree() -> None:
    transport = collective()
    flat = torch.zeros(8)
    transport.gather(flat, [0, 4, 8], "same").wait()
    name = f"unit {transport.rank}"
    # Of other lengths gloo would mix the bytes; this is what the watch sees while they hang.
    number = transport.watch.start_in_order("all", name)
    want = Want("all", (0, 1), name, number, in_order=True)
    with pytest.raises(RanksDisagree, match="unit 1"), transport.watch.waiting(want):
        wait_for_verdict(transport.watch)


def wait_for_verdict(watch: Watch) -> None:
    while True:
        watch.check()
        time.sleep(0.05)


def test_different_operations_at_one_place_of_the_order() -> None:
    run_ranks(_disagree, 2)


def _chosen() -> Any:
    group = dist.group.WORLD
    assert group is not None
    cpu = torch.device("cpu")
    a, b = connect(), connect()
    assert isinstance(a, Tagged)
    assert isinstance(b, Tagged)
    assert a.watch is b.watch
    a.close()
    b.close()
    return backend(group, cpu)


def test_gloo_is_carried_by_numbered_messages() -> None:
    assert run_ranks(_chosen, 2) == ["gloo", "gloo"]
