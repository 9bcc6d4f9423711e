"""How fast is the training engine, in how much memory? See docs/benchmarks.md.

Run it with ``python bench/engine.py [--only NAME] [--size small] [--deepspeed-python PYTHON]``; it
needs torch, and ``unshare``, ``ip`` and ``tc`` (as root) for links of its own: without them the
slow links and the bytes on the wire are left out.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.engine_crew import SMALL_BLOCKS, Crew  # noqa: E402
from bench.measure import busy, machine  # noqa: E402

OWN = "ZRESHARD_BENCH_NETWORK"
"""Set in a process that has a loopback of its own."""
MB = 1e6


class Bench:
    """Runs benchmarks and collects their figures."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.figures: dict[str, Any] = {"machine": machine()}
        self.own_network = OWN in os.environ

    # -- benchmarks ------------------------------------------------------------------------------

    def steps(self) -> None:
        """Two ranks over a loopback that is as fast as memory."""
        self._race("steps", self._everybody(), 2, over=("ddp", "fsdp2"))

    def slow(self) -> None:
        """The same over a link of 4 Gbit, both directions together."""
        names = ["ddp", "fsdp2", *self._deepspeed(3), "stage 2", "stage 3"]
        self._race("slow", names, 2, over=("ddp", "fsdp2"), rate="4gbit")

    def prefetch(self) -> None:
        """What gathering ahead is worth where gathers take about as long as the computation."""
        names = [f"stage 3 prefetch {n}" for n in (0, 1, 2)]
        self._race("prefetch", names, 2, over=names[:1], rate=self.given.link)

    def alone(self) -> None:
        """One process: what the engine costs by itself."""
        names = ["plain", "stage 1", "stage 2", "stage 3"]
        self._race("alone", names, 1, over=("plain",))

    def memory(self) -> None:
        """Peak of the resident memory, over what there was before the model was made."""
        for ranks in (2, 4):
            for name in self._everybody():
                with self._crew(name, ranks, SMALL_BLOCKS) as crew, self._lock(fcntl.LOCK_SH):
                    said = crew.ask("memory", steps=2)
                found = {key: max(one[key] for one in said) / MB for key in said[0]}
                self.figures[f"memory {ranks} {name}"] = found
                words = ", ".join(f"{key} {value:.0f} MB" for key, value in found.items())
                print(f"{ranks} ranks  {name:16} {words}", flush=True)

    def save(self) -> None:
        """What a save beside the training costs the training."""
        folder = self.given.dir / "saves"
        for ranks in (1, 2):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            with self._crew("stage 3", ranks) as crew:
                for number in range(self.given.rounds):
                    with self._lock(fcntl.LOCK_EX):
                        said = crew.ask("save", folder=str(folder), sync=False)
                    found = {key: max(one[key] for one in said) for key in said[0]}
                    found["bytes"] = sum(one["bytes"] for one in said)
                    self.figures[f"save {ranks} {number}"] = found
                    stall = found["stall"] / found["copy"]
                    print(
                        f"{ranks} ranks  {found['bytes'] / MB:.0f} MB  copy"
                        f" {found['copy'] * 1e3:.0f} ms, stall {found['stall'] * 1e3:.0f} ms"
                        f" ({stall:.2f} of the copy), 6 steps beside it"
                        f" {found['steps beside'] / found['steps alone']:.2f} of 6 alone"
                        f" ({found['steps alone']:.2f} s), then waited {found['waited']:.2f} s",
                        flush=True,
                    )
        shutil.rmtree(folder)

    def benchmarks(self) -> dict[str, Callable[[], None]]:
        """All there are, by name."""
        every = (self.steps, self.slow, self.prefetch, self.alone, self.memory, self.save)
        return {one.__name__: one for one in every}

    # -- how -------------------------------------------------------------------------------------

    def _deepspeed(self, *stages: int) -> list[str]:
        return [f"deepspeed {n}" for n in stages] if self.given.deepspeed_python else []

    def _everybody(self) -> list[str]:
        peers = ["ddp", "zero-redundancy", "fsdp2", *self._deepspeed(2, 3)]
        names = [*peers, "stage 1", "stage 2", "stage 3"]
        return [n for n in names if not self.given.among or n in self.given.among]

    def _race(
        self,
        title: str,
        names: Sequence[str],
        ranks: int,
        *,
        over: Sequence[str],
        rate: str | None = None,
    ) -> None:
        """Have contenders take turns; tell medians, also as ratios to some of them."""
        if rate is not None and not self.own_network:
            print(f"{title}: left out, it needs a network namespace")
            return
        with self._lock(fcntl.LOCK_SH):
            crews = [self._start(name, ranks) for name in names]
        turns: list[dict[str, dict[str, Any]]] = []
        try:
            with link(rate):
                for _ in range(self.given.rounds):
                    with self._lock(fcntl.LOCK_EX):
                        turns.append({crew.name: self._turn(crew) for crew in crews})
                    times = [f"{name} {turn['ms']:.0f}" for name, turn in turns[-1].items()]
                    print(f"{title}: {', '.join(times)} ms", file=sys.stderr, flush=True)
        finally:
            for crew in crews:
                crew.close()
        self.figures[title] = turns
        for name in names:
            self._tell(title, name, turns, [n for n in over if n in names])

    def _turn(self, crew: Crew) -> dict[str, Any]:
        before, begin = busy(), time.perf_counter()
        said = crew.ask("train", steps=self.given.steps)
        took = (time.perf_counter() - begin) * (os.cpu_count() or 1)
        # the turn has one step more than it tells of
        own = sum(one["processor"] for one in said) * (self.given.steps + 1)
        return {
            "ms": max(one["seconds"] for one in said) * 1e3,
            "processor ms": statistics.mean(one["processor"] for one in said) * 1e3,
            "sent MB": said[0]["sent"] / MB,
            "others": max(0.0, busy() - before - own) / took,
            "loss": statistics.mean(one["loss"] for one in said),
        }

    def _tell(self, title: str, name: str, turns: list[Any], over: Sequence[str]) -> None:
        of = {key: [turn[name][key] for turn in turns] for key in turns[0][name]}
        ratios = []
        for other in over:
            all_ratios = sorted(turn[name]["ms"] / turn[other]["ms"] for turn in turns)
            middle = statistics.median(all_ratios)
            ratios.append(f"{middle:.2f} of {other} ({all_ratios[0]:.2f}-{all_ratios[-1]:.2f})")
        sent = f"  {statistics.median(of['sent MB']):4.0f} MB sent" if self.own_network else ""
        print(
            f"{title:9} {name:20} {statistics.median(of['ms']):5.0f} ms"
            f"  processor {statistics.median(of['processor ms']):5.0f} ms{sent}"
            f"  {'  '.join(ratios)}  others {max(of['others']):.0%}  loss {of['loss'][-1]:.4f}",
            flush=True,
        )

    def _start(self, name: str, ranks: int, extra: dict[str, str] | None = None) -> Crew:
        python = self.given.deepspeed_python if name.startswith("deepspeed") else sys.executable
        return Crew(name, self.given.size, ranks, self.given.dir, python, extra)

    @contextmanager
    def _crew(self, name: str, ranks: int, extra: dict[str, str] | None = None) -> Iterator[Crew]:
        with self._lock(fcntl.LOCK_SH):
            crew = self._start(name, ranks, extra)
        try:
            yield crew
        finally:
            crew.close()

    @contextmanager
    def _lock(self, how: int) -> Iterator[None]:
        """Have the machine alone, where those who share it agreed on a file to lock."""
        if self.given.lock is None:
            yield
            return
        with self.given.lock.open() as file:
            fcntl.flock(file, how)
            yield


