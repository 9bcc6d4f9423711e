"""What do all tests share: where the fixtures lie, how random cases run, how the command is run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

REPO = Path(__file__).resolve().parent.parent
FIXTURES_VARIABLE = "ZRESHARD_FIXTURES"

# No deadline and no "too slow": a busy machine is not a failure.
settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "torture", settings.get_profile("ci"), derandomize=False, max_examples=2000
)
# `pytest --hypothesis-profile=torture` comes after this line and wins.
settings.load_profile("ci")


@pytest.fixture(scope="session")
def fixtures_dir() -> Path:
    """Real checkpoints with their truth; too large to be kept in the repository."""
    named = os.environ.get(FIXTURES_VARIABLE)
    if named:
        path = Path(named)
        if not path.is_dir():
            pytest.fail(f"{FIXTURES_VARIABLE} names {path}, which is not a folder", pytrace=False)
        return path
    path = REPO.parent / "shared" / "fixtures"
    if not path.is_dir():
        pytest.skip(f"needs real checkpoints: set {FIXTURES_VARIABLE} to the folder with them")
    return path


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """Small files that were written once and must stay readable for ever."""
    return REPO / "tests" / "golden"


@dataclass(frozen=True, slots=True)
class CliResult:
    """How a run of the command ended."""

    code: int
    stdout: str
    stderr: str


@pytest.fixture(scope="session")
def run_cli() -> Callable[..., CliResult]:
    """Run ``zreshard`` in a process of its own, as a user does."""

    def run(
        *args: str | Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 120,
    ) -> CliResult:
        path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, "-m", "reshard.cli", *map(str, args)],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": path, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return CliResult(done.returncode, done.stdout, done.stderr)

    return run
