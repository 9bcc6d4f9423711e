"""Is everything that the pages say still true? ``make docs`` runs this.

For every Markdown page of the repository:

- links to files and headings lead somewhere;
- blocks marked ``python`` run: as doctests where they have prompts, else as they are; all blocks of
  a page share their names and a scratch folder with two small checkpoints, ``ckpt-4`` and
  ``ckpt-8`` (see :func:`scratch`). Blocks marked ``python formats/NAME.py`` are the source of a
  format that can be used on that page;
- in blocks marked ``console`` every ``$ zreshard`` line has verbs and options that exist; in the
  pages of ``RUN`` it is run and prints what stands there;
- nothing is left to be done.

And ``docs/cli.md`` is what ``docs/generate_cli.py`` makes. Problems are printed as file:line: text.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

GOLDEN = REPO / "tests" / "golden" / "z2_p4_bf16" / "ckpt"
RUN = ("README.md", "docs/index.md")
"""Pages whose commands are run, and whose output is compared."""
SKIPPED = {"build", "dist", "out", "node_modules"}
LOOSE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
LEFT_TO_DO = re.compile(r"\b(TODO|FIXME|XXX|TBD|WIP)\b")
LINK = re.compile(r"(?<!\\)\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
FENCE = re.compile(r"^( {0,3})(`{3,}|~{3,})\s*([^`]*)$")
VARYING = (
    (re.compile(r"\b\d+(\.\d+)?(e-?\d+)? ?(ns|us|µs|ms|s|min)\b"), "TIME"),
    (re.compile(r"\b\d+(\.\d+)? ?[kKMGT]?i?B/s"), "RATE"),
    (re.compile(r"\b\d+(\.\d+)? ?[kKMGT]?i?B(?= (are |is )?free)"), "FREE"),
    (re.compile(r"\bat most [\d.]+ [kMG]?B for buffers"), "BUFFERS"),  # by the number of processors
)
"""What differs from one run of a command to the next."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something on a page that isn't true."""

    page: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(REPO)}:{self.line}: {self.text}"


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page; ``line`` is that of its first line of text, from 1."""

    page: Path
    line: int
    language: str
    info: str
    text: str


@dataclass(frozen=True, slots=True)
class Page:
    """A page, taken apart."""

    path: Path
    prose: tuple[str, ...]
    """Its lines; those of blocks are empty."""
    blocks: tuple[Block, ...]


def pages(root: Path = REPO) -> list[Path]:
    """All Markdown pages of the repository, hidden and built folders aside."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in SKIPPED and not f.startswith("."))
        found += [Path(folder, n) for n in sorted(names) if n.endswith(".md")]
    return found


def parse(path: Path) -> Page:
    """Take a page apart."""
    prose: list[str] = []
    blocks: list[Block] = []
    inside: list[str] = []
    fence, language, info, first = "", "", "", 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        found = FENCE.match(line)
        if not fence and found:
            fence, info = found[2], found[3].strip()
            language, inside, first = info.split(" ")[0], [], number + 1
            prose.append("")
        elif fence and found and found[2].startswith(fence) and not found[3].strip():
            blocks.append(Block(path, first, language, info, "\n".join([*inside, ""])))
            fence = ""
            prose.append("")
        elif fence:
            inside.append(line)
            prose.append("")
        else:
            prose.append(line)
    if fence:
        blocks.append(Block(path, first, "unclosed", info, ""))
    return Page(path, tuple(prose), tuple(blocks))


