"""Is the command line still the one that scripts were written for, light to start, and documented?

Verbs, options and defaults stand as text in ``cli_surface.txt``. A change shows up as a difference
of that file, to be made on purpose: ``python tests/test_cli_surface.py`` writes it anew.
"""

from __future__ import annotations

import doctest
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

REPO = Path(__file__).resolve().parent.parent
FROZEN = Path(__file__).resolve().with_name("cli_surface.txt")
PAGE = REPO / "docs" / "errors.md"
HEAVY = ("numpy", "tensorstore", "zarr", "torch", "awscrt", "isal", "reshard.api")
VERBS = ("convert", "plan", "consolidate", "inspect", "verify", "diff")

LOADED = """
import json, sys
from reshard.cli.main import main
try:
    main.main(json.loads(sys.argv[1]))
except SystemExit as end:
    code = end.code
print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)
"""


def surface() -> str:
    """The commands, arguments and options as text."""
    from reshard.cli.main import main as program

    context = click.Context(program, info_name="zreshard")
    lines = ["# The command line: verbs, arguments, options and defaults."]
    for name in program.list_commands(context):
        command = program.get_command(context, name)
        assert command is not None
        lines += ["", f"zreshard {name}"]
        lines += [f"    {_parameter(p)}" for p in command.params]
    return "\n".join([*lines, ""])


def _parameter(parameter: click.Parameter) -> str:
    kind = parameter.type
    text = " ".join([*parameter.opts, *parameter.secondary_opts])
    if isinstance(parameter, click.Argument):
        return f"{parameter.human_readable_name} {kind.name}"
    assert isinstance(parameter, click.Option)
    if parameter.is_flag:
        return f"{text} flag"
    if isinstance(kind, click.Choice):
        text += f" {'|'.join(kind.choices)}"
    elif isinstance(kind, (click.IntRange, click.FloatRange)):
        text += f" {kind.name} {kind.min}..{'' if kind.max is None else kind.max}"
    else:
        text += f" {kind.name}"
    if parameter.multiple:
        text += " repeatable"
    default = parameter.get_default(click.Context(click.Command("x")))
    return f"{text} = {default!r}" if isinstance(default, (str, int, float)) else text


def test_the_surface_is_as_it_was() -> None:
    assert surface() == FROZEN.read_text(encoding="utf-8"), (
        "the command line has changed; if that is meant, run: python tests/test_cli_surface.py, "
        "and say so in CHANGELOG.md"
    )


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], *([verb, "--help"] for verb in VERBS), ["nonsense"], []]
)
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED, json.dumps(words)],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    code, modules = json.loads(done.stderr.splitlines()[-1])
    assert code == (2 if words in (["nonsense"], []) else 0), done.stderr
    assert [m for m in modules if m in HEAVY] == []


def test_every_verb_has_an_example() -> None:
    from reshard.cli.main import main as program

    context = click.Context(program, info_name="zreshard")
    assert tuple(program.list_commands(context)) == VERBS
    for name in VERBS:
        command = program.get_command(context, name)
        assert command is not None
        text = command.get_help(click.Context(command, info_name=name))
        assert f"\n    zreshard {name} " in text, name
        assert all(p.help for p in command.params if isinstance(p, click.Option))


def test_the_reference_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, REPO / "docs" / "generate_cli.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# -- docs/errors.md -------------------------------------------------------------------------------


def rows() -> dict[tuple[int, str], str]:
    """(exit code, kind) to meaning, out of the page's table."""
    found = re.findall(
        r"^\| (\d+) \| (?:\[?`([a-z-]+)`\]?(?:\(#[a-z-]+\))?)? ?\| (.+) \|$",
        PAGE.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    return {(int(code), kind): meaning for code, kind, meaning in found}


def classes() -> Iterator[tuple[int, str]]:
    from reshard import errors

    for value in vars(errors).values():
        base = errors.ReshardError
        if isinstance(value, type) and issubclass(value, base) and value is not base:
            yield value.exit_code, value.kind


def test_every_error_is_on_the_page_and_no_other() -> None:
    from reshard.cli import failure

    ours = {
        (0, ""),
        (1, ""),
        (failure.USAGE, "usage"),
        (failure.BUG, "bug"),
        (failure.BUG, "memory"),
        (failure.INTERRUPTED, "interrupted"),
        (failure.TERMINATED, "terminated"),
        (failure.PIPE, ""),
    }
    assert set(rows()) == ours | set(classes())
    headings = re.findall(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == [kind for _, kind in dict.fromkeys(classes())]


def examples() -> list[tuple[str, str, str]]:
    """(kind, command, output) of every example on the page."""
    found = []
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        kind = section.partition("\n")[0]
        for block in re.findall(r"```console\n(.*?)```", section, re.DOTALL):
            for part in block.split("$ zreshard ")[1:]:
                command, _, output = part.partition("\n")
                found.append((kind, command, output))
    return found


@pytest.fixture(scope="module")
def damaged(
    golden_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
    run_cli: Callable[..., object],
) -> Path:
    """The checkpoints that the page speaks of."""
    folder = tmp_path_factory.mktemp("errors")
    shutil.copytree(golden_dir / "z2_p4_bf16" / "ckpt", folder / "ckpt-4")
    words = "convert ckpt-4 ckpt-32 --to 32 --stage 3 --format native --no-sync"
    done = run_cli(*words.split(), cwd=folder)
    assert getattr(done, "code", None) == 0, done
    for name in ("flipped", "newer"):
        shutil.copytree(folder / "ckpt-32", folder / name)
    for name in ("lacking", "mixed"):
        shutil.copytree(folder / "ckpt-4", folder / name)
    chunk = folder / "flipped" / "group0.master" / "c" / "3"
    data = bytearray(chunk.read_bytes())
    data[5] ^= 1
    chunk.write_bytes(data)
    manifest = folder / "newer" / "zreshard.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "zreshard": 99}))
    sorted((folder / "lacking").glob("*/*optim_states.pt"))[2].unlink()
    first, second = sorted((folder / "mixed").glob("*/*optim_states.pt"))[:2]
    shutil.copy(first, second)
    (folder / "unsafe").mkdir()
    index = {"metadata": {}, "weight_map": {"w": "../../etc/passwd"}}
    (folder / "unsafe" / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(("kind", "command", "output"), examples())
def test_the_page_shows_what_is_printed(
    damaged: Path, kind: str, command: str, output: str
) -> None:
    before = sorted(p.name for p in damaged.iterdir())
    done = subprocess.run(
        [sys.executable, "-m", "reshard.cli", *command.split()],
        cwd=damaged,
        env={**os.environ, "PYTHONPATH": str(REPO), "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert doctest.OutputChecker().check_output(output, done.stdout, doctest.ELLIPSIS), done.stdout
    assert done.returncode == next(code for code, name in classes() if name == kind)
    assert sorted(p.name for p in damaged.iterdir()) == before


def test_every_kind_has_an_example() -> None:
    assert {kind for kind, _, _ in examples()} == {kind for _, kind in classes()}


if __name__ == "__main__":
    sys.path.insert(0, str(REPO))
    FROZEN.write_text(surface(), encoding="utf-8")
