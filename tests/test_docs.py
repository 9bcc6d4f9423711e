"""Do the pages say what is true: their checks find mistakes, and the tutorial's format works?"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from reshard import formats as package
from reshard.api import open_manifest
from reshard.format import Format
from tests.format_contract import Case, obligations

REPO = Path(__file__).resolve().parent.parent
FORMATS = REPO / "docs" / "formats.md"
TUTORIAL = REPO / "docs" / "add-a-format.md"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_check", REPO / "docs" / "check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["docs_check"] = module
    spec.loader.exec_module(module)
    return module


checker = _load()

# -- the tutorial ---------------------------------------------------------------------------------


@pytest.fixture
def toy() -> Iterator[Format]:
    """The format of docs/add-a-format.md, put where formats are found."""
    with checker.formats_of(checker.parse(TUTORIAL)):
        yield package.formats()["toy"]


@pytest.mark.parametrize("rule", obligations(writes=True))
def test_the_toy_keeps_the_contract(
    toy: Format, rule: Callable[[Case], None], golden_dir: Path, tmp_path: Path
) -> None:
    rule(Case(toy, open_manifest(golden_dir / "z2_p4_bf16" / "ckpt"), tmp_path))


@pytest.mark.parametrize(
    "header",
    [
        "",
        "[]",
        "null",
        "{}",
        '{"toy": 2}',
        '{"toy": 1, "world": 0, "tensors": {}, "checksums": []}',
        '{"toy": 1, "world": true, "tensors": {}, "checksums": ["0000000000000000"]}',
        '{"toy": 1, "world": 1, "tensors": {}, "checksums": []}',
        '{"toy": 1, "world": 1, "tensors": {}, "checksums": ["zz"]}',
        '{"toy": 1, "world": 1, "tensors": {"float32": {"w": [-1]}}, '
        '"checksums": ["0000000000000000"]}',
        '{"toy": 1, "world": 1, "tensors": {"float32": {"w": [99999999, 99999999]}}, '
        '"checksums": ["0000000000000000"]}',
    ],
)
def test_the_toy_refuses_a_bad_header(toy: Format, tmp_path: Path, header: str) -> None:
    from reshard.errors import CorruptError

    (tmp_path / "toy.json").write_text(header, encoding="utf-8")
    with pytest.raises(CorruptError):
        toy.open(tmp_path)


def test_the_examples_of_the_tutorial_run() -> None:
    page = checker.parse(TUTORIAL)
    assert [str(p) for p in checker.check_python(page)] == []


# -- the table of formats -------------------------------------------------------------------------


def test_every_format_is_described_as_it_is() -> None:
    text = FORMATS.read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| \[`([\w-]+)`\]\(#[\w-]+\) \| (yes|no) \| (yes|no) \| (yes|no)", text, re.M
    )
    assert {name: (writes == "yes", keeps == "yes") for name, _, writes, keeps in rows} == {
        name: (found.writes, found.sharded) for name, found in package.formats().items()
    }


def test_the_tests_that_are_named_exist() -> None:
    cells = [
        cell
        for line in FORMATS.read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
        for cell in line.split("|")
    ]
    named = 0
    for cell in cells:
        parts = re.split(r"\]\(\.\./tests/(test_\w+\.py)\)", cell)
        for file, rest in zip(parts[1::2], parts[2::2], strict=True):
            source = (REPO / "tests" / file).read_text(encoding="utf-8")
            for name in re.findall(r"`(test_\w+)`", rest):
                assert f"\ndef {name}(" in source, f"{file} has no {name}"
                named += 1
    assert named > 30


# -- the checks themselves ------------------------------------------------------------------------


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Check a page with this text; returns its problems as ``line: text``."""
    monkeypatch.setattr(checker, "REPO", tmp_path)

    def problems(text: str) -> list[str]:
        path = tmp_path / "page.md"
        path.write_text(text, encoding="utf-8")
        parsed = checker.parse(path)
        checks = (checker.check_links, checker.check_words, checker.check_python)
        return [f"{p.line}: {p.text}" for one in checks for p in one(parsed)]

    return problems


def test_links(page: Callable[[str], list[str]], tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A *heading*, twice\n# A heading, twice\n")
    good = "[a](other.md) [b](https://example.org/x) [c](#here) [d](other.md#a-heading-twice-1)"
    assert page(f"## Here\n{good}\n`[no](link)`\n") == []
    assert page("x\n[a](missing.md)\n") == ["2: there is no missing.md"]
    assert page("[a](other.md#nowhere)\n") == ["1: other.md has no #nowhere"]
    assert page("[a](#nowhere)\n") == ["1: page.md has no #nowhere"]
    assert page("[a](../outside.md)\n") == ["1: ../outside.md leads out of the repository"]


def test_doctests(page: Callable[[str], list[str]]) -> None:
    assert page("```python\n>>> x = 2\n```\ntext\n```python\n>>> x + 1\n3\n```\n") == []
    (wrong,) = page("text\n```python\n>>> 1 + 1\n3\n```\n")
    assert wrong.startswith("3: printed\n2\ninstead of\n3")
    (raised,) = page("```python\n>>> 1\n1\n>>> {}['a']\n```\n")
    assert raised == "4: KeyError: 'a'"


def test_snippets(page: Callable[[str], list[str]]) -> None:
    assert page("```python\nx = 1\nassert x\n```\n") == []
    assert page("text\n```python\nx = 1\n1 / 0\n```\n") == [
        "4: ZeroDivisionError: division by zero"
    ]
    (syntax,) = page("```python\nx = = 1\n```\n")
    assert syntax.startswith("2: SyntaxError")


def test_what_is_left(page: Callable[[str], list[str]]) -> None:
    word = "TO" + "DO"
    assert page(f"text\n{word}: write this\n") == [f"2: {word} is left"]
    assert page("text\n```python\nx = 1\n") == ["2: the block doesn't end"]


def test_commands_are_found_with_their_output() -> None:
    text = "$ zreshard convert a b \\\n    --to 3  # why\nline\n\nline\n$ ls\n$ zreshard --help\n"
    block = checker.Block(Path("p.md"), 10, "console", "console", text)
    first, second = checker.commands(block)
    assert (first.line, first.words) == (10, ("convert", "a", "b", "--to", "3"))
    assert first.output == "line\n\nline"
    assert (second.line, second.words, second.output) == (16, ("--help",), "")


def test_commands_that_do_not_exist_are_found() -> None:
    assert checker.misuse(["convert", "a", "b", "--from", "4", "--to", "8"]) is None
    assert checker.misuse(["--help"]) is None
    assert "--frmo" in (checker.misuse(["convert", "a", "b", "--frmo", "4"]) or "")
    assert "convrt" in (checker.misuse(["convrt", "a", "b"]) or "")
    assert checker.misuse(["convert", "a", "b", "--to", "many"]) is not None


def test_times_may_differ_and_nothing_else() -> None:
    assert checker.same("moved 3 tensors in 0.3 s", "moved 3 tensors in 12 s")
    assert not checker.same("moved 3 tensors in 0.3 s", "moved 4 tensors in 0.3 s")
    assert checker.same("first\n...\nlast", "first\na\nb\nlast")
    assert checker.same("", "")


# -- the demo -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_demo_shows_what_it_says(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(REPO / "examples" / "demo.py"), "--out", str(tmp_path / "demo")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for verb in ("inspect", "plan", "convert", "verify", "diff", "consolidate"):
        assert f"$ zreshard {verb}" in done.stdout
    assert (tmp_path / "demo" / "model.safetensors").is_file()
