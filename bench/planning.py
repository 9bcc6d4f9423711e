"""How long does everything take that doesn't depend on bytes: planning, metadata, starting up?"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import command, run_alone

TENSORS = 10_000
BEFORE, AFTER = 1024, 4096
TERABYTE = 10**12
STATES = ("master", "exp_avg", "exp_avg_sq")


def figures(folder: Path) -> dict[str, Any]:
    """Measure all of it, and print it."""
    found: dict[str, Any] = {}
    for stage in (1, 3):
        source, target = _manifest(stage, BEFORE), _manifest(stage, AFTER)
        found[f"plan stage {stage}, ms"] = _median(lambda s=source, t=target: _plan(s, t)) * 1e3
        ranks, runs = _ranks(source, target)
        found[f"ms a target rank, stage {stage}"] = ranks * 1e3
        found[f"copies a target rank, stage {stage}"] = runs
    found.update(_terabyte(folder / "terabyte"))
    python = [sys.executable, "-m", "reshard.cli"]
    found["zreshard --help, ms"] = _median(lambda: command(*python, "--help"), 5) * 1e3
    found["python -c pass, ms"] = _median(lambda: command(sys.executable, "-c", ""), 5) * 1e3
    for name, value in found.items():
        print(f"planning {name:40} {value:10.2f}", flush=True)
    return found


def _median(call: Callable[[], object], rounds: int = 3) -> float:
    return statistics.median(run_alone(call) for _ in range(rounds))


def _manifest(stage: int, world: int, nbytes: int = TERABYTE) -> Any:
    """What a native checkpoint of that world size would be; no file of it is made."""
    from reshard.dtypes import dtype
    from reshard.format import Request
    from reshard.formats import formats
    from reshard.layout import Entry, FlatSpace, Layout
    from reshard.manifest import Manifest, ParamGroup
    from reshard.partition import Contiguous
    from reshard.store import File, ShardStore

    rows = nbytes // (4 * len(STATES) * TENSORS * 1000)
    entries = tuple(Entry(f"layers.{i}.weight", (rows + i % 7, 1000)) for i in range(TENSORS))
    states = {state: dtype("float32") for state in STATES}
    space = FlatSpace("group0", entries, Contiguous(1), states, group=0)
    part = space.ruler.part
    origin = Manifest(
        format="native",
        root=Path("nowhere"),
        layout=Layout((space,), {"shard": 1}, stage),
        files=tuple(File(state, 4 * part) for state in STATES),
        stores={
            ("group0", state): ShardStore(part, part, np.array([i]), np.array([0]))
            for i, state in enumerate(STATES)
        },
        groups=(ParamGroup({"lr": 0.001}),),
    )
    request = Request(world=world, stage=stage)
    return formats()["native"].draft(origin, request, Path("nowhere")).manifest


def _plan(source: Any, target: Any) -> Any:
    from reshard.plan import Plan

    return Plan(source, target)


def _ranks(source: Any, target: Any) -> tuple[float, float]:
    """Seconds, and copies, of one target rank: all of its files, one state after the other."""
    plan, stores = _plan(source, target), target.stores.values()
    took, copies = [], []
    for rank in range(0, AFTER, AFTER // 64):
        begin, runs = time.perf_counter(), 0
        for store in stores:
            each = len(store.files) // AFTER
            for file in store.files[rank * each : (rank + 1) * each].tolist():
                runs += sum(len(batch.runs) for batch in plan.batches(file))
        took.append(time.perf_counter() - begin)
        copies.append(runs)
    return statistics.median(took), statistics.median(copies)


def _terabyte(folder: Path) -> dict[str, float]:
    """A checkpoint of 1 TB, made of files without blocks: its manifest, and what opening takes."""
    from reshard import api
    from reshard.execute import Result
    from reshard.formats.native import MANIFEST, write_metadata

    shutil.rmtree(folder, ignore_errors=True)
    manifest = _manifest(1, BEFORE)
    for file in manifest.files:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as opened:
            opened.truncate(file.nbytes)
    nothing = np.zeros(len(manifest.regions), np.uint64)
    write_metadata(folder, manifest, Result(dict.fromkeys(manifest.tensors, 0), nothing, 0, 0))
    found = {
        "files of 1 TB": float(len(manifest.files)),
        "manifest of 1 TB, MB": (folder / MANIFEST).stat().st_size / 1e6,
        "open 1 TB, ms": _median(lambda: api.open_manifest(folder)) * 1e3,
        "zreshard inspect 1 TB, ms": 1e3
        * _median(lambda: command(sys.executable, "-m", "reshard.cli", "inspect", folder)),
    }
    shutil.rmtree(folder)
    return found
