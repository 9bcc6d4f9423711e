"""``zreshard consolidate``: whole tensors in safetensors files."""

from __future__ import annotations

from typing import Any

import click

from reshard.cli import jobs
from reshard.cli.examples import Verb
from reshard.cli.options import Moving, Size, casting, choosing, common, writing
from reshard.cli.output import Output


@click.command(
    cls=Verb,
    short_help="Write the whole weights as safetensors.",
    examples=[
        "zreshard consolidate ckpt-8 model.safetensors",
        "zreshard consolidate ckpt-8 model --max-shard-size 2GB --dtype bf16 --keep-fp32 '*norm*'",
    ],
)
@click.argument("source", metavar="SRC", type=click.Path())
@click.argument("target", metavar="DST", type=click.Path())
@choosing
@click.option(
    "--max-shard-size",
    type=Size(),
    metavar="SIZE",
    help="Most bytes of tensors a file; by default 5GB.",
)
@click.option(
    "--state",
    metavar="STATE",
    help="What to write as the weights: master, param; by default the best that is there.",
)
@click.option("--optimizer", is_flag=True, help="Write the optimizer's state too.")
@casting
@click.option("--dry-run", is_flag=True, help="Check and plan only.")
@writing
@common
def consolidate(
    source: str,
    target: str,
    source_format: str | None,
    max_shard_size: int | None,
    state: str | None,
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
    """Write the whole weights of the checkpoint SRC as safetensors, at DST.

    A DST that ends in .safetensors is one file, any other a folder with an index. The weights are
    the fp32 masters where there are any. If the command is killed, give it again: it goes on from
    what is complete.
    """
    from reshard.conversion import Wanted

    if keep_fp32 and dtype is None:
        raise click.UsageError("--keep-fp32 says what --dtype leaves alone; give --dtype too")
    wanted = Wanted(
        format="safetensors",
        dtype=dtype,
        keep=keep_fp32,
        state=state,
        optimizer=optimizer,
        max_shard_bytes=max_shard_size,
        drop=drop,
        replicas=replicas,
        rename=rename,
        unwrap=unwrap,
    )
    place = jobs.Source(source, source_format)
    jobs.carry_out(place, target, wanted, moving, output, "consolidate", dry_run=dry_run)
