"""Which checkpoint is at a path, and is it said where there are several?"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard import Options, Wanted
from reshard.cli.main import main as program
from reshard.errors import NotFoundError, RequestError
from reshard.format import Found
from reshard.formats import detect, detect_all, formats

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def made(golden_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each format."""
    folder = tmp_path_factory.mktemp("made")
    source, options = golden_dir / "z2_p4_bf16" / "ckpt", Options(sync=False)
    shutil.copytree(source, folder / "deepspeed")
    reshard.convert(source, folder / "native", Wanted(format="native"), options)
    reshard.consolidate(source, folder / "model.safetensors", Wanted(), options)
    return folder


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def run(*words: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            program.main([str(w) for w in words])
        code = end.value.code
        assert isinstance(code, int)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.mark.parametrize("name", ["deepspeed", "native"])
def test_a_checkpoint_alone(made: Path, name: str) -> None:
    assert [f.name for f, _ in detect_all(made / name)] == [name]
    assert detect(made / name)[0].name == name


@pytest.mark.parametrize("name", ["deepspeed", "native"])
def test_weights_beside_it_are_another_checkpoint(
    made: Path, tmp_path: Path, name: str, cli: Cli
) -> None:
    both = Path(shutil.copytree(made / name, tmp_path / "both"))
    shutil.copy(made / "model.safetensors", both)
    root = detect(made / name)[1].root.relative_to(made / name)
    with pytest.raises(RequestError) as error:
        reshard.open_manifest(both)
    assert error.value.what == (
        f"holds checkpoints of several formats: {name} ({both / root}), safetensors ({both})"
    )
    assert "--source-format" in str(error.value)
    for verb in (["verify", both], ["convert", both, tmp_path / "x"], ["plan", both, "x"]):
        code, _, err = cli(*verb)
        assert (code, "several formats" in err) == (6, True)

    for chosen in (name, "safetensors"):
        assert reshard.open_manifest(both, chosen).format == chosen
        assert reshard.open(both, chosen).world == (1 if chosen == "safetensors" else 4)
        assert cli("plan", both, tmp_path / "x", "--source-format", chosen)[0] == 0
        assert cli("verify", both, "--source-format", chosen)[0] == 0
        code, out, _ = cli("inspect", both, "--source-format", chosen, "--json")
        assert (code, json.loads(out)["checkpoint"]["format"]) == (0, chosen)
    words = ["consolidate", both, tmp_path / "y.safetensors", "--source-format", name, "--no-sync"]
    assert cli(*words)[0] == 0
    assert reshard.open_manifest(both / "model.safetensors").format == "safetensors"


@pytest.mark.parametrize("name", ["deepspeed", "native"])
def test_inspect_lists_all(made: Path, tmp_path: Path, name: str, cli: Cli) -> None:
    both = Path(shutil.copytree(made / name, tmp_path / "both"))
    shutil.copy(made / "model.safetensors", both)
    code, out, err = cli("inspect", both)
    assert code == 0, err
    assert f": {name}, stage 2, 4 ranks" in out
    assert f"beside it: {both / 'model.safetensors'}" in out
    assert json.loads(cli("inspect", both, "--json")[1])["others"] == [
        str(both / "model.safetensors")
    ]


def test_a_format_that_is_not_there(made: Path, cli: Cli) -> None:
    with pytest.raises(NotFoundError, match="no checkpoint of the format native is there"):
        detect(made / "deepspeed", "native")
    with pytest.raises(RequestError, match="there is no format 'zip'"):
        detect(made / "native", "zip")
    assert cli("inspect", made / "native", "--source-format", "zip")[0] == 2


def test_a_format_can_claim_files_of_another(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one whose pieces are written as safetensors."""
    both = Path(shutil.copytree(made / "native", tmp_path / "both"))
    shutil.copy(made / "model.safetensors", both)
    native = type(formats()["native"])
    found = native.detect

    def claims(self: Any, path: Path) -> Found | None:
        one = found(self, path)
        return None if one is None else replace(one, parts=frozenset(["safetensors"]))

    monkeypatch.setattr(native, "detect", claims)
    assert detect(both)[0].name == "native"
    assert detect(made / "model.safetensors")[0].name == "safetensors"


def test_what_a_killed_conversion_left_is_no_checkpoint(made: Path, tmp_path: Path) -> None:
    for name in ("native", "deepspeed"):
        left = tmp_path / f".{name}.zreshard-partial"
        left.mkdir()
        shutil.copytree(made / name, left / "payload")
    with pytest.raises(NotFoundError):
        detect(tmp_path)
