"""Write ``docs/cli.md`` from the commands themselves.

``python docs/generate_cli.py`` writes it, with ``--check`` it only says whether it is up to date.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

PAGE = REPO / "docs" / "cli.md"
SHARED = 4
"""An option that so many verbs have is described once, for all of them."""

HEAD = """\
# The command line

<!-- docs/generate_cli.py makes this page out of the commands. -->

`zreshard VERB ...`; `zreshard VERB --help` says what is below, in short. Any verb takes a
checkpoint of any [format](formats.md); which one it is is found out. A path may also be the folder
that a checkpoint lies in, as training frameworks name it.
"""

NOTES = """\
Results go to stdout, warnings, errors and progress to stderr. `SIZE` is a number of bytes:
`5GB` is 5·10⁹, `5GiB` is 5·2³⁰, `5000000` is itself. `GLOB` is a pattern of names as in a shell
(`*`, `?`, `[a-z]`); quote it. Colours follow `--color`; `auto` means on a terminal, unless the
environment has `NO_COLOR`.

With `--json`, stdout has exactly one JSON document. An error is the document
`{"error": {"kind", "what", "where", "hint", "exit_code"}}`. Numbers that JSON doesn't have are
texts: `"nan"`, `"inf"`, `"-inf"`.

Progress is one line on a terminal. Elsewhere there is none, or with `--progress` a plain line every
5 seconds: bytes, share, speed, and the time that is left.

`Ctrl-C` and SIGTERM end a command within moments, and nothing is at `DST`. What was complete stays
in a hidden folder beside it, and the same command
[goes on from there](concepts.md#going-on-after-a-kill). Exit codes are listed in
[errors.md](errors.md); only 0 means that all is well.
"""


def page() -> str:
    """The whole page."""
    from reshard.cli.main import main as program

    context = click.Context(program, info_name="zreshard")
    verbs: dict[str, click.Command] = {}
    for name in program.list_commands(context):
        command = program.get_command(context, name)
        assert command is not None
        verbs[name] = command
    parts = [HEAD, _list(verbs)]
    for name, command in verbs.items():
        parts.append("\n".join(_verb(name, command, verbs)))
    parts.append("\n".join(["## Options of several verbs", "", *_table(_shared(verbs).values())]))
    parts.append("## For all verbs\n\n" + NOTES)
    return "\n".join(f"{part.rstrip()}\n" for part in parts)


def _list(verbs: dict[str, click.Command]) -> str:
    rows = [f"| [{n}](#{n}) | {c.get_short_help_str(200)} |" for n, c in verbs.items()]
    return "\n".join(["| Verb | What it does |", "| --- | --- |", *rows])


def _verb(name: str, command: click.Command, verbs: dict[str, click.Command]) -> Iterator[str]:
    context = click.Context(command, info_name=name)
    usage = " ".join([f"zreshard {name}", *command.collect_usage_pieces(context)])
    yield f"## {name}"
    yield ""
    yield f"`{usage}`"
    yield ""
    yield inspect.cleandoc(command.help or "")
    yield ""
    yield "```console"
    yield from (f"$ {example}" for example in getattr(command, "examples", ()))
    yield "```"
    shared = _shared(verbs)
    own = {n: o for n, o in _options(command).items() if n not in shared}
    before = list(verbs)[: list(verbs).index(name)]
    like = next((b for b in before if set(own) <= set(_options(verbs[b]))), None)
    yield ""
    if like is not None:
        yield f"It takes the options of [{like}](#{like})."
        return
    yield from _table(own.values())
    yield ""
    several = ", ".join(f"`{n}`" for n in _options(command) if n in shared)
    yield f"Also {several}: see [below](#options-of-several-verbs)."


def _options(command: click.Command) -> dict[str, click.Option]:
    return {
        p.opts[-1] if p.opts[-1].startswith("--") else p.opts[0]: p
        for p in command.params
        if isinstance(p, click.Option)
    }


def _shared(verbs: dict[str, click.Command]) -> dict[str, click.Option]:
    everywhere = [_options(command) for command in verbs.values()]
    return {
        name: option
        for options in everywhere
        for name, option in options.items()
        if sum(name in o for o in everywhere) >= SHARED
    }


def _table(options: Iterable[click.Option]) -> Iterator[str]:
    yield "| Option | Meaning |"
    yield "| --- | --- |"
    for option in options:
        names = [*option.opts, *option.secondary_opts]
        value = "" if option.is_flag else f" {_value(option)}"
        label = ", ".join(f"`{name}{value}`" for name in names)
        default = ""
        if option.show_default and option.default is not None:
            default = f" Default: `{option.default}`."
        yield f"| {label} | {option.help}{default} |".replace("|a - b|", "\\|a - b\\|").replace(
            "|b|", "\\|b\\|"
        )


def _value(option: click.Option) -> str:
    if isinstance(option.type, click.Choice):
        return "\\|".join(str(choice) for choice in option.type.choices)
    return option.metavar or option.type.name.upper()


def main(words: list[str]) -> int:
    """Write the page, or say whether it is up to date."""
    text = page()
    if words == ["--check"]:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
            return 0
        print("docs/cli.md isn't up to date; run: python docs/generate_cli.py")
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
