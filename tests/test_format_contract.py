"""Every format keeps its promises; a new one is held to them by being there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from reshard.api import open_manifest
from reshard.formats import formats
from tests.format_contract import Case, obligations

GOLDEN = ("z2_p4_bf16", "z3_p2_bf16_frozen_tied")


@pytest.mark.parametrize("source", GOLDEN)
@pytest.mark.parametrize(
    ("name", "rule"),
    [(name, rule) for name, f in formats().items() for rule in obligations(f.writes)],
)
def test_contract(
    golden_dir: Path, tmp_path: Path, name: str, rule: Callable[[Case], None], source: str
) -> None:
    rule(Case(formats()[name], open_manifest(golden_dir / source / "ckpt"), tmp_path))


@pytest.mark.parametrize("name", formats())
def test_a_format_is_named_as_its_module(name: str) -> None:
    import importlib

    module = importlib.import_module(f"reshard.formats.{name.replace('-', '_')}")
    assert module.FORMAT is formats()[name]
