"""Does the real DeepSpeed resume, at another world size and stage, from what zreshard converted?

For each case a tiny model is trained by DeepSpeed at world P and stage S, saved before step
`SAVE_AT`, and trained on to `STOP`: the uninterrupted run. `zreshard convert` rewrites the
checkpoint for world Q and stage T. DeepSpeed loads that at Q ranks and stage T, and two things are
compared with the uninterrupted run:

- the live state right after the load (masters, moments, steps, weights, buffers, learning rates),
  which must be the same bit for bit;
- the losses of the next steps, which must agree within `TOLERANCE`, and the optimizer's step
  counters after them: the state alone wouldn't show that two states share one counter.

    python interop/deepspeed_resume.py --deepspeed-python ../ds/bin/python --work out/interop
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRAINER = Path(__file__).with_name("deepspeed_train.py")
SAVE_AT, STOP = 4, 7
LAUNCH_SECONDS = 900

# The largest difference of losses (they are about 5) that counts as the same. Another world size
# sums gradients in another order, and bf16 rounds each rank's share before the sum. The table
# before the cases shows both sides of the choice: what DeepSpeed itself deviates between world
# sizes from one start (must be below) and what a lost optimizer state does (must be above).
TOLERANCE = {"fp32": 2e-6, "bf16": 5e-3}

# What is special about a model or a configuration; fields of `deepspeed_train.Run`.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"schedule": True},
    "constant lr": {},
    "tied": {"schedule": True, "tied": True},
    "frozen": {"schedule": True, "frozen": True},
    "tied frozen": {"schedule": True, "tied": True, "frozen": True},
    "sub-groups": {"schedule": True, "zero": {"sub_group_size": 600}},
    "aligned": {"schedule": True, "zero": {"parameter_alignment": True}},
    "round robin": {"schedule": True, "zero": {"round_robin_gradients": True}},
    "fp32 accumulation": {"schedule": True, "top": {"data_types": {"grad_accum_dtype": "fp32"}}},
    "experts": {"schedule": True, "experts": [4, 4]},
    "experts unlike": {"experts": [4, 2], "residual": True, "tied": True},
    "experts frozen": {"schedule": True, "experts": [4, 0], "frozen": True},
    "experts round robin": {"experts": [4, 2], "zero": {"round_robin_gradients": True}},
    "experts aligned": {"experts": [4, 2], "zero": {"parameter_alignment": True}},
    "experts fp32 accumulation": {
        "experts": [4, 2],
        "top": {"data_types": {"grad_accum_dtype": "fp32"}},
    },
    "experts data first": {
        "experts": [4, 4],
        "top": {"use_data_before_expert_parallelism": True},
    },
}

WORLDS = ((2, 4), (4, 2), (2, 3), (4, 1), (2, 2))
STAGES = ((1, 1), (2, 2), (3, 3), (1, 2), (2, 3), (3, 1), (3, 2), (1, 3), (2, 1))


@dataclass(frozen=True, slots=True)
class Source:
    """An uninterrupted run and its checkpoint; the degree is that of expert parallelism."""

    variant: str
    dtype: str
    stage: int
    world: int
    degree: int = 1

    @property
    def name(self) -> str:
        return f"{self.variant.replace(' ', '-')}-{self.dtype}-{self.place}"

    @property
    def place(self) -> str:
        return place_name(self.variant, self.stage, self.world, self.degree)


@dataclass(frozen=True, slots=True)
class Case:
    """A source and the world size, stage and degree to resume at."""

    source: Source
    stage: int
    world: int
    degree: int = 1

    @property
    def name(self) -> str:
        return f"{self.source.name}-to-{self.place}"

    @property
    def place(self) -> str:
        return place_name(self.source.variant, self.stage, self.world, self.degree)


def place_name(variant: str, stage: int, world: int, degree: int) -> str:
    """Stage, ranks and, for models with experts, the degree."""
    experts = f"-e{degree}" if "experts" in VARIANTS[variant] else ""
    return f"stage{stage}-p{world}{experts}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case; `problem` is empty if all is well."""

    deviation: float | None
    compared: int
    problem: str


