"""Which options do several verbs share, and what may stand behind them?

A verb is decorated with :func:`common` and, where it moves bytes, with :func:`moving` or
:func:`writing`; it is called with an :class:`~reshard.cli.output.Output` and a :class:`Moving`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from reshard.cli.output import Output
from reshard.cli.progress import Progress

if TYPE_CHECKING:
    from reshard.execute import Notice, Options

    IntType = click.ParamType[int]
    TextType = click.ParamType[str]
else:
    IntType = TextType = click.ParamType  # generic for type checkers, and from click 8.3 on

Callback = Callable[..., Any]

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS[f"{_letter}B"] = _UNITS[_letter] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power


class Size(IntType):
    """A number of bytes: ``5GB`` is 5 * 10^9, ``5GiB`` is 5 * 2^30."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read it."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(value).strip())
        unit = _UNITS.get(found[2].upper()) if found else None
        if found is None or unit is None or float(found[1]) * unit < 1:
            self.fail(f"{value!r} is no size; sizes look like 5GB, 512MiB or 1000000", param, ctx)
        whole = float(found[1]) * unit if "." in found[1] else int(found[1]) * unit
        return int(whole)


class Renaming(TextType):
    """``OLD=NEW``: a regular expression and what comes in its place."""

    name = "rule"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read it; the last ``=`` parts the two."""
        from reshard.rename import Rule

        if isinstance(value, Rule):
            return value
        pattern, between, replacement = str(value).rpartition("=")
        if not between or not pattern:
            self.fail(f"{value!r} is no rule; rules look like ^model\\.=decoder.", param, ctx)
        return Rule(pattern, replacement)


class Mesh(TextType):
    """Sizes of axes: ``shard=8,tensor=4``."""

    name = "mesh"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read them; the axes are checked by the library."""
        if isinstance(value, dict):
            return value
        found: dict[str, int] = {}
        for part in str(value).split(","):
            axis, _, size = part.strip().partition("=")
            if not axis or not size.isdecimal() or axis in found:
                self.fail(f"{value!r} is no mesh; meshes look like shard=8,tensor=4", param, ctx)
            found[axis] = int(size)
        return found


class Glob(TextType):
    """A shell-style pattern of names: ``*``, ``?``, ``[a-z]``."""

    name = "glob"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check that it is one."""
        text = str(value)
        if not text:
            self.fail("an empty pattern matches nothing; '*' matches everything", param, ctx)
        rest = re.sub(r"\[!?+\]?+[^\]]*\]", "", text)  # as fnmatch reads it
        if "[" in rest:
            self.fail(f"{text!r} has a '[' without a ']'; '[[]' matches a '['", param, ctx)
        return text


class ElementType(TextType):
    """An element type: ``bf16``, ``float32``."""

    name = "type"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check that there is such a type."""
        from reshard.dtypes import dtype
        from reshard.errors import UnsupportedError

        try:
            return dtype(str(value)).name
        except UnsupportedError as error:
            self.fail(f"{error.what}; types are bf16, fp16, fp32 and so on", param, ctx)


class FormatName(TextType):
    """The name of a format.

    Parameters
    ----------
    writable
        Whether it must be one that can be written.
    """

    name = "format"

    def __init__(self, *, writable: bool) -> None:
        self._writable = writable

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check that there is such a format."""
        known = self._known()
        if value not in known:
            what = "can't be written" if self._writable else "is no format"
            self.fail(f"{value!r} {what}; formats: {', '.join(known)}", param, ctx)
        return str(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Names that begin so."""
        return [CompletionItem(n) for n in self._known() if n.startswith(incomplete)]

    def _known(self) -> list[str]:
        from reshard.formats import formats

        return [n for n, found in formats().items() if found.writes or not self._writable]


@dataclass(frozen=True, slots=True)
class Moving:
    """How bytes are read and written.

    Parameters
    ----------
    max_memory, workers
        As given; ``None`` for the library's own.
    sync
        Whether files are brought to disk.
    resume
        Whether what an earlier run has done counts.
    progress
        Told of bytes.
    """

    max_memory: int | None
    workers: int | None
    sync: bool
    resume: bool
    progress: Progress

    def options(self, notice: Notice | None = None) -> Options:
        """What the library takes."""
        from reshard.execute import Options

        given: dict[str, Any] = {}
        if self.max_memory is not None:
            given["max_memory"] = self.max_memory
        if self.workers is not None:
            given["workers"] = self.workers
        return Options(
            sync=self.sync,
            resume=self.resume,
            progress=self.progress.add,
            notice=notice,
            **given,
        )