@contextmanager
def link(rate: str | None) -> Iterator[None]:
    """Make the loopback as slow as a link."""
    if rate is None:
        yield
        return
    queue = ["tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", rate]
    subprocess.run([*queue, "burst", "1mb", "limit", "64mb"], check=True)
    try:
        yield
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=True)


def enter_own_network() -> None:
    """Start again in a network namespace, if that is allowed."""
    if OWN in os.environ or shutil.which("unshare") is None:
        return
    inside = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode == 0:
        words = [*inside, sys.executable, *sys.argv]
        os.execvpe(words[0], words, {**os.environ, OWN: "1"})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="full", help="full (46.3 million parameters) or small")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn that are timed")
    parser.add_argument("--only", action="append", metavar="NAME", help="one of the benchmarks")
    parser.add_argument("--among", action="append", metavar="NAME", help="one of the contenders")
    parser.add_argument("--link", default="3gbit", help="the link that prefetching is measured on")
    parser.add_argument("--deepspeed-python", help="an interpreter that has DeepSpeed")
    parser.add_argument("--dir", type=Path, default=ROOT / "out" / "bench", help="where to work")
    parser.add_argument("--lock", type=Path, help="a file to lock while the clock runs")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    enter_own_network()
    given.dir.mkdir(parents=True, exist_ok=True)
    bench = Bench(given)
    print(bench.figures["machine"])
    for name, run in bench.benchmarks().items():
        if not given.only or name in given.only:
            run()
    if given.json:
        given.json.write_text(json.dumps(bench.figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