# -- links and words ------------------------------------------------------------------------------


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    """The anchors of a page."""
    found: set[str] = set()
    for line in parse(path).prose:
        if match := re.match(r"#{1,6}\s+(.*?)\s*#*$", line):
            name, number = slug(match[1]), 0
            while (unique := f"{name}-{number}" if number else name) in found:
                number += 1
            found.add(unique)
        found.update(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", line))
    return found


def check_links(page: Page) -> Iterator[Problem]:
    """Links that lead nowhere."""
    for number, line in enumerate(page.prose, start=1):
        for target in LINK.findall(re.sub(r"`[^`]*`", "", line)):
            if re.match(r"[a-z][a-z+.-]*:", target):
                continue
            name, _, anchor = target.partition("#")
            goal = (page.path.parent / name).resolve() if name else page.path
            if name.startswith("/") or not goal.is_relative_to(REPO):
                yield Problem(page.path, number, f"{target} leads out of the repository")
            elif not goal.exists():
                yield Problem(page.path, number, f"there is no {target}")
            elif anchor and goal.suffix == ".md" and anchor not in anchors(goal):
                yield Problem(page.path, number, f"{name or page.path.name} has no #{anchor}")


def check_words(page: Page) -> Iterator[Problem]:
    """Blocks that don't end, and what was left to be done."""
    for number, line in enumerate(page.path.read_text(encoding="utf-8").splitlines(), start=1):
        if found := LEFT_TO_DO.search(line):
            yield Problem(page.path, number, f"{found[0]} is left")
    for block in page.blocks:
        if block.language == "unclosed":
            yield Problem(page.path, block.line - 1, "the block doesn't end")


# -- Python ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def scratch(page: Page) -> Iterator[Path]:
    """A folder to work in, with a DeepSpeed checkpoint of 4 ranks at stage 2 and one of 8 at 3."""
    from reshard.api import convert
    from reshard.conversion import Wanted
    from reshard.execute import Options

    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="zreshard-docs-") as name:
        folder = Path(name)
        (folder / "ckpt-4").symlink_to(GOLDEN)
        if any("ckpt-8" in block.text for block in page.blocks):
            wanted = Wanted(world=8, stage=3, format="deepspeed")
            convert(GOLDEN, folder / "ckpt-8", wanted, Options(sync=False))
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(before)


@contextlib.contextmanager
def formats_of(page: Page) -> Iterator[None]:
    """Put formats whose source stands on a page where formats are found."""
    from reshard import formats as package

    sources: dict[str, list[str]] = {}
    for block in page.blocks:
        if found := re.fullmatch(r"python formats/(\w+)\.py", block.info):
            sources.setdefault(found[1], []).append(block.text)
    before = package.__path__
    with tempfile.TemporaryDirectory(prefix="zreshard-docs-") as folder:
        for name, parts in sources.items():
            Path(folder, f"{name}.py").write_text("\n\n".join(parts), encoding="utf-8")
        package.__path__ = [*before, folder]
        package.formats.cache_clear()
        try:
            yield
        finally:
            package.__path__ = before
            package.formats.cache_clear()
            for name in sources:
                sys.modules.pop(f"reshard.formats.{name}", None)
                if hasattr(package, name):
                    delattr(package, name)


def check_python(page: Page) -> Iterator[Problem]:
    """Examples that fail or print something else."""
    blocks = [b for b in page.blocks if b.info == "python"]
    if not blocks:
        return
    names: dict[str, Any] = {"__name__": "__main__"}
    with scratch(page), formats_of(page):
        for block in blocks:
            if ">>>" in block.text:
                yield from _doctest(block, names)
            else:
                yield from _snippet(block, names)


class _Runner(doctest.DocTestRunner):
    """Collects failures instead of printing them."""

    def __init__(self) -> None:
        super().__init__(optionflags=LOOSE, verbose=False)
        self.failed: list[tuple[doctest.Example, str]] = []

    def report_failure(
        self, out: Any, test: doctest.DocTest, example: doctest.Example, got: str
    ) -> None:
        self.failed.append((example, f"printed\n{got}instead of\n{example.want}"))

    def report_unexpected_exception(
        self, out: Any, test: doctest.DocTest, example: doctest.Example, exc_info: Any
    ) -> None:
        kind, error, _ = exc_info
        self.failed.append((example, f"{kind.__name__}: {error}"))


def _doctest(block: Block, names: dict[str, Any]) -> Iterator[Problem]:
    title = str(block.page.relative_to(REPO))
    test = doctest.DocTestParser().get_doctest(block.text, names, title, title, block.line - 1)
    runner = _Runner()
    runner.run(test, out=lambda _: None, clear_globs=False)
    names.update(test.globs)
    for example, text in runner.failed:
        yield Problem(block.page, block.line + example.lineno, text.rstrip())


def _snippet(block: Block, names: dict[str, Any]) -> Iterator[Problem]:
    title = str(block.page.relative_to(REPO))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            code = compile("\n" * (block.line - 1) + block.text, title, "exec")
            exec(code, names)  # noqa: S102 - our own pages
    except Exception as error:  # noqa: BLE001 - whatever an example raises is reported
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == title]
        line = (frames[-1].lineno if frames else getattr(error, "lineno", None)) or block.line
        yield Problem(block.page, line, f"{type(error).__name__}: {error}")