def all_cases() -> list[Case]:
    """Every stage pair and world pair for the plain model; the variants where they differ."""
    cases = [
        Case(Source("plain", dtype, old, p), new, q)
        for dtype in ("fp32", "bf16")
        for old, new in STAGES
        for p, q in WORLDS
    ]
    for variant in ("tied", "frozen", "tied frozen", "sub-groups"):
        cases += [Case(Source(variant, "bf16", old, 2), new, 3) for old, new in STAGES]
    cases += [Case(Source("sub-groups", "fp32", 3, 2), new, 3) for new in (1, 2, 3)]
    for variant in ("aligned", "round robin"):
        cases += [Case(Source(variant, "bf16", old, 2), new, 3) for old, new in STAGES if old < 3]
        cases += [Case(Source(variant, "bf16", 3, 2), new, 3) for new in (1, 2)]
    cases += [Case(Source("constant lr", "fp32", s, 2), s, 3) for s in (1, 2, 3)]
    cases += [Case(Source("fp32 accumulation", "bf16", 1, 2), 1, 3)]
    return cases + cases_with_experts()


def cases_with_experts() -> list[Case]:
    """Models with experts: stages, worlds and degrees of expert parallelism."""
    cases = []
    for dtype in ("fp32", "bf16"):
        for old, new in ((1, 1), (2, 2), (1, 2), (2, 1)):
            source = Source("experts", dtype, old, 4, 2)
            places = [(2, 2), (6, 2), (4, 2)]
            if old == new:
                places += [(4, 4), (4, 1), (3, 1), (2, 1)]
            cases += [Case(source, new, world, degree) for world, degree in places]
        cases += [Case(Source("experts", dtype, 2, 4, 4), 2, w, d) for w, d in ((2, 2), (6, 2))]
        cases += [Case(Source("experts", dtype, 1, 2, 1), 1, w, d) for w, d in ((3, 1), (4, 4))]
    for variant in ("experts unlike", "experts round robin", "experts aligned"):
        for stage in (1, 2):
            source = Source(variant, "bf16", stage, 4, 2)
            cases += [Case(source, 3 - stage, w, d) for w, d in ((6, 2), (2, 2), (3, 1))]
    for variant in ("experts frozen", "experts fp32 accumulation", "experts data first"):
        source = Source(variant, "bf16", 1, 4, 2)
        cases += [Case(source, 1, w, d) for w, d in ((6, 2), (2, 2), (2, 1))]
    cases += [Case(Source("experts data first", "bf16", 2, 4, 2), 2, 6, 2)]
    return cases


