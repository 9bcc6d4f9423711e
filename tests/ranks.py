"""Runs a function on P ranks, each a process with a gloo group over loopback.

Processes are forked from a server that has torch loaded already, so that eight ranks start in
about a second. What a rank returns comes back; what goes wrong on any rank is one test failure
with every rank's traceback, and a rank that hangs says where.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        *("pytest", "numpy", "torch._dynamo", "torch.nn.parallel", "torch.distributed.optim"),
        "torch.distributed.pipelining",
    ]
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rank ended: `error` is its traceback, `code` its exit code (-9: killed)."""

    rank: int
    result: Any
    error: str | None
    code: int | None

    @property
    def fine(self) -> bool:
        return self.error is None and self.code == 0


def run_ranks(function: Callable[..., Any], world: int, *args: Any, limit: float = 60) -> list[Any]:
    """Call ``function(*args)`` on each of `world` ranks; return the results in rank order.

    The function lies at the top of a test module. It finds ``torch.distributed`` initialized
    (gloo) and one thread for torch. `limit` is in seconds.
    """
    ends = rank_outcomes(function, world, *args, limit=limit)
    bad = [end for end in ends if not end.fine]
    if bad:
        texts = [
            f"--- rank {e.rank} (exit code {e.code})\n{e.error or 'no traceback'}" for e in bad
        ]
        pytest.fail(f"{len(bad)} of {world} ranks failed\n" + "\n".join(texts), pytrace=False)
    return [end.result for end in ends]


def rank_outcomes(
    function: Callable[..., Any], world: int, *args: Any, limit: float = 60
) -> list[Outcome]:
    """Do as :func:`run_ranks`, but say how each rank ended instead of failing."""
    # The store lives here, as with torchrun, so that it outlives any rank.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        stacks = [Path(folder) / f"{rank}.stack" for rank in range(world)]
        pipes: list[Connection] = []
        processes = []
        for rank in range(world):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_rank,
                args=(theirs, stacks[rank], rank, world, store.port, function, args),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        said = _collect(pipes, time.monotonic() + limit)
        hung = [p for r, p in enumerate(processes) if said[r] is None and p.is_alive()]
        for process in hung:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGUSR1)
        ends = []
        for rank, process in enumerate(processes):
            process.join(0.5 if process in hung else 10)
            code = process.exitcode
            if code is None:
                process.kill()
                process.join()
            result, error = said[rank] or (None, None)
            if code is None:
                where = stacks[rank].read_text() if stacks[rank].exists() else ""
                error = f"still there after {limit:g} s\n{error or ''}{where}"
            ends.append(Outcome(rank, result, error, code))
    return ends


def _collect(pipes: Sequence[Connection], deadline: float) -> list[tuple[Any, str | None] | None]:
    said: list[tuple[Any, str | None] | None] = [None] * len(pipes)
    left = {pipe: rank for rank, pipe in enumerate(pipes)}
    while left and (seconds := deadline - time.monotonic()) > 0:
        for pipe in wait(list(left), seconds):
            assert isinstance(pipe, Connection)
            rank = left.pop(pipe)
            try:
                said[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                said[rank] = (None, "ended without a word")
    return said


def _rank(
    pipe: Connection,
    stack: Path,
    rank: int,
    world: int,
    port: int,
    function: Callable[..., Any],
    args: Sequence[Any],
) -> None:
    with stack.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        try:
            store = TCPStore("127.0.0.1", port, is_master=False)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
            result = function(*args)
            dist.destroy_process_group()
            pipe.send_bytes(pickle.dumps((result, None)))
        except BaseException:  # noqa: BLE001 - whatever it is, the test tells it
            pipe.send_bytes(pickle.dumps((None, traceback.format_exc())))
            raise SystemExit(1) from None
        finally:
            pipe.close()
            faulthandler.unregister(signal.SIGUSR1)
