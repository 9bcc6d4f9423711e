"""Other names for tensors: rules, wrappers, and what must not happen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.api import open_manifest
from reshard.conversion import Wanted
from reshard.errors import RequestError
from reshard.execute import Options
from reshard.rename import Rule, renamed, unwrapped

QUICK = Options(sync=False)


@pytest.fixture
def source(golden_dir: Path) -> Path:
    return golden_dir / "z3_p2_bf16_frozen_tied" / "ckpt"


def test_every_tensor_has_its_new_name(source: Path, tmp_path: Path) -> None:
    """All states, groups, digests and tied names follow, through native at another world size."""
    rules = (Rule(r"^blocks\.(\d+)\.", r"layers.\1.block."), Rule("weight$", "w"))
    wanted = Wanted(format="native", world=3, rename=rules)
    reshard.convert(source, tmp_path / "out", wanted, QUICK)
    before, after = reshard.open(source), reshard.open(tmp_path / "out")
    changed = 0
    for name, state in before.manifest.tensors:
        new = name
        if state != "client":
            for rule in rules:
                new = rule.apply(new)
        changed += new != name
        assert before[name, state].numpy().tobytes() == after[new, state].numpy().tobytes()
    assert changed > 40
    assert len(before.manifest.tensors) == len(after.manifest.tensors)
    assert after.manifest.aliases == {
        rules[1].apply(a): rules[1].apply(n) for a, n in before.manifest.aliases.items()
    }
    assert before.groups == after.groups


def test_there_and_back(source: Path, tmp_path: Path) -> None:
    """Renamed and named back, a DeepSpeed checkpoint is what it was, byte for byte."""
    there = Wanted(format="deepspeed", rename=(Rule("^blocks", "layers"),), drop=("*",))
    back = Wanted(format="deepspeed", rename=(Rule("^layers", "blocks"),), drop=("*",))
    plain = Wanted(format="deepspeed", drop=("*",))
    reshard.convert(source, tmp_path / "there", there, QUICK)
    reshard.convert(tmp_path / "there", tmp_path / "back", back, QUICK)
    reshard.convert(source, tmp_path / "plain", plain, QUICK)
    for path in (tmp_path / "plain").rglob("*"):
        if path.is_file():
            other = tmp_path / "back" / path.relative_to(tmp_path / "plain")
            assert path.read_bytes() == other.read_bytes(), path.name
    assert any(n.startswith("layers.") for n, _ in open_manifest(tmp_path / "there").tensors)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("module.a.weight", "a.weight"),
        ("_orig_mod.module.a", "a"),
        ("a._fsdp_wrapped_module.b._checkpoint_wrapped_module.c", "a.b.c"),
        ("module._fsdp_wrapped_module._orig_mod.a.module.b", "a.b"),
        ("mymodule.a", "mymodule.a"),
        ("a.module", "a.module"),
        ("modules.module_list", "modules.module_list"),
        ("", ""),
    ],
)
def test_wrappers(name: str, expected: str) -> None:
    assert unwrapped(name) == expected


def test_what_torch_s_own_wrappers_add(tmp_path: Path) -> None:
    """A compiled, checkpointed module in a DataParallel comes back under its plain names."""
    torch = pytest.importorskip("torch")
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    wrapped = torch.nn.Sequential(plain[0], checkpoint_wrapper(plain[1]))
    outer = torch.nn.DataParallel(torch.compile(wrapped))
    outer_state = {f"module._orig_mod.{n}": p for n, p in wrapped.named_parameters()}
    assert set(outer.state_dict()) <= set(outer_state) | {
        n.replace("._checkpoint_wrapped_module", "") for n in outer_state
    }
    torch.save(outer_state, tmp_path / "a.pt")
    wanted = Wanted(format="torch", unwrap=True)
    reshard.convert(tmp_path / "a.pt", tmp_path / "b.pt", wanted, QUICK)
    plain.load_state_dict(torch.load(tmp_path / "b.pt"), strict=True)


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ([r"\d=0"], r"blocks\.0\.fc1\.weight and blocks\.0\.fc2\.weight would both be called"),
        (["nowhere=x"], "the rule nowhere=x changes no name"),
        (["^.*$="], "nothing would be left of the name"),
        (["(=x"], "isn't valid: missing"),
        ([r"a=\1"], "isn't valid: invalid group reference"),
    ],
)
def test_refused(source: Path, rules: list[str], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        renamed(open_manifest(source), [Rule(*r.rsplit("=", 1)) for r in rules])


def test_the_command(source: Path, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    """Several rules, in their order, and an error that names both tensors."""
    words = ("consolidate", source, tmp_path / "w.safetensors", "--no-sync", "--json")
    result = run_cli(*words, "--rename", "^blocks=layers", "--rename", r"layers\.0\.=first.")
    assert result.code == 0, result.stderr
    names = set(reshard.open(tmp_path / "w.safetensors"))
    assert any(n.startswith("first.") for n in names)
    assert any(n.startswith("layers.1.") for n in names)
    assert not any(n.startswith("blocks") for n in names)
    json.loads(result.stdout)
    bad = run_cli("consolidate", source, tmp_path / "x.safetensors", "--rename", r"\d=0")
    assert bad.code != 0
    assert "would both be called" in bad.stderr
    assert not (tmp_path / "x.safetensors").exists()
    wrong = run_cli("consolidate", source, tmp_path / "x.safetensors", "--rename", "no-rule")
    assert wrong.code == 2
    assert "rules look like" in wrong.stderr
