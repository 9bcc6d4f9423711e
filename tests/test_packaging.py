"""Does an install, plain or editable, bring what the checkout has, each file once?

``formats/`` and ``cli/`` lie at the top of the tree and install as ``reshard.formats`` and
``reshard.cli``. The quick tests hold ``pyproject.toml`` against the tree; the slow ones build and
install a clean copy of it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]
# Where the packages lie in the tree, and the package each folder installs as.
ROOTS = {"reshard": "reshard", "formats": "reshard.formats", "cli": "reshard.cli"}
LEFTOVERS = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "out", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
)


def files_under(root: Path) -> list[Path]:
    """Return all files below ``root``, links to folders not followed, compiled files left out."""
    return [
        Path(folder) / name
        for folder, _, names in os.walk(root)  # os.walk stays out of linked folders
        for name in names
        if not folder.endswith("__pycache__")
    ]


def installed_names() -> dict[str, str]:
    """Map each file of the packages, as the tree has it, to its path in an install."""
    return {
        file.relative_to(REPO).as_posix(): (
            Path(*package.split(".")) / file.relative_to(REPO / root)
        ).as_posix()
        for root, package in ROOTS.items()
        for file in files_under(REPO / root)
    }


def run(*command: str | Path, cwd: Path) -> str:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_list_of_packages_is_the_tree() -> None:
    found = {
        Path(installed).parent.as_posix().replace("/", ".")
        for installed in installed_names().values()
        if installed.endswith(".py")
    }
    assert sorted(SETUPTOOLS["packages"]) == sorted(found)


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {(REPO / file).parent for file in installed_names() if file.endswith(".py")}
    assert [str(f) for f in sorted(folders) if not (f / "__init__.py").is_file()] == []


def test_package_dir_names_the_folders() -> None:
    assert SETUPTOOLS["package-dir"] == {package: root for root, package in ROOTS.items()}


@pytest.mark.parametrize("name", ["formats", "cli"])
def test_the_links_lead_to_the_folders(name: str) -> None:
    assert (REPO / "reshard" / name).readlink() == Path("..", name)


@pytest.mark.parametrize("name", ["formats", "cli"])
def test_a_bare_import_is_refused(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert f"reshard.{name}" in last


@pytest.mark.parametrize("name", ["formats", "cli"])
def test_the_same_package_imports_under_its_name(name: str) -> None:
    script = f"import sys, reshard.{name}; print(sys.modules.get({name!r}))"
    assert run(sys.executable, "-c", script, cwd=REPO) == "None\n"


@pytest.fixture
def clean_copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(REPO, tmp_path / "copy", symlinks=True, ignore=LEFTOVERS))


@pytest.mark.slow
def test_sdist_and_wheel_hold_each_file_once(clean_copy: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    # build makes the wheel from the sdist: this proves that the sdist is enough.
    run(sys.executable, "-m", "build", "--outdir", out, clean_copy, cwd=tmp_path)

    (sdist,) = out.glob("zreshard-*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert [m.name for m in members if not (m.isfile() or m.isdir())] == []
    held = sorted(m.name.partition("/")[2] for m in members if m.isfile())
    sources = [n for n in held if n.partition("/")[0] in ROOTS]
    assert sources == sorted(installed_names())
    assert {"pyproject.toml", "README.md", "LICENSE"} <= set(held)

    (wheel,) = out.glob("zreshard-*.whl")
    names = sorted(zipfile.ZipFile(wheel).namelist())
    packed = [n for n in names if ".dist-info/" not in n]
    assert packed == sorted(installed_names().values())
    assert any(n.endswith(".dist-info/licenses/LICENSE") for n in names)


def install(source: Path, where: Path, *, editable: bool) -> Path:
    """Install ``source`` in a new environment that borrows its dependencies from this one."""
    venv.create(where, with_pip=False, symlinks=True)
    python = where / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    run(*pip, *(["--editable"] if editable else []), source, cwd=where)
    purelib = sysconfig.get_path("purelib", "venv", {"base": str(where)})
    # Only after the install, so that pip doesn't meet a zreshard of this environment. A path
    # listed so comes last, and the .pth files in it aren't read.
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    Path(purelib, "borrowed.pth").write_text("\n".join(borrowed) + "\n", encoding="utf-8")
    return python


IMPORT_ALL = """
import importlib, importlib.metadata, importlib.resources, importlib.util, sys
for package in sys.argv[1:]:
    importlib.import_module(package)
assert importlib.resources.files("reshard").joinpath("py.typed").is_file()
assert importlib.util.find_spec("formats") is None, "a bare formats is installed"
assert importlib.util.find_spec("cli") is None, "a bare cli is installed"
print(importlib.metadata.version("zreshard"))
print(sys.modules["reshard"].__file__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("editable", [False, True], ids=["plain", "editable"])
def test_an_install_works_from_anywhere(clean_copy: Path, tmp_path: Path, editable: bool) -> None:
    python = install(clean_copy, tmp_path / "env", editable=editable)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    version, file = run(python, "-c", IMPORT_ALL, *SETUPTOOLS["packages"], cwd=elsewhere).split()
    assert version == PROJECT["project"]["version"]
    assert Path(file).is_relative_to(clean_copy if editable else tmp_path / "env")
    assert "Usage" in run(python.parent / "zreshard", "--help", cwd=elsewhere)


@pytest.mark.slow
def test_an_editable_install_sees_a_new_module(clean_copy: Path, tmp_path: Path) -> None:
    python = install(clean_copy, tmp_path / "env", editable=True)
    (clean_copy / "formats" / "brand_new.py").write_text("ANSWER = 42\n", encoding="utf-8")
    script = "from reshard.formats.brand_new import ANSWER; print(ANSWER)"
    assert run(python, "-c", script, cwd=tmp_path) == "42\n"
