"""``zreshard verify``: is a checkpoint whole to the last byte, and equal to another one?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from reshard.cli.examples import Verb
from reshard.cli.failure import Failure
from reshard.cli.options import Moving, choosing, common, moving
from reshard.cli.output import Output, count, duration, rate, shown, size

if TYPE_CHECKING:
    from reshard.verification import Proof, Verified

DIFFERENT = 1
"""Exit code when two checkpoints don't hold the same tensors."""


@click.command(
    cls=Verb,
    short_help="Check all bytes of a checkpoint, or that two are the same.",
    examples=[
        "zreshard verify ckpt-32",
        "zreshard verify ckpt-32 --against ckpt-8",
        "zreshard verify model.safetensors --against ckpt-8 --weights",
    ],
)
@click.argument("path", metavar="PATH", type=click.Path())
@choosing
@click.option(
    "--against",
    metavar="OTHER",
    type=click.Path(),
    help="Verify this one too, and prove that both hold the same tensors.",
)
@click.option(
    "--weights",
    is_flag=True,
    help="With --against: compare the weights only, masters with exported weights.",
)
@moving
@common
@click.pass_context
def verify(
    ctx: click.Context,
    path: str,
    source_format: str | None,
    against: str | None,
    weights: bool,
    moving: Moving,
    output: Output,
) -> None:
    """Read all of the checkpoint at PATH and compare it with everything that is recorded.

    Checksums of files, digests of tensors, copies on several ranks, and 16-bit weights with their
    masters. All that is wrong is listed. Exit code 4: damaged; 1: not the same as OTHER.
    """
    from reshard.api import open_manifest
    from reshard.digests import survey_nbytes
    from reshard.verification import verify as verify_one
    from reshard.verification import verify_against

    if weights and against is None:
        raise click.UsageError("--weights says what to compare; give --against too")
    manifest = open_manifest(path, source_format)
    options = moving.options()
    if against is None:
        with moving.progress.running("verify", survey_nbytes(manifest)):
            found = verify_one(manifest, options)
        failure = _failure([found])
        output.document({**found.to_json(), **_error(failure)})
        _show(found, output)
    else:
        other = open_manifest(against)
        total = survey_nbytes(manifest) + survey_nbytes(other)
        with moving.progress.running("verify", total):
            here, there, proof = verify_against(manifest, other, options, weights=weights)
        failure = _failure([here, there])
        content = {**here.to_json(), "against": there.to_json(), "proof": proof.to_json()}
        output.document({**content, **_error(failure)})
        _show(here, output)
        _show(there, output)
        _show_proof(proof, here, there, weights, output)
        if failure is None and not proof.same:
            ctx.exit(DIFFERENT)
    if failure is not None:
        ctx.exit(failure.exit_code)


def _failure(found: list[Verified]) -> Failure | None:
    """What an exit code and an ``error`` in JSON are made of, where something is wrong."""
    problems = [(one.path, problem) for one in found for problem in one.problems]
    if not problems:
        return None
    path, first = problems[0]
    if len(problems) == 1:
        return Failure(first.kind, first.what, first.where, first.hint, first.exit_code)
    what = f"{len(problems)} problems; the first: {first.what}"
    return Failure(first.kind, what, first.where or path, first.hint, first.exit_code)


def _error(failure: Failure | None) -> dict[str, object]:
    return {} if failure is None else {"error": failure.to_json()}


def _show(found: Verified, output: Output) -> None:
    speed = f"{size(found.nbytes)} in {duration(found.seconds)} "
    speed += f"({rate(found.nbytes, found.seconds)})"
    name = output.strong(shown(found.path))
    if found.ok:
        verdict = output.good("whole")
        output.line(f"{name}: {verdict}; {count(found.tensors, 'tensor')}, {speed}")
    else:
        verdict = output.bad(count(len(found.problems), "problem"))
        output.line(f"{name}: {verdict}; {count(found.tensors, 'tensor')}, {speed}")
    checked = [
        (found.checksums, "checksum", "checksums", "compared"),
        (found.digests, "tensor", "tensors", "compared with the recorded digest"),
        (found.replicas, "tensor", "tensors", "stored several times, compared with each other"),
        (found.roundings, "weight", "weights", "compared with the rounding of the master"),
        (found.unproved, "tensor", "tensors", "read, with nothing recorded to compare with"),
    ]
    for number, one, many, what in checked:
        if number:
            output.line(f"  {count(number, one, many)} {what}")
    if not output.json:
        for problem in found.problems:
            where = "" if problem.where is None else f"{shown(problem.where)}: "
            _complain(f"{where}{shown(problem.what)}", output)
            if problem.hint is not None and (output.verbose or len(found.problems) == 1):
                output.line(f"    {shown(problem.hint)}")


def _show_proof(
    proof: Proof, here: Verified, there: Verified, weights: bool, output: Output
) -> None:
    noun = "weight" if weights else "tensor"
    if proof.same:
        verdict = output.good("the same")
        output.line(f"{verdict}: {count(proof.equal, noun)}, by the digests of their bytes")
        return
    output.line(f"{output.bad('not the same')}: {count(proof.equal, noun)} equal")
    if output.json:
        return
    most = None if output.verbose else 20
    for name, why in proof.different[:most]:
        _complain(f"{shown(name)} {why}", output)
    _rest(len(proof.different), most, output)
    for path, names in ((here.path, proof.only_here), (there.path, proof.only_there)):
        for name in names[:most]:
            _complain(f"{shown(name)} is only in {shown(path)}", output)
        _rest(len(names), most, output)
    if not weights and (proof.only_here or proof.only_there):
        output.line("  (--weights compares the weights only, whatever else is beside them)")


def _complain(text: str, output: Output) -> None:
    """A line about something that is wrong; on stderr when stdout is to be quiet."""
    if output.quiet:
        output.error(text)
    else:
        output.line(f"  {output.bad('x')} {text}")


def _rest(number: int, most: int | None, output: Output) -> None:
    if most is not None and number > most:
        output.line(f"  and {number - most:,} more (--verbose lists them)")
