"""Do all ranks end, and say why, when they can't go on together; and only then?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import rank_outcomes, run_ranks
from torch._C._distributed_c10d import TCPStore

from reshard.engine.failures import EngineError, RankFailed, RanksDisagree
from reshard.engine.transport import Transport, connect
from reshard.engine.wants import Record, Want, circle

PROMPT = 20
"""Seconds in which every rank must have raised; the promise is 5, on a machine that isn't busy."""


def gather(transport: Transport, label: str, n: int = 8) -> None:
    bounds = [rank * n // transport.size for rank in range(transport.size + 1)]
    transport.gather(torch.zeros(n), bounds, label).wait()


def ended(transport: Transport, *labels: str) -> tuple[str, str, float]:
    """How the gathers of some labels, one after the other, end."""
    start = time.monotonic()
    ending = error_of(transport, *labels)
    seconds = time.monotonic() - start
    if ending is None:
        return "fine", "", seconds
    assert str(error_of(transport, "later")) == str(ending)
    return type(ending).__name__, str(ending), seconds


def error_of(transport: Transport, *labels: str) -> EngineError | None:
    try:
        for label in labels:
            gather(transport, label)
    except EngineError as error:
        return error
    return None


def _different_units() -> Any:
    transport = connect()
    gather(transport, "same")
    return ended(transport, f"layers.{transport.rank % 2}")


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_gather_different_units(world: int) -> None:
    for kind, text, seconds in run_ranks(_different_units, world):
        assert kind == "RanksDisagree"
        assert "rank 0: waits for the gather of layers.0 (8 x float32), number 1" in text
        assert "rank 1: waits for the gather of layers.1" in text
        assert seconds < PROMPT


def _different_cuts() -> Any:
    transport = connect()
    bounds = [0, 3 + transport.rank, 8]
    with pytest.raises(RanksDisagree, match="cuts"):
        transport.gather(torch.zeros(8), bounds, "a").wait()


def _different_types() -> None:
    transport = connect()
    flat = torch.zeros(8, dtype=[torch.float32, torch.int32][transport.rank])
    with pytest.raises(RanksDisagree, match="int32"):
        transport.gather(flat, [0, 4, 8], "a").wait()


def _different_kinds() -> None:
    transport = connect()
    flat, out = torch.zeros(8), torch.zeros(4)
    if transport.rank:
        pending = transport.reduce(flat, [0, 4, 8], out, "a")
    else:
        pending = transport.gather(flat, [0, 4, 8], "a")
    with pytest.raises(RanksDisagree, match="reduce"):
        pending.wait()


def _different_lengths() -> None:
    transport = connect()
    with pytest.raises(RanksDisagree, match="9 x float32"):
        gather(transport, "a", 8 + transport.rank)


@pytest.mark.parametrize(
    "function", [_different_cuts, _different_types, _different_kinds, _different_lengths]
)
def test_ranks_that_see_the_same_thing_differently(function: Any) -> None:
    run_ranks(function, 2)


def _ring() -> Any:
    """Three groups of two; each rank waits in another one first. No two of them disagree."""
    world = connect()
    pairs: list[Any] = [dist.new_group([k, (k + 1) % 3]) for k in range(3)]
    rank = world.rank
    ahead = connect(pairs[rank], name=f"pair {rank}")
    behind = connect(pairs[(rank - 1) % 3], name=f"pair {(rank - 1) % 3}")
    gather(world, "start")
    kind, text, _ = ended(ahead, "x")
    gone = ended(behind, "x")
    return kind, text, gone[0]


def test_a_circle_over_several_groups() -> None:
    for kind, text, after in run_ranks(_ring, 3):
        assert kind == after == "RanksDisagree", text
        assert "ranks 0 and 1 and 2" in text
        assert "in group pair 2" in text


def _slow(seconds: float) -> Any:
    transport = connect()
    gather(transport, "same")
    if transport.rank == 1:
        end = time.monotonic() + seconds
        while time.monotonic() < end:  # holds the interpreter: no thread of this rank gets far
            sum(range(1000))
    result = ended(transport, "after")
    if transport.rank == 2:
        time.sleep(seconds / 2)
    return result, ended(transport, "last")


def test_a_slow_rank_is_waited_for() -> None:
    for first, second in run_ranks(_slow, 3, 4.0):
        assert first[0] == second[0] == "fine"


def _crossing() -> Any:
    """Ranks wait for different things for long, but one of them is only late."""
    transport = connect()
    a, b = torch.zeros(3), torch.zeros(3)
    bounds = [0, 1, 2, 3]
    if transport.rank == 2:
        time.sleep(4)
    if transport.rank == 1:
        first = transport.gather(b, bounds, "b")
        transport.gather(a, bounds, "a").wait()
    else:
        first = transport.gather(a, bounds, "a")
        transport.gather(b, bounds, "b").wait()
    first.wait()


def test_ranks_that_wait_in_another_order_are_no_circle() -> None:
    run_ranks(_crossing, 3)


def _dies(how: str) -> Any:
    transport = connect()
    gather(transport, "same")
    if transport.rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "left":
            time.sleep(0.5)
            return None
        elif how == "late":
            time.sleep(3)
            os.kill(os.getpid(), signal.SIGKILL)
        error = ValueError("no such sample")
        transport.fail(error)
        raise error
    if transport.rank == 2:
        time.sleep(2)  # comes when it is long over
    return ended(transport, "next")


@pytest.mark.parametrize("how", ["killed", "left", "late", "failed"])
def test_a_rank_that_fails_or_leaves(how: str) -> None:
    ends = rank_outcomes(_dies, 4, how)
    for end in ends:
        if end.rank != 1:
            assert end.fine, end
            kind, text, seconds = end.result
            assert kind == "RankFailed", text
            assert seconds < PROMPT
            assert (
                "rank 1 failed: ValueError: no such sample" if how == "failed" else "rank 1 left"
            ) in text


def _serves_the_store() -> Any:
    """Rank 0 serves the store itself, as it does without torchrun, and dies."""
    first = connect()
    rank = first.rank
    serving = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if not rank else None
    (port, *_) = first.exchange(None if serving is None else serving.port, "port")
    first.close()
    dist.destroy_process_group()
    store = serving or TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    transport = connect()
    gather(transport, "same")
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        time.sleep(1)
    return ended(transport, "next")


def test_the_rank_that_serves_the_store_dies() -> None:
    for end in rank_outcomes(_serves_the_store, 3)[1:]:
        assert end.fine, end
        kind, text, seconds = end.result
        assert kind == "RankFailed"
        assert "rank 0" in text or "the process that serves the store left" in text
        assert seconds < PROMPT


def _in_flight_at_exit() -> None:
    transport = connect()
    gather(transport, "same")
    flat, out = torch.zeros(1 << 20), torch.zeros(1 << 19)
    bounds = [0, 1 << 19, 1 << 20]
    if transport.rank == 0:
        transport.gather(flat, bounds, "never awaited")
        transport.reduce(flat, bounds, out, "never awaited")
        transport.close()
    else:
        with pytest.raises(RankFailed, match="rank 0 closed its engine"):
            gather(transport, "next")
        transport.close()


def test_closing_with_something_in_flight_hangs_nowhere() -> None:
    run_ranks(_in_flight_at_exit, 2)


SCRIPT = """
import os, sys, torch, torch.distributed as dist
from reshard.engine.transport import connect
torch.set_num_threads(1)
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
transport = connect()
flat = torch.zeros(2)
transport.gather(flat, [0, 1, 2], "first").wait()
if rank == 1 and sys.argv[3] == "raise":
    raise KeyError("lost key")
if sys.argv[3] == "end":
    transport.reduce(flat, [0, 1, 2], torch.zeros(1), "abandoned")
    sys.exit(0)
transport.gather(flat, [0, 1, 2], "second").wait()
"""


@pytest.mark.parametrize("how", ["raise", "end"])
def test_a_script_that_ends(tmp_path: Path, how: str) -> None:
    """An unhandled error is told to the others; an ordinary end hangs and crashes nowhere."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), how],
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    texts = [process.communicate(timeout=60)[1] for process in processes]
    codes = [process.returncode for process in processes]
    if how == "end":
        assert codes == [0, 0], texts
    else:
        assert codes == [1, 1], texts
        assert "RankFailed: rank 1 failed: KeyError: 'lost key'" in texts[0]


def want(name: str, turn: int = 1, members: tuple[int, ...] = (0, 1, 2)) -> Want:
    return Want("all", members, name, turn)


def test_a_debt_to_an_earlier_wait_is_no_debt() -> None:
    a, b = want("a"), want("b")
    records = {0: Record(4, a, {1: 7}), 1: Record(7, b, {0: 4})}
    assert circle(records, 0) == [0, 1]
    assert circle({**records, 1: Record(8, b, {0: 4})}, 0) is None
    assert circle({0: Record(4, a, {1: 7}), 1: Record(7, b, {0: 3})}, 0) is None


def test_who_waits_for_a_circle_finds_it_and_who_doesnt_is_free() -> None:
    a = want("a")
    records = {
        0: Record(1, a, {}),
        1: Record(1, a, {0: 1, 2: 1}),
        2: Record(1, a, {1: 1}),
        3: Record(1, a, {}),
    }
    assert circle(records, 0) == [1, 2]
    assert circle(records, 3) is None
    assert circle({}, 0) is None


def test_a_record_survives_the_store() -> None:
    record = Record(3, Want("all", (0, 1), "ü", 2, frozenset({1})), {1: 5})
    assert Record.read(record.text()) == record
    assert Record.read("") is None
    assert not record.want.needs(1)
    assert record.want.needs(0)
    assert issubclass(RankFailed, EngineError)
