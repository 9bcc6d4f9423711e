"""``zreshard diff``: in what do two checkpoints differ, and by how much?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from reshard.cli.examples import Verb
from reshard.cli.options import Moving, common, moving
from reshard.cli.output import Output, count, shown

if TYPE_CHECKING:
    from reshard.difference import Changed, Difference

DIFFERENT = 1
"""Exit code when something differs."""
FIRST = 20
"""Lines of each kind that are shown without --verbose."""


@click.command(
    cls=Verb,
    short_help="Say in what two checkpoints differ.",
    examples=[
        "zreshard diff ckpt-8 ckpt-32",
        "zreshard diff ckpt-step100 ckpt-step200 --rtol 1e-5",
    ],
)
@click.argument("a", metavar="A", type=click.Path())
@click.argument("b", metavar="B", type=click.Path())
@click.option(
    "--rtol",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    metavar="X",
    help="Relative tolerance: close is |a - b| <= atol + rtol * |b|.",
)
@click.option(
    "--atol",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    metavar="X",
    help="Absolute tolerance.",
)
@click.option("--weights", is_flag=True, help="Compare the weights only.")
@click.option(
    "--recorded",
    is_flag=True,
    help="Believe digests that both recorded, instead of reading what they are of.",
)
@moving
@common
@click.pass_context
def diff(
    ctx: click.Context,
    a: str,
    b: str,
    rtol: float,
    atol: float,
    weights: bool,
    recorded: bool,
    moving: Moving,
    output: Output,
) -> None:
    """Compare the checkpoints A and B, whatever their formats, world sizes and stages.

    Tensors by the digests of their bytes, and those that differ element by element; parameter
    groups, tied names and other state by their values. Exit code 1: they differ.
    """
    from reshard.api import open_manifest
    from reshard.difference import diff as compare
    from reshard.difference import diff_nbytes

    first, second = open_manifest(a), open_manifest(b)
    with moving.progress.running("diff", diff_nbytes(first, second, recorded)):
        found = compare(
            first,
            second,
            moving.options(),
            rtol=rtol,
            atol=atol,
            weights=weights,
            recorded=recorded,
        )
    output.document({"a": str(first.root), "b": str(second.root), **found.to_json()})
    _show(found, weights, output)
    if not found.same:
        ctx.exit(DIFFERENT)


def _show(found: Difference, weights: bool, output: Output) -> None:
    if found.same:
        close = f", {count(len(found.close), 'tensor')} within the tolerances" * bool(found.close)
        output.line(f"{output.good('no difference')}: {count(found.equal, 'tensor')} equal{close}")
        if output.verbose:
            _lines("close", [_changed(c) for c in found.close], output)
        return
    parts = [count(found.equal, "tensor") + " equal"]
    if found.close:
        parts.append(f"{len(found.close):,} within the tolerances")
    parts.append(f"{len(found.changed):,} differ")
    for number, side in ((len(found.only_a), "A"), (len(found.only_b), "B")):
        if number:
            parts.append(f"{number:,} only in {side}")
    if found.values:
        parts.append(f"{count(len(found.values), 'other value')} differ")
    output.line(f"{output.bad('different')}: {', '.join(parts)}")
    _lines("only in A", [[shown(name)] for name in found.only_a], output)
    _lines("only in B", [[shown(name)] for name in found.only_b], output)
    _lines("differ", [_changed(c) for c in found.changed], output)
    values = [[shown(v.place), _value(v.a), "->", _value(v.b)] for v in found.values]
    _lines("other state, A -> B", values, output)
    if not weights and (found.only_a or found.only_b):
        output.line("\n(--weights compares the weights only, whatever else is beside them)")


def _lines(title: str, rows: list[list[str]], output: Output) -> None:
    if not rows:
        return
    most = len(rows) if output.verbose else FIRST
    output.line()
    output.line(f"{title}:")
    output.table(rows[:most], indent=2)
    if len(rows) > most:
        output.line(output.faint(f"  and {len(rows) - most:,} more (--verbose lists them)"))


def _changed(changed: Changed) -> list[str]:
    kind = changed.a if changed.a == changed.b else f"{changed.a} -> {changed.b}"
    gap = changed.gap
    if gap is None:
        return [shown(changed.tensor), kind]
    return [
        shown(changed.tensor),
        kind,
        f"{gap.differ:,} of {count(gap.numel, 'element')}",
        f"max abs {_number(gap.max_abs)} at {_index(gap.max_abs_at)} "
        f"({_number(gap.a)} -> {_number(gap.b)})",
        f"max rel {_number(gap.max_rel)} at {_index(gap.max_rel_at)}",
    ]


def _number(value: Any) -> str:
    return f"{value:.6g}"


def _index(index: tuple[int, ...] | None) -> str:
    return str(list(index or ()))


def _value(value: Any) -> str:
    text = json.dumps(value)
    return shown(text if len(text) <= 60 else text[:57] + "...")
