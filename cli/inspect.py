"""``zreshard inspect``: what is in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reshard.cli.examples import Verb
from reshard.cli.jobs import mesh, warn_of_notes
from reshard.cli.options import Glob, choosing, common
from reshard.cli.output import Output, count, shown, size, some, span

if TYPE_CHECKING:
    from reshard.describe import Description, GroupLine, TensorLine
    from reshard.format import Format, Found

FIRST = 20
"""Tensors that are listed without --all."""
CHILDREN = 200
"""Entries of a folder that are looked at for checkpoints."""


@click.command(
    cls=Verb,
    short_help="Say what is in a checkpoint.",
    examples=[
        "zreshard inspect ckpt-8",
        "zreshard inspect ckpt-8 --tensor 'exp_avg:*.bias'",
    ],
)
@click.argument("path", metavar="PATH", type=click.Path())
@choosing
@click.option("--all", "everything", is_flag=True, help=f"List all tensors, not the first {FIRST}.")
@click.option(
    "--tensor",
    "globs",
    type=Glob(),
    multiple=True,
    metavar="GLOB",
    help="List tensors with these names, or `state:name`. Repeatable.",
)
@common
def inspect(
    path: str,
    source_format: str | None,
    everything: bool,
    globs: tuple[str, ...],
    output: Output,
) -> None:
    """Say what is in the checkpoint at PATH, or in the folder PATH; no payload is read.

    JSON has all tensors, or those that --tensor names.
    """
    from reshard.coverage import check
    from reshard.describe import describe

    (found_format, found), *rest = _detect(Path(path), source_format)
    manifest = found_format.open(found.root)
    check(manifest)
    chosen = [(name, state) for name, state in manifest.tensors if _matches(state, name, globs)]
    listed = chosen if output.json or everything or globs else chosen[:FIRST]
    description = describe(manifest, listed)
    others = _beside(Path(path), found, [one for _, one in rest])
    output.document({**description.to_json(), "others": [str(p) for p in others]})
    _head(description, others, output)
    _groups(description.groups, output)
    _tensors(description.tensors, output)
    if len(listed) < len(chosen):
        more = f"  and {len(chosen) - len(listed):,} more (--all lists them)"
        output.line(output.faint(more))
    elif globs and not chosen:
        output.line("  none of that name")
    warn_of_notes((*description.left_out, *description.notes), output)


def _detect(path: Path, name: str | None) -> list[tuple[Format, Found]]:
    """The checkpoints at a path; where a folder has none of its own, those inside are named."""
    from reshard.errors import NotFoundError
    from reshard.formats import detect_all

    try:
        return detect_all(path, name)
    except NotFoundError as error:
        inside = [f"{child} ({name})" for child, name in _inside(path)]
        if not inside:
            raise
        raise NotFoundError(
            "is no checkpoint itself",
            where=path,
            hint=f"inside: {some(inside, 10)}; name the one that you mean",
        ) from error


def _beside(path: Path, found: Found, rest: Sequence[Found]) -> list[Path]:
    """Other checkpoints in the folder that was named, where that isn't the checkpoint itself.

    And those of other formats that are in it.
    """
    if (found.root == path and not rest) or not path.is_dir():
        return list(found.others)
    inside = [child for child, _ in _inside(path) if child != found.root]
    return list(dict.fromkeys((*found.others, *inside)))


def _inside(folder: Path) -> Iterator[tuple[Path, str]]:
    """Checkpoints right inside a folder, and their formats."""
    from reshard.errors import NotFoundError
    from reshard.formats import detect_all

    for child in sorted(folder.iterdir())[:CHILDREN] if folder.is_dir() else ():
        try:
            found = detect_all(child)
        except (NotFoundError, OSError):
            continue
        yield from ((one.root, found_format.name) for found_format, one in found)


def _matches(state: str, name: str, globs: Sequence[str]) -> bool:
    full = f"{state}:{name}"
    return not globs or any(fnmatchcase(name, g) or fnmatchcase(full, g) for g in globs)


def _head(description: Description, others: Sequence[Path], output: Output) -> None:
    side = description.checkpoint
    title = [side.format]
    if side.stage is not None:
        title.append(f"stage {side.stage}")
    if side.world > 1 or side.stage is not None:
        title.append(count(side.world, "rank"))
    if description.step is not None:
        title.append(f"step {description.step:,}")
    output.line(f"{output.strong(shown(side.path))}: {', '.join(title)}")
    if others:
        output.line(f"  beside it: {some([str(p) for p in others])}")
    rows = [
        ("tensors", f"{side.tensors:,} ({size(side.nbytes)})"),
        ("files", f"{side.files:,} ({size(side.file_bytes)})"),
        ("world size", mesh(side)),
        ("a rank", span(*side.rank_bytes)),
    ]
    if description.aliases:
        tied = [f"{alias} = {name}" for alias, name in description.aliases.items()]
        rows.append(("tied", some(tied)))
    if description.frozen:
        names = count(len(description.frozen), "name")
        rows.append(("frozen", f"{names} without optimizer state: {some(description.frozen, 3)}"))
    if description.objects:
        rows.append(("other state", some(description.objects, 10)))
    known = [(description.checksums, "checksum"), (description.digests, "tensor digest")]
    recorded = [count(number, what) for number, what in known if number]
    rows.append(("recorded", ", ".join(recorded) or "no checksums"))
    output.table(rows, indent=2)
    output.line()
    states = [
        (shown(s.state), f"{s.tensors:,}", size(s.nbytes), some(s.dtypes))
        for s in description.states
    ]
    output.table([("state", "tensors", "bytes", "type"), *states], indent=2, right=(1, 2))


def _groups(groups: Sequence[GroupLine], output: Output) -> None:
    if not groups:
        return
    output.line()
    rows = [("group", "tensors", "settings")]
    for index, group in enumerate(groups):
        values = {**group.scalars, **group.settings}
        known = {k: v for k, v in values.items() if output.verbose or _telling(v)}
        text = ", ".join(f"{shown(k)} {_value(v)}" for k, v in known.items())
        rows.append((str(index), f"{group.tensors:,}", text))
    output.table(rows, indent=2, right=(0, 1))


def _telling(value: Any) -> bool:
    """Whether a setting says something: switches that are off and unset values don't."""
    return value is not None and value is not False


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"({', '.join(map(_value, value))})"
    if isinstance(value, dict) and list(value) == ["$array"]:
        return f"array {value['$array']['shape']}"
    if isinstance(value, float):
        return f"{value:g}"
    return shown(value)


def _tensors(tensors: Sequence[TensorLine], output: Output) -> None:
    output.line()
    head = ["tensor", "type", "shape", "bytes"]
    rows = [[*head, "digest"] if output.verbose else head]
    for tensor in tensors:
        row = [
            shown(f"{tensor.state}:{tensor.name}"),
            tensor.dtype,
            str(list(tensor.shape)),
            size(tensor.nbytes),
        ]
        rows.append([*row, tensor.digest or "-"] if output.verbose else row)
    output.table(rows, indent=2, right=(3,))
