"""How do verbs that write a checkpoint check, run and report?"""

from __future__ import annotations

import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from reshard.cli.failure import Interrupted
from reshard.cli.options import Moving
from reshard.cli.output import Output, count, duration, rate, shown, size, span
from reshard.errors import RequestError

if TYPE_CHECKING:
    from reshard.conversion import Job, Wanted
    from reshard.report import Report
    from reshard.side import Side

NOTES = 10
"""Notes of a reader that are shown without --verbose."""


@dataclass(frozen=True, slots=True)
class Source:
    """The checkpoint that is read.

    Parameters
    ----------
    path
        As it was given.
    format
        Which one is meant, where a folder holds checkpoints of several formats.
    """

    path: str
    format: str | None


def prepare(source: Source, target: str, wanted: Wanted, moving: Moving, output: Output) -> Job:
    """Open the source, check what is asked for and plan it; warn of what has no effect."""
    from reshard.api import open_manifest, prepare

    manifest = open_manifest(source.path, source.format)
    names = {name for name, _ in manifest.tensors}
    for glob in wanted.keep:
        if not any(fnmatchcase(name, glob) for name in names):
            raise RequestError(
                f"--keep-fp32 {glob!r} matches no tensor",
                where=manifest.root,
                hint=f"`zreshard inspect {source.path} --all` lists the names",
            )

    def notice(text: str) -> None:
        moving.progress.rebase()
        output.note(text)

    job = prepare(manifest, target, wanted, moving.options(notice))
    lost = [loss.what for loss in job.draft.losses]
    for glob in wanted.drop:
        if not any(fnmatchcase(what, glob) for what in lost):
            output.warn(f"--drop {glob!r} matches nothing that the target can't hold")
    warn_of_notes(job.report.notes, output)
    return job


def warn_of_notes(notes: tuple[str, ...], output: Output) -> None:
    """Pass on what the source's reader wants to say."""
    most = len(notes) if output.verbose else NOTES
    for note in notes[:most]:
        output.warn(note)
    if len(notes) > most:
        output.warn(f"and {len(notes) - most} more notes (--verbose shows them)")


def carry_out(
    source: Source,
    target: str,
    wanted: Wanted,
    moving: Moving,
    output: Output,
    verb: str,
    *,
    dry_run: bool,
) -> None:
    """Plan what is asked for, and do it or only show it."""
    job = prepare(source, target, wanted, moving, output)
    if dry_run:
        show_plan(job, output)
    else:
        run(job, verb, moving, output)


def run(job: Job, verb: str, moving: Moving, output: Output) -> None:
    """Carry a job out and say what was done."""
    try:
        with moving.progress.running(verb, job_nbytes(job)):
            report = job.run()
    except KeyboardInterrupt as error:
        raise Interrupted(_left_at(job)) from error
    output.document(report.to_json())
    output.line(_done(report, output))
    _losses(report, output)


def show_plan(job: Job, output: Output) -> None:
    """Say what a job would do."""
    report = job.report
    output.document(report.to_json())
    output.line(
        f"{shown(report.source.path)} -> {shown(report.target.path)}  "
        + output.faint("(planned, nothing was written)")
    )
    before, after = _column(report.source), _column(report.target)
    rows = [(name, before[name], after[name]) for name in before]
    output.table([("", "before", "after"), *rows], indent=2)
    output.table(_effects(report), indent=2)
    _losses(report, output)
    if report.disk_free is not None and report.disk_needed > report.disk_free:
        lacking = size(report.disk_needed - report.disk_free)
        output.warn(f"{lacking} more must be free at {report.target.path} before it can be written")


def job_nbytes(job: Job) -> int:
    """How many bytes the progress of a job adds up to."""
    written = sum(m.nbytes for m in job.plan.messages if m.written)
    return written + sum(c.tensor.nbytes for c in job.plan.join.read_only.covers)


def _left_at(job: Job) -> str:
    if os.path.isfile(job.target) or (os.path.isdir(job.target) and os.listdir(job.target)):
        return f"{shown(job.target)} had just been written and is whole"
    return f"nothing was written at {shown(job.target)}"


def _done(report: Report, output: Output) -> str:
    target, nbytes, seconds = report.target, report.target.nbytes, report.seconds or 0.0
    what = [target.format]
    if target.format != "safetensors":
        what.append(count(target.world, "rank"))
    else:
        what.append(count(target.files, "file"))
    if target.stage is not None:
        what.append(f"stage {target.stage}")
    speed = f"{size(nbytes)} in {duration(seconds)} ({rate(nbytes, seconds)})"
    if report.resumed_bytes:
        moved = size(report.moved_bytes or 0)
        speed = f"{size(nbytes)}, the last {moved} in {duration(seconds)}"
    parts = [", ".join(what), speed, _tensors(report)]
    if report.regions_checked:
        parts.append(f"verified {count(report.regions_checked, 'source checksum')}")
    return f"{output.good('wrote')} {shown(target.path)}: " + "; ".join(parts)


def _tensors(report: Report) -> str:
    parts = [(report.moved, "moved"), (report.copied, "copied"), (report.cast, "of them cast")]
    found = [f"{number:,} {what}" for number, what in parts if number]
    if not found:
        return "no tensors"
    first, _, rest = found[0].partition(" ")
    noun = "tensor" if first == "1" else "tensors"
    return ", ".join([f"{first} {noun} {rest}", *found[1:]])


def _column(side: Side) -> dict[str, str]:
    return {
        "format": side.format,
        "stage": "-" if side.stage is None else str(side.stage),
        "world size": mesh(side),
        "tensors": f"{side.tensors:,} ({size(side.nbytes)})",
        "files": f"{side.files:,} ({size(side.file_bytes)})",
        "a rank": span(*side.rank_bytes),
    }


def mesh(side: Side) -> str:
    """The world size, and the other axes of the mesh where there are any."""
    others = [f"{axis} {n}" for axis, n in side.mesh.items() if axis != "shard" and n > 1]
    return ", ".join([str(side.world), *others])


def _effects(report: Report) -> list[tuple[str, str]]:
    free = "" if report.disk_free is None else f" of {size(report.disk_free)} free"
    found = [
        ("moved", f"{count(report.moved, 'tensor')} cut in another way"),
        ("copied", f"{count(report.copied, 'tensor')} cut as before"),
        ("padded", f"{size(report.padded)} of zeros between shards"),
        ("tied", f"{count(report.aliased, 'name')} stored once"),
        ("cast", f"{count(report.cast, 'tensor')} to another element type"),
        ("proved", f"{count(report.proved, 'tensor')} only read, to be compared"),
        ("memory", f"at most {size(report.peak_memory)} for buffers"),
        ("disk", f"{size(report.disk_needed)}{free}"),
    ]
    return [row for row in found if not row[1].startswith("0 ")]


def _losses(report: Report, output: Output) -> None:
    most = len(report.dropped) if output.verbose else NOTES
    whys: dict[str, list[str]] = {}
    for what, why in report.dropped:
        whys.setdefault(why, []).append(what)
    for why, names in list(whys.items())[:most]:
        shown_names = names if output.verbose else names[:3]
        more = (
            f" and {len(names) - len(shown_names):,} more" if len(names) > len(shown_names) else ""
        )
        output.line(f"  left out: {', '.join(map(shown, shown_names))}{more} ({shown(why)})")
