"""How fast is it, and in how much memory? See docs/benchmarks.md.

Run it with ``python bench/run.py [--size 1.07GB] [--rounds 7] [--only NAME] [--dir DIR]``; it
needs torch (to make inputs) and about eight times ``--size`` on the disk.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import bare, make, planning  # noqa: E402
from bench.measure import Case, Child, command, grown, interleaved, machine, settle, warm  # noqa: E402

MB = 1e6
NATIVE = (("8to32", 8, 32), ("32to8", 32, 8), ("7to5", 7, 5))


def call(child: Child, source: Path, wanted: dict[str, Any], sync: bool, target: Path) -> float:
    """A library call in a process that has everything imported."""
    options = {"sync": sync}
    found = child.call(source=source, target=placed(target, wanted), wanted=wanted, options=options)
    return float(found["processor"])


def placed(target: Path, wanted: dict[str, Any]) -> Path:
    """Where a call writes: one file of safetensors has that suffix."""
    single = wanted.get("format") == "safetensors"
    return target.with_name(f"{target.name}.safetensors") if single else target


def cli(words: list[str], target: Path) -> float:
    """The command as a whole process."""
    return command(
        sys.executable, "-m", "reshard.cli", *words[:2], f"{target}{words[2]}", *words[3:]
    )


def has_cli() -> bool:
    """Whether the command line is there."""
    return importlib.util.find_spec("reshard.cli.main") is not None


def copy(source: Path, target: Path) -> float:
    """``cp -r``."""
    return command("cp", "-r", source, target)


def copy_sync(source: Path, target: Path) -> float:
    """``cp -r``, and everything that it wrote on the disk."""
    worked = command("cp", "-r", source, target)
    files = [target] if target.is_file() else [p for p in target.rglob("*") if p.is_file()]
    return worked + command("sync", *files)


class Bench:
    """Runs benchmarks and collects their figures."""

    def __init__(self, folder: Path, nbytes: int, rounds: int, synced: bool) -> None:
        self.synced = synced
        self.folder = folder
        self.rounds = rounds
        self.figures: dict[str, Any] = {}
        self._nbytes = nbytes
        self._inputs: dict[str, Path] = {}

    def input(self, name: str) -> Path:
        """A checkpoint that is measured."""
        if not self._inputs:
            self._inputs = make.inputs(self.folder, self._nbytes)
        return self._inputs[name]

    def native(self, name: str, before: int, after: int) -> None:
        """Resharding of a native checkpoint against ``cp -r`` of it."""
        source, child = self.input(f"native{before}"), Child()
        wanted = {"world": after}
        cases: dict[str, Case] = {
            "cp": partial(copy, source),
            "bare calls": partial(bare.move, source, after),
            "library": partial(call, child, source, wanted, False),
            "without proof": partial(call, child, source, {**wanted, "derived": False}, False),
            "cp+sync": partial(copy_sync, source),
            "library+sync": partial(call, child, source, wanted, True),
        }
        if has_cli():
            cases["command+sync"] = partial(cli, ["convert", str(source), "", "--to", str(after)])
        self._compare(name, source, cases)
        child.close()

    def consolidate(self, name: str, given: str, *, optimizer: bool = False) -> None:
        """Consolidation of masters, or all tensors, against ``cp`` of the file that comes out."""
        source, child = self.input(given), Child()
        wanted = {"format": "safetensors", "drop": ["*"], "optimizer": optimizer}
        done = self.folder / f"consolidated-{name.replace(' ', '-')}"
        if not done.with_suffix(".safetensors").exists():
            call(child, source, wanted, False, done)
        file = done.with_suffix(".safetensors")
        cases: dict[str, Case] = {
            "cp": partial(copy, file),
            "library": partial(call, child, source, wanted, False),
            "without proof": partial(call, child, source, {**wanted, "derived": False}, False),
            "cp+sync": partial(copy_sync, file),
            "library+sync": partial(call, child, source, wanted, True),
        }
        if has_cli():
            words = ["consolidate", str(source), ".safetensors", "--drop", "*"]
            words += ["--optimizer"] if optimizer else []
            cases["command+sync"] = partial(cli, words)
        self._compare(name, file, cases, read=source)
        child.close()

    def dcp(self, name: str) -> None:
        """A distributed checkpoint of 4 ranks to a native one of 8, against ``cp -r`` of it."""
        source, child = self.input("dcp"), Child()
        wanted = {"format": "native", "world": 8}
        cases: dict[str, Case] = {
            "cp": partial(copy, source),
            "library": partial(call, child, source, wanted, False),
            "cp+sync": partial(copy_sync, source),
            "library+sync": partial(call, child, source, wanted, True),
        }
        self._compare(name, source, cases)
        child.close()

    def _compare(
        self, name: str, source: Path, cases: dict[str, Case], read: Path | None = None
    ) -> None:
        settle()
        nbytes = warm(source)
        if read is not None:
            warm(read)
        # apart, so that the disk is idle while nothing waits for it
        plain = {n: c for n, c in cases.items() if "+sync" not in n}
        synced = {n: c for n, c in cases.items() if "+sync" in n}
        times = interleaved(plain, self.folder, self.rounds, nbytes)
        if self.synced:
            times.update(interleaved(synced, self.folder, self.rounds, nbytes))
        figures: dict[str, Any] = {"bytes": nbytes}
        for case, took in times.items():
            base = times["cp+sync" if "+sync" in case else "cp"]
            figures[case] = {
                "seconds": took.seconds,
                "ratio": took.over(base),
                "processor": took.processor,
                "others": took.others,
            }
            low, ratio, high = figures[case]["ratio"]
            speed = nbytes / took.seconds / 1e9
            print(
                f"{name:16} {case:14} {took.seconds:7.3f} s  {speed:5.2f} GB/s"
                f"  {ratio:5.2f} of cp ({low:.2f}-{high:.2f})"
                f"  processor {took.processor:.2f} s, others {took.others:.0%}",
                flush=True,
            )
        self.figures[name] = figures

    def memory(self) -> None:
        """Growth of memory in a process that does one call, over what its imports take."""
        cases = {
            **{name: (f"native{a}", {"world": b}) for name, a, b in NATIVE},
            "stage2": ("stage2", {"format": "safetensors", "drop": ["*"]}),
            "stage3": ("stage3", {"format": "safetensors", "drop": ["*"]}),
        }
        for name, (source, wanted) in cases.items():
            target = placed(self.folder / "output", wanted)
            peak, _ = grown(self.input(source), target, wanted)
            anon, file = peak.growth("RssAnon"), peak.growth("RssFile")
            self.figures[f"memory {name}"] = {"RssAnon": anon, "RssFile": file}
            print(
                f"memory {name:9} anonymous +{anon / MB:.1f} MB, mapped +{file / MB:.1f} MB"
                f" (+{(peak.after['RssFile'] - peak.before['RssFile']) / MB:.1f} MB left)"
                f" ({peak.samples} samples)",
                flush=True,
            )

    def planning(self) -> None:
        """Planning, metadata and starting up: what doesn't depend on the bytes."""
        self.figures["planning"] = planning.figures(self.folder)

    def benchmarks(self) -> dict[str, Callable[[], None]]:
        """All there are, by name."""
        return {
            **{name: partial(self.native, name, a, b) for name, a, b in NATIVE},
            "stage2": partial(self.consolidate, "stage2", "stage2"),
            "stage3": partial(self.consolidate, "stage3", "stage3"),
            "dcp": partial(self.consolidate, "dcp", "dcp"),
            "dcp all": partial(self.consolidate, "dcp all", "dcp", optimizer=True),
            "dcp to native": partial(self.dcp, "dcp to native"),
            "memory": self.memory,
            "planning": self.planning,
        }


def _nbytes(text: str) -> int:
    return int(float(text.upper().removesuffix("GB")) * 1e9)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=_nbytes, default="1.07GB", help="bytes of a checkpoint")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-sync", action="store_true", help="leave out what waits for the disk")
    parser.add_argument("--only", action="append", metavar="NAME", help="one of the benchmarks")
    parser.add_argument("--dir", type=Path, default=ROOT / "out" / "bench", help="where to work")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    given.dir.mkdir(parents=True, exist_ok=True)
    bench = Bench(given.dir, given.size, given.rounds, not given.no_sync)
    bench.figures["machine"] = machine()
    print(bench.figures["machine"])
    for name, run in bench.benchmarks().items():
        if not given.only or name in given.only:
            run()
    if given.json:
        given.json.write_text(json.dumps(bench.figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