class DeepSpeed:
    """Runs the trainer under torchrun, many runs a launch, and keeps what each reported."""

    def __init__(self, python: str, work: Path) -> None:
        self.python = python
        self.work = work

    def run(self, world: int, runs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Do `runs` (name → fields of Run but `out`) at one world size.

        A run that fails ends its launch: it is reported as ``{"error": ...}`` and the runs after it
        are launched again.
        """
        results: dict[str, dict[str, Any]] = {}
        pending = list(runs)
        while pending:
            log = self._launch(world, {name: runs[name] for name in pending})
            done = [name for name in pending if self._result(name).is_file()]
            results |= {name: json.loads(self._result(name).read_text()) for name in done}
            pending = pending[len(done) :]
            if pending:
                results[pending[0]] = {"error": last_error(log)}
                pending = pending[1:]
        return results

    def _result(self, name: str) -> Path:
        return self.work / name / "result.json"

    def _launch(self, world: int, runs: Mapping[str, Mapping[str, Any]]) -> Path:
        files = []
        for name, fields in runs.items():
            out = self.work / name
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir(parents=True)
            (out / "run.json").write_text(json.dumps({"out": str(out), **fields}))
            files.append(str(out / "run.json"))
        command = [self.python, "-m", "torch.distributed.run", f"--nproc_per_node={world}"]
        command += [f"--master_port={free_port()}", str(TRAINER), *files]
        threads = {"OMP_NUM_THREADS": "1", "LOCAL_SIZE": str(world), "DS_ACCELERATOR": "cpu"}
        log = self.work / next(iter(runs)) / "torchrun.log"
        with log.open("wb") as stream:
            try:
                subprocess.run(
                    command,
                    env={**os.environ, **threads},
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    timeout=LAUNCH_SECONDS,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                stream.write(f"\nTimeoutError: no end after {LAUNCH_SECONDS} s\n".encode())
        return log


def free_port() -> int:
    """A TCP port for torchrun that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def last_error(log: Path) -> str:
    """The line that says what went wrong, from a torchrun log."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [x for x in lines if re.search(r"(Error|Exception|Exit): ", x) and "Child" not in x]
    line = errors[0] if errors else (lines[-1] if lines else "no output")
    return f"DeepSpeed: {re.sub(r'^.*?]: ', '', line)[:160]} (see {log})"


def convert(command: str, case: Case, checkpoint: Path, to: Path) -> str:
    """Convert a checkpoint for `case`; returns what went wrong, or nothing.

    `command` is the command line of zreshard, or ``copy``: no conversion, only for cases that need
    none, to try this script itself.
    """
    shutil.rmtree(to, ignore_errors=True)
    if command == "copy":
        shutil.copytree(checkpoint, to)
        return ""
    source = case.source
    arguments = ["convert", str(checkpoint), str(to), "--from", str(source.world)]
    arguments += ["--to", str(case.world), "--stage", str(case.stage), "--format", "deepspeed"]
    if case.degree != source.degree:
        arguments += ["--expert-parallel", str(case.degree)]
    if source.stage == 3:  # every rank saved its own buffers, and they differ
        arguments += ["--replicas", "first"]
    done = subprocess.run(
        [*shlex.split(command), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return ""
    said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
    return f"zreshard exited with {done.returncode}: {said[:160]}"


def run_fields(source: Source, stage: int, degree: int, **more: Any) -> dict[str, Any]:
    """The trainer's fields for a run of this model at a stage and degree."""
    fields = {"dtype": source.dtype, "stage": stage, "degree": degree, "stop": STOP}
    return {**VARIANTS[source.variant], **fields, **more}


def train_sources(deepspeed: DeepSpeed, sources: Iterable[Source]) -> dict[Source, dict[str, Any]]:
    """Every uninterrupted run, by world size; result.json of each."""
    results: dict[Source, dict[str, Any]] = {}
    by_world: dict[int, list[Source]] = defaultdict(list)
    for source in sources:
        by_world[source.world].append(source)
    for world, group in by_world.items():
        runs = {
            f"source/{s.name}": run_fields(s, s.stage, s.degree, save_at=SAVE_AT) for s in group
        }
        found = deepspeed.run(world, runs)
        results |= {s: found[f"source/{s.name}"] for s in group}
    return results


def resume(
    deepspeed: DeepSpeed, command: str, cases: Sequence[Case], wanted: Mapping[Source, Any]
) -> dict[Case, Outcome]:
    """Convert and resume every case; the resumed runs of one world size share launches."""
    outcomes: dict[Case, Outcome] = {}
    by_world: dict[int, list[Case]] = defaultdict(list)
    for case in cases:
        if "error" in wanted[case.source]:
            outcomes[case] = Outcome(None, 0, f"source: {wanted[case.source]['error']}")
            continue
        checkpoint = deepspeed.work / "source" / case.source.name / "checkpoint"
        problem = convert(command, case, checkpoint, deepspeed.work / "converted" / case.name)
        if problem:
            outcomes[case] = Outcome(None, 0, problem)
        else:
            by_world[case.world].append(case)
    for world, group in by_world.items():
        runs = {f"resumed/{case.name}": resumed_fields(deepspeed.work, case) for case in group}
        found = deepspeed.run(world, runs)
        for case in group:
            outcomes[case] = judge(case, found[f"resumed/{case.name}"], wanted[case.source])
    return outcomes


def resumed_fields(work: Path, case: Case) -> dict[str, Any]:
    """The trainer's fields for resuming a case."""
    return run_fields(
        case.source,
        case.stage,
        case.degree,
        load=str(work / "converted" / case.name),
        expect=str(work / "source" / case.source.name / "state.pt"),
    )


def deviation(found: Mapping[str, float], wanted: Mapping[str, float]) -> float:
    """The largest difference of the losses of the steps that `found` has."""
    return max(abs(found[step] - wanted[step]) for step in found)


def judge(case: Case, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> Outcome:
    """Compare a resumed run with the uninterrupted one."""
    if "error" in found:
        return Outcome(None, 0, found["error"])
    expected_steps = [str(step) for step in range(SAVE_AT, STOP)]
    if list(found["losses"]) != expected_steps:
        return Outcome(None, 0, f"resumed at steps {list(found['losses'])}, not {expected_steps}")
    worst = deviation(found["losses"], wanted["losses"])
    limit = TOLERANCE[case.source.dtype]
    different = found["different"]
    problem = ""
    if different:
        problem = f"{len(different)} tensors differ after the load: {', '.join(different[:3])}"
    elif found["steps"] != wanted["steps"]:
        problem = f"the optimizer counts {found['steps']} steps, not {wanted['steps']}"
    elif not worst <= limit:
        problem = f"loss deviates by {worst:.1e}, more than {limit:.0e}"
    return Outcome(worst, found["compared"], problem)


def scale_sources(variant: str, dtype: str) -> tuple[Source, Source]:
    """One start trained at 2 and at 4 ranks (experts: at degrees of 1 and 2)."""
    degree = 2 if "experts" in VARIANTS[variant] else 1
    return Source(variant, dtype, 2, 2), Source(variant, dtype, 2, 4, degree)


def all_scales() -> list[tuple[str, str]]:
    """The models and element types whose tolerances are looked at."""
    return [(variant, dtype) for variant in ("plain", "experts") for dtype in TOLERANCE]


def print_scale(deepspeed: DeepSpeed, wanted: Mapping[Source, Any]) -> bool:
    """Show what the tolerances lie between; says whether they do.

    Below: what DeepSpeed itself deviates from one start at 2 and at 4 ranks. Above: a resume at the
    same world size and stage, from the weights alone.
    """
    controls = {
        f"control/{two.name}": run_fields(
            two,
            two.stage,
            two.degree,
            load=str(deepspeed.work / "source" / two.name / "checkpoint"),
            load_optimizer=False,
        )
        for scale in all_scales()
        for two in scale_sources(*scale)[:1]
    }
    found = deepspeed.run(2, controls)
    print("| model | dtype | same start, 2 and 4 ranks | tolerance | optimizer state lost |")
    print("|---|---|---|---|---|")
    good = True
    for variant, dtype in all_scales():
        limit = TOLERANCE[dtype]
        sources = scale_sources(variant, dtype)
        two, four = (wanted[source] for source in sources)
        control = found[f"control/{sources[0].name}"]
        for result in (two, four, control):
            if "error" in result:
                raise SystemExit(f"DeepSpeed doesn't run here: {result['error']}")
        noise = deviation(four["losses"], two["losses"])
        lost = deviation(control["losses"], two["losses"])
        print(f"| {variant} | {dtype} | {noise:.1e} | {limit:.0e} | {lost:.1e} |")
        good = good and noise < limit < lost
    print(flush=True)
    return good


def print_outcomes(outcomes: Mapping[Case, Outcome]) -> None:
    """Show the cases as a markdown table."""
    print("| model | dtype | stage | ranks | tensors equal | largest loss deviation | result |")
    print("|---|---|---|---|---|---|---|")
    for case, outcome in outcomes.items():
        source = case.source
        worst = "-" if outcome.deviation is None else f"{outcome.deviation:.1e}"
        print(
            f"| {source.variant} | {source.dtype} | {source.stage} → {case.stage} "
            f"| {ranks_text(source)} → {ranks_text(case)} | {outcome.compared or '-'} | {worst} "
            f"| {outcome.problem or 'same'} |"
        )


def ranks_text(place: Source | Case) -> str:
    """Ranks and, for models with experts, the degree."""
    return f"{place.world}, e{place.degree}" if "-e" in place.place else str(place.world)


def default_zreshard() -> str:
    """The `zreshard` of the environment that runs this script."""
    beside = Path(sys.executable).with_name("zreshard")
    return shlex.quote(str(beside)) if beside.is_file() else "zreshard"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--deepspeed-python",
        default=os.environ.get("DEEPSPEED_PYTHON"),
        help="python of an environment with deepspeed 0.19.8 (or $DEEPSPEED_PYTHON)",
    )
    parser.add_argument("--zreshard", default=default_zreshard(), help="command, or: copy")
    parser.add_argument("--work", type=Path, default=Path("out/interop"), help="scratch folder")
    parser.add_argument("--only", default="", help="regular expression on case names")
    found = parser.parse_args()
    if not found.deepspeed_python:
        parser.error("--deepspeed-python is needed: see interop/README.md")
    return found


def main() -> int:
    """Do the cases; 0 if all are the same."""
    args = arguments()
    started = time.monotonic()
    deepspeed = DeepSpeed(args.deepspeed_python, args.work.resolve())
    cases = [case for case in all_cases() if re.search(args.only, case.name)]
    if args.zreshard == "copy":
        cases = [c for c in cases if c.place == c.source.place]
    if not cases:
        raise SystemExit(f"no case matches {args.only!r}")
    scales = [source for scale in all_scales() for source in scale_sources(*scale)]
    wanted = train_sources(deepspeed, dict.fromkeys([*scales, *(c.source for c in cases)]))
    scale = print_scale(deepspeed, wanted)
    outcomes = resume(deepspeed, args.zreshard, cases, wanted)
    print_outcomes(outcomes)
    bad = sum(bool(outcome.problem) for outcome in outcomes.values())
    print(f"\n{len(cases) - bad} of {len(cases)} the same, {time.monotonic() - started:.0f} s")
    if not scale:
        print("The tolerances don't lie between DeepSpeed's own deviation and a lost state.")
    return 1 if bad or not scale else 0


if __name__ == "__main__":
    sys.exit(main())
