"""``zreshard convert`` and ``zreshard plan``: another world size, stage or format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from reshard.cli import jobs
from reshard.cli.examples import Verb
from reshard.cli.options import FormatName, Mesh, Moving, casting, choosing, common, writing
from reshard.cli.output import Output

_DRY_RUN = click.option(
    "--dry-run", is_flag=True, help="Check and plan only, as `zreshard plan` does."
)


def _conversion(verb: Callable[..., Any]) -> Callable[..., Any]:
    """What both verbs take."""
    decorators: list[Callable[[Any], Any]] = [
        common,
        writing,
        *([_DRY_RUN] if verb.__name__ == "convert" else []),
        casting,
        click.option(
            "--optimizer",
            is_flag=True,
            help="Write the optimizer's state too, in formats that hold it on request "
            "(safetensors, torch).",
        ),
        click.option(
            "--expert-parallel",
            type=click.IntRange(min=1),
            metavar="N",
            help="Degree of expert parallelism of the target; by default the source's.",
        ),
        click.option(
            "--mesh",
            type=Mesh(),
            metavar="AXIS=N,...",
            help="Sizes of the target's axes, such as shard=8,tensor=4: --to, --expert-parallel "
            "and the degree of tensor parallelism in one.",
        ),
        click.option(
            "--tag", metavar="NAME", help="Name of the checkpoint, where a format has one."
        ),
        click.option(
            "--format",
            "format_name",
            type=FormatName(writable=True),
            metavar="FORMAT",
            help="Such as native, deepspeed, dcp or torch; by default the source's, if that fits.",
        ),
        click.option(
            "--stage", type=click.IntRange(0, 3), metavar="N", help="ZeRO stage of the target."
        ),
        click.option(
            "--to",
            "world",
            type=click.IntRange(min=1),
            metavar="N",
            help="World size of the target; by default the source's.",
        ),
        click.option(
            "--from",
            "from_world",
            type=click.IntRange(min=1),
            metavar="N",
            help="World size that the source must have: a check.",
        ),
        choosing,
        click.argument("target", metavar="DST", type=click.Path()),
        click.argument("source", metavar="SRC", type=click.Path()),
    ]
    for decorate in decorators:
        verb = decorate(verb)
    return verb


@click.command(
    cls=Verb,
    short_help="Convert a checkpoint to another world size, stage or format.",
    examples=[
        "zreshard convert ckpt-8 ckpt-32 --from 8 --to 32",
        "zreshard convert ckpt-8 native-8 --format native --stage 3",
    ],
)
@_conversion
def convert(dry_run: bool, **given: Any) -> None:
    """Convert the checkpoint SRC to another world size, stage or format, at DST.

    Nothing may be at DST; it appears when it is whole. If the command is killed, give it again:
    it goes on from what is complete.
    """
    _run("convert", dry_run=dry_run, **given)


@click.command(
    cls=Verb,
    short_help="Say what a conversion would do; write nothing.",
    examples=[
        "zreshard plan ckpt-8 ckpt-32 --to 32",
    ],
)
@_conversion
def plan(**given: Any) -> None:
    """Say what `zreshard convert` with these options would do, and write nothing."""
    _run("plan", dry_run=True, **given)


def _run(
    verb: str,
    *,
    source: str,
    target: str,
    source_format: str | None,
    from_world: int | None,
    world: int | None,
    stage: int | None,
    mesh: dict[str, int] | None,
    format_name: str | None,
    tag: str | None,
    expert_parallel: int | None,
    optimizer: bool,
    dtype: str | None,
    keep_fp32: tuple[str, ...],
    drop: tuple[str, ...],
    replicas: Any,
    rename: tuple[Any, ...],
    unwrap: bool,
    dry_run: bool,
    moving: Moving,
    output: Output,
) -> None:
    from reshard.conversion import Wanted

    if keep_fp32 and dtype is None:
        raise click.UsageError("--keep-fp32 says what --dtype leaves alone; give --dtype too")
    wanted = Wanted(
        format=format_name,
        from_world=from_world,
        world=world,
        stage=stage,
        mesh=mesh or {},
        dtype=dtype,
        keep=keep_fp32,
        tag=tag,
        expert_parallel=expert_parallel,
        optimizer=optimizer,
        drop=drop,
        replicas=replicas,
        rename=rename,
        unwrap=unwrap,
    )
    place = jobs.Source(source, source_format)
    jobs.carry_out(place, target, wanted, moving, output, verb, dry_run=dry_run)
