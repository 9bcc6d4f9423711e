"""Does each part import only what it may: core alone, formats without torch, a light start?"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
FACADE = "api.py"
"""The library's front: the one module beside the core that knows the formats."""
CORE_FILES = sorted(p for p in (REPO / "reshard").glob("*.py") if p.name != FACADE)
FORMAT_FILES = sorted((REPO / "formats").rglob("*.py"))
CLI_FILES = sorted((REPO / "cli").rglob("*.py"))

HEAVY = ("torch", "tensorstore", "zarr", "awscrt")
UPPER = ("reshard.formats", "reshard.cli", "reshard.engine")
FRAMEWORKS = ("torch", "deepspeed", "megatron", "transformer_engine")

# Imports the modules in order and tells which of them first brought in something unwanted.
PROBE = """
import importlib, json, sys
modules, unwanted = map(json.loads, sys.argv[1:])
found, seen = {}, set()
for name in modules:
    importlib.import_module(name)
    new = {u for u in unwanted if u in sys.modules} - seen
    seen |= new
    if new:
        found[name] = sorted(new)
print(json.dumps(found))
"""


def module_name(path: Path) -> str:
    """Return the name that a file is imported by: ``formats/x.py`` is ``reshard.formats.x``."""
    parts = path.relative_to(REPO).with_suffix("").parts
    if parts[0] != "reshard":
        parts = ("reshard", *parts)
    return ".".join(parts).removesuffix(".__init__")


def importable(files: list[Path]) -> list[str]:
    return [module_name(path) for path in files if path.name != "__main__.py"]


def imports_of(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every import, at any depth, also by ``import_module``.

    ``from a import b`` yields both ``a`` and ``a.b``: b may be a module.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield node.lineno, alias.name
            case ast.ImportFrom(module=module, names=names, level=level):
                parents = package.split(".")
                base = parents[: len(parents) - level + 1] if level else []
                origin = ".".join([*base, *([module] if module else [])])
                yield node.lineno, origin
                for alias in names:
                    yield node.lineno, f"{origin}.{alias.name}"
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, f"{package}{name}" if name.startswith(".") else name
            case _:
                pass


def violations(path: Path, forbidden: tuple[str, ...]) -> list[str]:
    name = module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return [
        f"{path.relative_to(REPO)}:{line} imports {imported}"
        for line, imported in imports_of(path.read_text(encoding="utf-8"), package)
        if any(imported == f or imported.startswith(f"{f}.") for f in forbidden)
    ]


def brought_in(modules: list[str], unwanted: tuple[str, ...]) -> dict[str, list[str]]:
    """Import ``modules`` in a fresh process; return which of them loaded something unwanted."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(modules), json.dumps(unwanted)],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("import torch.nn as nn", "torch.nn"),
        ("def f():\n    from torch import Tensor", "torch"),
        ("from reshard import formats", "reshard.formats"),
        ("from . import formats", "reshard.formats"),
        ("from .formats.native import read", "reshard.formats.native"),
        ("import importlib\nimportlib.import_module('torch')", "torch"),
        ("import_module('.formats', 'reshard')", "reshard.formats"),
        ("__import__('torch')", "torch"),
    ],
)
def test_the_search_finds_every_way_to_import(statement: str, expected: str) -> None:
    assert expected in [name for _, name in imports_of(statement, "reshard")]


def test_relative_imports_are_resolved_from_their_package() -> None:
    assert (1, "reshard.cli") in imports_of("from ..cli import main", "reshard.formats")


def test_the_probe_names_the_module_that_brought_something_in() -> None:
    assert brought_in(["ast", "json", "json.tool"], ("json", "argparse")) == {
        "ast": ["json"],  # the probe itself has loaded json
        "json.tool": ["argparse"],
    }


@pytest.mark.parametrize("path", CORE_FILES, ids=module_name)
def test_core_knows_nothing_above_it(path: Path) -> None:
    assert violations(path, (*UPPER, "torch")) == []


def test_importing_core_stays_light() -> None:
    assert brought_in(importable(CORE_FILES), (*HEAVY, *UPPER, "click")) == {}


@pytest.mark.parametrize("path", FORMAT_FILES, ids=module_name)
def test_formats_need_no_framework(path: Path) -> None:
    assert violations(path, (*FRAMEWORKS, "reshard.cli", "reshard.engine")) == []


def test_importing_the_formats_package_stays_light() -> None:
    assert brought_in(["reshard.formats"], (*HEAVY, "click")) == {}


def test_importing_every_format_loads_no_framework() -> None:
    assert brought_in(importable(FORMAT_FILES), (*FRAMEWORKS, "click")) == {}


def test_importing_the_command_line_stays_light() -> None:
    assert brought_in(importable(CLI_FILES), (*HEAVY, "reshard.engine")) == {}
