"""How are things timed on a machine that does other things too?

Cases run interleaved, once each in every round, and are compared within a round: noise that comes
and goes hits all of them alike. What is told is the median over the rounds. Memory is sampled
from ``/proc``, from outside of the process that is measured.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

Case = Callable[[Path], float]
"""Makes its output at a fresh path; returns the processor seconds that it took."""


QUIET = 0.1
"""Share of the processors that other processes may take in a round that is believed at once."""
PATIENCE = 3
"""How many times the wanted rounds are run, at most, to find quiet ones."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a case.

    Parameters
    ----------
    seconds
        By the clock.
    processor
        Of all processors together.
    others
        The share of the processors that other processes took meanwhile, from 0 to 1.
    """

    seconds: float
    processor: float
    others: float


@dataclass(frozen=True, slots=True)
class Times:
    """The runs of a case, one a round."""

    runs: tuple[Run, ...]

    @property
    def seconds(self) -> float:
        """The median by the clock."""
        return statistics.median(r.seconds for r in self.runs)

    @property
    def processor(self) -> float:
        """The median of the processor seconds."""
        return statistics.median(r.processor for r in self.runs)

    @property
    def others(self) -> float:
        """The most that other processes took."""
        return max(r.others for r in self.runs)

    def over(self, other: Times) -> tuple[float, float, float]:
        """(least, median, most) of the ratios within a round, by the clock."""
        pairs = zip(self.runs, other.runs, strict=True)
        ratios = sorted(a.seconds / b.seconds for a, b in pairs)
        return ratios[0], statistics.median(ratios), ratios[-1]


def interleaved(
    cases: Mapping[str, Case], folder: Path, rounds: int, nbytes: int = 0
) -> dict[str, Times]:
    """Run all cases ``rounds`` times, after one round that doesn't count.

    Each writes to a path that doesn't exist; what it wrote is removed before the next begins,
    outside of the time. Every second round runs the cases in the opposite order. If other
    processes disturb a round, further ones are run, and those count which were disturbed least.

    Parameters
    ----------
    cases
        What is compared.
    folder
        Where they write.
    rounds
        How many rounds count.
    nbytes
        About what a case writes: see :func:`claim`.
    """
    found: list[dict[str, Run]] = []
    for number in range(PATIENCE * rounds + 1):
        one = {}
        for name in list(cases)[:: -1 if number % 2 else 1]:
            claim(folder / "claimed", nbytes)
            one[name] = _run(cases[name], folder / "output")
        if number:
            found.append(one)
        if sum(_others(one) < QUIET for one in found) == rounds:
            break
    best = sorted(found, key=_others)[:rounds]
    return {name: Times(tuple(one[name] for one in best)) for name in cases}


def run_alone(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _others(one: Mapping[str, Run]) -> float:
    return max(run.others for run in one.values())


def _run(case: Case, target: Path) -> Run:
    _remove(target)
    before, begin = busy(), time.perf_counter()
    worked = case(target)
    took = time.perf_counter() - begin
    others = max(0.0, busy() - before - worked) / (took * (os.cpu_count() or 1))
    _remove(target)
    return Run(took, worked, others)


def busy() -> float:
    """Seconds that all processors have worked so far, or waited for their host."""
    fields = [int(f) for f in _lines("/proc/stat")[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def settle() -> None:
    """Bring memory into one known state: an empty page cache, free memory in large pieces.

    Whether the cached pages of a file are large or small, and whether free pages must be fetched
    from a virtual machine's host, changes the time of a copy by a factor of two or three and
    otherwise depends on what ran before. The first round, which doesn't count, then touches what
    the others use again. Only the superuser can; otherwise nothing is done, and a line says so.
    """
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
        Path("/proc/sys/vm/compact_memory").write_text("1")
    except OSError as error:
        print(f"memory is as other programs left it ({error}): times may be bimodal", flush=True)


def claim(path: Path, nbytes: int) -> None:
    """Write a file and remove it, so that a virtual machine has that much memory at hand.

    Pages that were free for two seconds go back to the host, and bringing them again takes several
    times as long as filling them: what runs first after a pause would pay for those that follow.
    """
    piece = bytes(1 << 20)
    with path.open("wb", buffering=0) as file:
        for _ in range(0, nbytes, len(piece)):
            file.write(piece)
    path.unlink()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
        # what `cp` and others wrote as a file has a suffix
        for other in path.parent.glob(path.name + ".*"):
            other.unlink()


def warm(path: Path) -> int:
    """Read all files at a path, so that they are in the page cache; returns their bytes."""
    total = 0
    buffer = memoryview(bytearray(1 << 20))
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        with file.open("rb", buffering=0) as opened:
            while got := opened.readinto(buffer):
                total += got
    return total


def command(*words: str | Path) -> float:
    """Run a program; returns its processor seconds. A failure is an error."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # an installed program has its modules compiled
    compiled = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(
        [str(w) for w in words], check=True, stdout=subprocess.DEVNULL, cwd=ROOT, env=compiled
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


class Child:
    """A Python process with everything imported, that does one call after the other."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "bench" / "child.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.pid = self._process.pid
        self._answer()  # says when it is ready

    def call(self, **request: Any) -> dict[str, Any]:
        """Have a conversion done; returns what the child says of it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request, default=str) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the child ended"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return dict(answer)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def memory(pid: int) -> dict[str, int]:
    """Bytes of anonymous memory (``RssAnon``) and of mapped files (``RssFile``) of a process."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("RssAnon", "RssFile"):
            found[name] = int(rest.split()[0]) * 1024
    return found


class Peak:
    """Samples a process's memory every few milliseconds, as a context."""

    def __init__(self, pid: int, every: float = 0.002) -> None:
        self._pid = pid
        self._every = every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self.before = memory(pid)
        self.peak = dict(self.before)
        self.after = dict(self.before)
        self.samples = 0

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.after = memory(self._pid)

    def _sample(self) -> None:
        while not self._stop.wait(self._every):
            self.samples += 1
            for name, nbytes in memory(self._pid).items():
                self.peak[name] = max(self.peak[name], nbytes)

    def growth(self, name: str) -> int:
        """Bytes by which the peak lies above what there was before."""
        return self.peak[name] - self.before[name]


def grown(source: Path, target: Path, wanted: Mapping[str, Any]) -> tuple[Peak, float]:
    """Convert in a process of its own: its memory meanwhile, and the seconds that it took.

    What it wrote is removed.
    """
    child = Child()
    with Peak(child.pid) as peak:
        found = child.call(source=source, target=target, wanted=wanted, options={"sync": False})
    child.close()
    _remove(target)
    return peak, float(found["seconds"])


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = next(
        (ln.split(":", 1)[1].strip() for ln in _lines("/proc/cpuinfo") if "model name" in ln), "?"
    )
    return {
        "processor": model,
        "processors": len(os.sched_getaffinity(0)),
        "kernel": os.uname().release,
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "load": Path("/proc/loadavg").read_text().split()[:3],
        "date": time.strftime("%Y-%m-%d"),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
