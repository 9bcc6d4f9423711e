"""One rank of one contender: builds it, then does what it is told.

One request a line on stdin, one answer a line on stdout; see :class:`bench.engine_crew.Crew`. What
libraries print goes to stderr.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.engine_contenders import contender, plain
from bench.engine_model import SIZES, batch, build


class Rank:
    """A rank and its contender."""

    def __init__(self, name: str, size: str, rank: int, ranks: int) -> None:
        torch.set_num_threads(1)
        self.rank, self.ranks = rank, ranks
        self.size = SIZES[size]
        self.steps = 0
        if name != "plain":
            dist.init_process_group("gloo", rank=rank, world_size=ranks)
        if name.startswith("deepspeed"):
            import deepspeed  # noqa: F401 - belongs to the base
        elif name.startswith("stage"):
            import reshard.engine.engine  # noqa: F401
        warm = plain(build(SIZES["tiny"]))
        for step in range(2):
            warm(batch(SIZES["tiny"], step, 0))
        del warm
        gc.collect()
        self.base = _resident("VmRSS")
        _forget_peak()
        self.step = contender(name, build(self.size))
        self.engine = getattr(self.step, "engine", None)

    def train(self, steps: int) -> dict[str, Any]:
        """Take steps after one that isn't timed."""
        loss = self._one()
        self._together()
        sent, worked, begin = _sent(), time.process_time(), time.perf_counter()
        for _ in range(steps):
            loss = self._one()
        seconds = time.perf_counter() - begin
        worked = time.process_time() - worked
        self._together()
        return {
            "seconds": seconds / steps,
            "processor": worked / steps,
            "sent": (_sent() - sent) / steps / self.ranks,
            "loss": float(loss),
            "steps": self.steps,
        }

    def memory(self, steps: int) -> dict[str, Any]:
        """Take steps; bytes of the peak over what there was before the model was made."""
        for _ in range(3):
            self._one()
        made = _resident("VmHWM") - self.base
        gc.collect()
        _forget_peak()
        for _ in range(steps):
            self._one()
        return {
            "peak": _resident("VmHWM") - self.base,
            "rest": _resident("VmRSS") - self.base,
            "peak with making": made,
        }

    def save(self, folder: str, sync: bool) -> dict[str, Any]:
        """Save beside the training, against copying the same bytes and training alone."""
        from reshard.engine.save import save

        assert self.engine is not None
        if not hasattr(self, "copies"):  # the optimizer's states come with the first steps
            self._timed(3)
        parts = [
            tensor
            for flat in self.engine.flats
            for state in self.engine.states(flat)
            for _, tensor in self.engine.parts(flat, state)
        ]
        if not hasattr(self, "copies"):
            self.engine.ready_to_save()
            self.copies = [torch.empty_like(part) for part in parts]
            for copy in self.copies:
                copy.zero_()
        self._together()
        begin = time.perf_counter()
        for copy, part in zip(self.copies, parts, strict=True):
            copy.copy_(part)
        copied = time.perf_counter() - begin
        alone = self._timed(6)
        self._together()
        path = Path(folder) / f"step{self.steps}"
        begin = time.perf_counter()
        running = save(self.engine, path, blocking=False, sync=sync)
        stalled = time.perf_counter() - begin
        beside = self._timed(6)
        under_way = not running.done
        begin = time.perf_counter()
        running.wait()
        self._together()
        return {
            "bytes": sum(part.nbytes for part in parts),
            "copy": copied,
            "stall": stalled,
            "steps alone": alone,
            "steps beside": beside,
            "under way after them": under_way,
            "waited": time.perf_counter() - begin,
        }

    def _timed(self, steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            self._one()
        return time.perf_counter() - begin

    def _one(self) -> torch.Tensor:
        loss = self.step(batch(self.size, self.steps, self.rank))
        self.steps += 1
        return loss

    def _together(self) -> None:
        if dist.is_initialized():
            dist.barrier()


def _resident(what: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(what)


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _sent() -> int:
    """Bytes that all ranks have sent over the loopback, as the kernel counts them."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    return 0


def main() -> None:
    """Answer until there are no more requests."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    name, size, rank, ranks = sys.argv[1:]
    own = Rank(name, size, int(rank), int(ranks))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        found = getattr(own, request.pop("do"))(**request)
        print(json.dumps(found), file=answers, flush=True)


main()