def common(verb: Callback) -> Callback:
    """Options of every verb: how it prints."""

    @functools.wraps(verb)
    def run(*args: Any, json: bool, quiet: bool, verbose: bool, color: str, **rest: Any) -> Any:
        output = Output(json=json, quiet=quiet, verbose=verbose, color=color)
        return verb(*args, output=output, **rest)

    for option in (
        click.option(
            "--color",
            type=click.Choice(["auto", "always", "never"]),
            default="auto",
            show_default=True,
            help="Colours; auto: on a terminal, unless NO_COLOR is set.",
        ),
        click.option("-v", "--verbose", is_flag=True, help="Print more."),
        click.option("-q", "--quiet", is_flag=True, help="Print only errors and warnings."),
        click.option("--json", is_flag=True, help="Print one JSON document, errors too."),
    ):
        run = option(run)
    return run


def moving(verb: Callback) -> Callback:
    """Options of verbs that read payload."""

    @functools.wraps(verb)
    def run(
        *args: Any,
        max_memory: int | None,
        workers: int | None,
        progress: bool | None,
        quiet: bool,
        no_sync: bool = False,
        fresh: bool = False,
        **rest: Any,
    ) -> Any:
        wanted = False if quiet and progress is None else progress
        how = Moving(max_memory, workers, not no_sync, not fresh, Progress(wanted))
        return verb(*args, moving=how, quiet=quiet, **rest)

    for option in (
        click.option(
            "--progress/--no-progress",
            default=None,
            help="Tell of progress on stderr; by default on a terminal.",
        ),
        click.option(
            "--workers",
            type=click.IntRange(min=1),
            metavar="N",
            help="Threads; by default one a processor, at most 16.",
        ),
        click.option(
            "--max-memory",
            type=Size(),
            metavar="SIZE",
            help="Memory for buffers, such as 256MB; by default 64MiB.",
        ),
    ):
        run = option(run)
    return run


def writing(verb: Callback) -> Callback:
    """Options of verbs that write a target."""
    verb = moving(verb)
    for option in (
        click.option(
            "--no-sync",
            is_flag=True,
            help="Don't wait for the disk; a power cut may lose the target.",
        ),
        click.option(
            "--fresh",
            is_flag=True,
            help="Begin anew, even if an earlier run was killed; what it had done is removed.",
        ),
    ):
        verb = option(verb)
    return verb


def choosing(verb: Callback) -> Callback:
    """The option that says which checkpoint of a folder is meant."""
    return click.option(
        "--source-format",
        type=FormatName(writable=False),
        metavar="FORMAT",
        help="Which checkpoint is meant, where a folder holds some of several formats.",
    )(verb)


def casting(verb: Callback) -> Callback:
    """Options that say what is written, in which element types, and what may be left out."""
    for option in (
        click.option(
            "--rename",
            type=Renaming(),
            multiple=True,
            metavar="OLD=NEW",
            help=r"Replace OLD, a regular expression, in names of tensors by NEW. Repeatable.",
        ),
        click.option(
            "--strip-wrappers",
            "unwrap",
            is_flag=True,
            help="Take module., _orig_mod. and other wrappers' parts out of names.",
        ),
        click.option(
            "--replicas",
            type=click.Choice(["equal", "first"]),
            default="equal",
            show_default=True,
            help="Copies of one tensor: prove them equal, or take the first.",
        ),
        click.option(
            "--drop",
            type=Glob(),
            multiple=True,
            metavar="GLOB",
            help="Go on without state that the target can't hold; errors name it. Repeatable.",
        ),
        click.option(
            "--keep-fp32",
            type=Glob(),
            multiple=True,
            metavar="GLOB",
            help="Names that --dtype leaves as they are. Repeatable.",
        ),
        click.option(
            "--dtype",
            type=ElementType(),
            metavar="TYPE",
            help="Cast the weights, such as bf16; optimizer state keeps its type.",
        ),
    ):
        verb = option(verb)
    return verb