# -- commands -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Command:
    """A command on a page and the output that is shown for it."""

    line: int
    words: tuple[str, ...]
    output: str


def commands(block: Block) -> Iterator[Command]:
    """The ``$ zreshard`` lines of a block, continued lines joined."""
    lines = block.text.splitlines()
    at = 0
    while at < len(lines):
        first, text = at, lines[at]
        at += 1
        if not text.startswith("$ "):
            continue
        while text.endswith("\\") and at < len(lines):
            text = text[:-1] + lines[at].lstrip("> ")
            at += 1
        output = []
        while at < len(lines) and not lines[at].startswith("$ "):
            output.append(lines[at])
            at += 1
        words = shlex.split(text[2:], comments=True)
        if words and words[0] == "zreshard":
            yield Command(block.line + first, tuple(words[1:]), "\n".join(output).strip())


def check_commands(page: Page) -> Iterator[Problem]:
    """Commands that can't be given, or that print something else."""
    found = [c for b in page.blocks if b.language == "console" for c in commands(b)]
    if not found:
        return
    for command in found:
        if problem := misuse(command.words):
            yield Problem(page.path, command.line, problem)
    if page.path.relative_to(REPO).as_posix() not in RUN:
        return
    with scratch(page):
        for command in found:
            printed = run(command.words)
            if not same(command.output, printed):
                text = f"printed\n{printed}\ninstead of\n{command.output}"
                yield Problem(page.path, command.line, text)


def misuse(words: Iterable[str]) -> str | None:
    """What is wrong with the words of a command, by the parser alone: nothing is run."""
    import click

    from reshard.cli.main import main as program

    command: click.Command = program
    rest = list(words)
    for stop in ("|", ">", "2>", "&&", ";"):
        rest = rest[: rest.index(stop)] if stop in rest else rest
    context = click.Context(command, info_name="zreshard")
    try:
        while isinstance(command, click.Group):
            if rest and rest[0].startswith("-"):
                command.make_parser(context).parse_args(rest[:])
                return None
            _, inner, rest = command.resolve_command(context, rest)
            assert inner is not None
            command = inner
            context = click.Context(command, info_name=command.name, parent=context)
        values, _, _ = command.make_parser(context).parse_args(rest)
        for parameter in command.get_params(context):
            given = values.get(parameter.name or "")
            if isinstance(parameter.type, click.Path) or not isinstance(given, (str, list)):
                continue
            parameter.type_cast_value(context, given)
    except click.exceptions.Exit:
        return None
    except click.ClickException as error:
        return error.format_message()
    return None


def run(words: Iterable[str]) -> str:
    """What a command prints, its errors too."""
    path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "reshard.cli", *words],
        env={**os.environ, "PYTHONPATH": path, "NO_COLOR": "1", "COLUMNS": "100"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def same(expected: str, printed: str) -> bool:
    """Whether an output is the one that is shown; ``...`` stands for anything."""
    for pattern, word in VARYING:
        expected, printed = pattern.sub(word, expected), pattern.sub(word, printed)
    return doctest.OutputChecker().check_output(expected + "\n", printed + "\n", LOOSE)


def check_generated() -> Iterator[Problem]:
    """The reference of the command line, if it isn't what its generator makes."""
    generator = REPO / "docs" / "generate_cli.py"
    if not generator.exists():
        return
    done = subprocess.run(
        [sys.executable, str(generator), "--check"],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        text = (done.stdout + done.stderr).strip() or "isn't what docs/generate_cli.py makes"
        yield Problem(REPO / "docs" / "cli.md", 1, text)


CHECKS = (check_links, check_words, check_python, check_commands)


def check(path: Path) -> list[Problem]:
    """All problems of a page."""
    page = parse(path)
    return [problem for one in CHECKS for problem in one(page)]


def main(names: list[str]) -> int:
    """Check all pages, or those that are named; returns the exit code."""
    chosen = [Path(n).resolve() for n in names] or pages()
    problems = [p for path in chosen for p in check(path)]
    if not names:
        problems += check_generated()
    for problem in problems:
        print(problem)
    print(
        f"{len(chosen)} pages, {len(problems)} problems"
        if problems
        else f"{len(chosen)} pages, all true"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
