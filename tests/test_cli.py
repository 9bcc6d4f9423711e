"""Does each verb do what it says, say what it does, and end with the right exit code?

Most cases run in this process; what a process is needed for (signals, pipes, terminals) has one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from conftest import REPO, CliResult

from reshard import describe
from reshard.api import open_manifest
from reshard.cli import jobs
from reshard.cli.failure import failure_of
from reshard.cli.main import main as program
from reshard.cli.options import Glob, Size
from reshard.cli.output import aligned, count, duration, rate, shown, size, some, span
from reshard.cli.progress import PLAIN_PAUSE, Progress
from reshard.conversion import Wanted
from reshard.errors import CorruptError

CONVERT = "convert ckpt-4 ckpt-3 --to 3 --stage 3 --format native --no-sync"
CONVERT_5 = "convert ckpt-4 out --from 4 --to 5 --stage 1 --format native --no-sync"


def cli(*words: str | Path) -> CliResult:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with streams[0], streams[1], pytest.raises(SystemExit) as end:
        program.main([str(w) for w in words])
    code = end.value.code
    assert isinstance(code, int)
    return CliResult(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def scratch(golden_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``ckpt-4``: DeepSpeed of 4 ranks; ``ckpt-3``: native; ``model.safetensors``: its masters."""
    folder = tmp_path_factory.mktemp("cli")
    shutil.copytree(golden_dir / "z2_p4_bf16" / "ckpt", folder / "ckpt-4")
    with contextlib.chdir(folder):
        done = cli(
            *[
                "convert",
                "ckpt-4",
                "ckpt-3",
                "--to",
                "3",
                "--stage",
                "3",
                "--format",
                "native",
                "--no-sync",
            ]
        )
        assert done.code == 0, done.stderr
        done = cli(*["consolidate", "ckpt-3", "model.safetensors", "--no-sync"])
        assert done.code == 0, done.stderr
    return folder


@pytest.fixture
def here(scratch: Path, tmp_path: Path) -> Iterator[Path]:
    """A folder of one's own with links to the checkpoints, as the working directory."""
    for path in scratch.iterdir():
        (tmp_path / path.name).symlink_to(path)
    with contextlib.chdir(tmp_path):
        yield tmp_path


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# -- the verbs ------------------------------------------------------------------------------------


def test_convert(here: Path) -> None:
    done = cli(
        *[
            "convert",
            "ckpt-4",
            "out",
            "--from",
            "4",
            "--to",
            "5",
            "--stage",
            "1",
            "--format",
            "native",
            "--no-sync",
        ]
    )
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.startswith("wrote out: native, 5 ranks, stage 1; 449 kB in ")
    assert done.stdout.endswith("verified 28 source checksums\n")
    manifest = open_manifest("out")
    assert (manifest.layout.world, manifest.layout.stage) == (5, 1)


def test_convert_safetensors_to_native_and_back(here: Path) -> None:
    """Byte for byte the file that it was."""
    done = cli("convert", "model.safetensors", "n", "--format", "native", "--to", "2")
    assert done.code == 0, done.stderr
    done = cli("convert", "n", "again.safetensors", "--format", "safetensors")
    assert done.code == 0, done.stderr
    assert Path("again.safetensors").read_bytes() == Path("model.safetensors").read_bytes()


def test_consolidate(here: Path) -> None:
    done = cli(
        *("consolidate", "ckpt-3", "small", "--max-shard-size", "40kB", "--dtype", "bf16"),
        *("--keep-fp32", "*.ln*", "--keep-fp32", "lnf.*"),
    )
    assert (done.code, done.stderr) == (0, "")
    assert "safetensors, 2 files" in done.stdout
    assert "21 of them cast" in done.stdout
    assert "left out: exp_avg:tok.weight" in done.stdout
    kinds = {t.name: t.dtype.name for t in open_manifest("small").tensors.values()}
    assert (kinds["lnf.weight"], kinds["head.weight"]) == ("float32", "bfloat16")


@pytest.mark.parametrize("words", ["plan ckpt-4 out", "convert ckpt-4 out --dry-run"])
def test_plan_and_dry_run_write_nothing(here: Path, words: str) -> None:
    before = names(here)
    done = cli(*words.split(), "--to", "32", "--stage", "3", "--format", "native")
    assert done.code == 0
    assert names(here) == before
    for part in (
        "(planned, nothing was written)",
        "deepspeed          native",
        "tensors     126 (449 kB)       126 (449 kB)",
        "moved   121 tensors cut in another way",
        "proved  31 tensors only read",
        " free",
    ):
        assert part in done.stdout, done.stdout


def test_inspect(here: Path) -> None:
    done = cli("inspect", "ckpt-4")
    assert done.code == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "ckpt-4/global_step3: deepspeed, stage 2, 4 ranks, step 3"
    for part in ("float32  [101, 32]", "weight_decay 0.1", "betas (0.9, 0.95)", "28 checksums"):
        assert part in done.stdout
    assert lines[-1] == "  and 106 more (--all lists them)"
    assert len([n for n in lines if "float32  [" in n or "bfloat16  [" in n]) == 20
    assert "more (--all" not in cli("inspect", "ckpt-4", "--all").stdout


def test_inspect_describes_no_more_than_it_lists(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described: list[str] = []
    line = describe.TensorLine

    def counted(**fields: Any) -> describe.TensorLine:
        described.append(fields["name"])
        return line(**fields)

    monkeypatch.setattr(describe, "TensorLine", counted)
    for words, lines in (((), 20), (("--tensor", "exp_avg:scale"), 1), (("--all",), 126)):
        described.clear()
        assert cli("inspect", "ckpt-4", *words).code == 0
        assert len(described) == lines, words


def test_inspect_some_tensors(here: Path) -> None:
    done = cli("inspect", "ckpt-3", "--tensor", "exp_avg:lnf.*", "--tensor", "scale", "-v")
    found = [line.split()[0] for line in done.stdout.split("digest\n")[-1].splitlines()]
    assert sorted(found) == [
        *("exp_avg:lnf.bias", "exp_avg:lnf.weight", "exp_avg:scale"),
        *("exp_avg_sq:scale", "master:scale", "param:scale"),
    ]


def test_inspect_a_folder_names_what_is_in_it(here: Path) -> None:
    document = json.loads(cli("inspect", ".", "--json").stdout)
    assert document["checkpoint"]["path"] == "ckpt-3"
    assert document["others"] == ["ckpt-4/global_step3", "model.safetensors"]
    assert "beside it: ckpt-4/global_step3, model.safetensors" in cli("inspect", ".").stdout


def test_inspect_a_folder_of_folders(here: Path) -> None:
    Path("runs/a").mkdir(parents=True)
    shutil.copytree("ckpt-4", "runs/a/x", symlinks=False)
    done = cli("inspect", "runs/a")
    assert done.code == 3
    assert "inside: runs/a/x/global_step3 (deepspeed)" in done.stderr


def test_inspect_reads_no_payload(here: Path) -> None:
    """Chunks of a terabyte that occupy no disk."""
    shutil.copytree("ckpt-3", "large")
    document = json.loads(Path("large/zreshard.json").read_text())
    assert document
    for chunk in Path("large").glob("*/c/*"):
        nbytes = chunk.stat().st_size
        chunk.unlink()
        os.truncate(os.open(chunk, os.O_CREAT | os.O_WRONLY), nbytes)
    assert cli("inspect", "large").code == 0
    assert cli("verify", "large").code == 4


def test_verify(here: Path) -> None:
    done = cli("verify", "ckpt-3")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.startswith("ckpt-3: whole; 126 tensors, 449 kB in ")
    assert "126 tensors compared with the recorded digest" in done.stdout
    done = cli("verify", "ckpt-3", "--against", "ckpt-4")
    assert done.code == 0
    assert done.stdout.endswith("the same: 126 tensors, by the digests of their bytes\n")


def test_verify_finds_that_two_differ(here: Path) -> None:
    done = cli("verify", "model.safetensors", "--against", "ckpt-3")
    assert done.code == 1
    assert "not the same: 2 tensors equal" in done.stdout
    assert "--weights compares" in done.stdout
    assert cli("verify", "model.safetensors", "--against", "ckpt-3", "--weights").code == 0


def test_verify_lists_all_damage(here: Path) -> None:
    flipped(here)
    done = cli("verify", "flipped")
    assert done.code == 4
    assert "flipped: 2 problems" in done.stdout
    assert done.stdout.count("\n  x ") == 2
    quiet = cli("verify", "flipped", "-q")
    assert (quiet.code, quiet.stdout) == (4, "")
    assert quiet.stderr.count("error: ") == 2


def test_diff(here: Path) -> None:
    done = cli("diff", "ckpt-3", "ckpt-4")
    assert (done.code, done.stdout) == (0, "no difference: 126 tensors equal\n")
    done = cli("diff", "ckpt-3", "model.safetensors")
    assert done.code == 1
    assert "differ" in done.stdout
    assert "max abs" in done.stdout
    assert "only in A:" in done.stdout
    assert cli("diff", "ckpt-3", "model.safetensors", "--weights").code == 0
    assert cli("diff", "ckpt-3", "ckpt-3", "--recorded", "--rtol", "0.1").code == 0


def flipped(folder: Path) -> Path:
    """A native checkpoint with one wrong bit."""
    path = Path(shutil.copytree(folder / "ckpt-3", folder / "flipped"))
    chunk = path / "group0.master" / "c" / "1"
    data = bytearray(chunk.read_bytes())
    data[5] ^= 1
    chunk.write_bytes(data)
    return path


# -- JSON -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "keys"),
    [
        ("convert ckpt-4 out --to 2 --format native", 0, {"source", "target", "done", "seconds"}),
        ("plan ckpt-4 out --to 2", 0, {"source", "target", "disk_needed", "done"}),
        ("consolidate ckpt-3 out", 0, {"source", "target", "dropped"}),
        ("inspect ckpt-3", 0, {"checkpoint", "states", "groups", "tensors", "others", "step"}),
        ("verify ckpt-3", 0, {"ok", "problems", "checksums"}),
        ("verify ckpt-3 --against ckpt-4", 0, {"ok", "against", "proof"}),
        ("verify flipped", 4, {"ok", "problems", "error"}),
        ("diff ckpt-3 ckpt-4", 0, {"same", "equal", "changed", "values"}),
        ("diff ckpt-3 model.safetensors", 1, {"same", "changed"}),
        ("inspect nothing", 3, {"error"}),
        ("convert ckpt-4 ckpt-3", 7, {"error"}),
        ("convert ckpt-4 out --to x", 2, {"error"}),
        ("nonsense", 2, {"error"}),
    ],
)
def test_json_is_one_document(here: Path, words: str, code: int, keys: set[str]) -> None:
    if "flipped" in words:
        flipped(here)
    done = cli(*words.split(), "--json", "--progress")
    if words.split()[0] in ("inspect", "nonsense"):
        done = cli(*words.split(), "--json")
    assert done.code == code, done.stderr
    document = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(f"has {name}"))
    assert keys <= set(document)
    error = document.get("error")
    if error is not None:
        assert set(error) == {"kind", "what", "where", "hint", "exit_code"}
        assert error["exit_code"] == code


def test_json_of_inspect_has_what_the_text_has(here: Path) -> None:
    document = json.loads(cli("inspect", "ckpt-3", "--json", "--tensor", "*").stdout)
    assert (document["step"], document["digests"], len(document["tensors"])) == (3, 126, 126)
    assert document["groups"][0]["settings"]["betas"] == [0.9, 0.95]
    assert document["groups"][0]["scalars"] == {"step": 3.0}
    tensor = next(t for t in document["tensors"] if t["name"] == "scale")
    assert (tensor["shape"], tensor["stored"], len(tensor["digest"])) == ([1], 1, 16)
    some_tensors = json.loads(cli("inspect", "ckpt-3", "--json", "--tensor", "scale").stdout)
    assert {t["name"] for t in some_tensors["tensors"]} == {"scale"}
    assert len(some_tensors["tensors"]) == 4


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "parts"),
    [
        ("inspect nothing", 3, ["nothing: there is nothing there"]),
        ("convert ckpt-4 out --from 8 --to 2", 6, ["by 4 rank(s)", "not by 8", "--from 4"]),
        ("convert ckpt-4 ckpt-3 --to 2", 7, ["ckpt-3: exists already", "nothing was written"]),
        ("convert ckpt-4 out --to 0", 2, ["--to", "0 is not in the range"]),
        ("convert ckpt-4 out --stage 4", 2, ["--stage"]),
        ("convert ckpt-4 out --format zip", 2, ["'zip' can't be written; formats: ", "native"]),
        ("convert ckpt-4 out --dtype bf17", 2, ["unknown element type 'bf17'"]),
        ("consolidate ckpt-4 out --keep-fp32 x", 2, ["give --dtype too"]),
        ("consolidate ckpt-4 out --dtype bf16 --keep-fp32 [a", 2, ["'[a' has a '[' without a ']'"]),
        ("consolidate ckpt-4 out --dtype bf16 --keep-fp32 x*", 6, ["'x*' matches no tensor"]),
        ("consolidate ckpt-4 out --max-shard-size 5XB", 2, ["'5XB' is no size", "5GB"]),
        ("consolidate ckpt-4 out --state nix", 6, ["no state 'nix'"]),
        ("convert ckpt-4 out --max-memory 1MB", 6, ["memory limit of 1000000 bytes is too small"]),
        ("verify", 2, ["Missing argument 'PATH'", "zreshard verify --help"]),
        ("verify ckpt-3 --weights", 2, ["give --against too"]),
        ("diff ckpt-3 ckpt-4 --rtol -1", 2, ["--rtol"]),
        ("nonsense", 2, ["No such command 'nonsense'"]),
    ],
)
def test_errors_say_what_and_what_to_do(
    here: Path, words: str, code: int, parts: list[str]
) -> None:
    before = names(here)
    done = cli(*words.split())
    assert (done.code, done.stdout) == (code, "")
    assert done.stderr.startswith("error: ")
    for part in parts:
        assert part in done.stderr, done.stderr
    assert names(here) == before


def test_no_error_suggests_an_unsafe_way_out() -> None:
    for path in (REPO / "cli").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        for word in ("weights_only", "--force", "--unsafe", "trust_remote_code", "pickle.load"):
            assert word not in text, (path, word)


def test_what_is_dropped_without_effect_is_said(here: Path) -> None:
    done = cli("plan", "ckpt-4", "out", "--drop", "nix*", "-q")
    assert (done.code, done.stdout) == (0, "")
    assert done.stderr == "warning: --drop 'nix*' matches nothing that the target can't hold\n"


def test_an_existing_target_is_untouched(here: Path) -> None:
    Path("full").mkdir()
    Path("full/file").write_text("mine")
    assert cli("convert", "ckpt-4", "full", "--to", "2").code == 7
    assert Path("full/file").read_text() == "mine"
    assert names(Path("full")) == ["file"]


def test_a_bug_goes_to_a_file(here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("reshard.describe.describe", broken)
    done = cli("inspect", "ckpt-3")
    assert (done.code, done.stdout) == (70, "")
    assert "Traceback" not in done.stderr
    assert "this is a bug in zreshard: ZeroDivisionError: by zero" in done.stderr
    (report,) = tmp_path.glob("zreshard-bug-*.txt")
    assert str(report) in done.stderr
    text = report.read_text()
    assert "Traceback" in text
    assert "command: ['inspect', 'ckpt-3']" in text


def test_errors_of_the_system_are_no_bugs() -> None:
    denied = failure_of(PermissionError(13, "Permission denied", "/x"))
    assert (denied.kind, denied.where, denied.exit_code) == ("not-found", "/x", 3)
    full = failure_of(OSError(28, "No space left on device", "/y"))
    assert (full.kind, full.exit_code) == ("target", 7)


def test_names_from_files_cannot_write_to_the_terminal(here: Path) -> None:
    evil = Path("a\x1b[31m\nb")
    shutil.copytree("ckpt-3", evil)
    done = cli("inspect", evil)
    assert "\x1b" not in done.stdout
    assert "a\\x1b[31m\\nb: native" in done.stdout
    done = cli("convert", "ckpt-3", evil, "--to", "2")
    assert "\x1b" not in done.stderr


# -- colours, quiet, progress ---------------------------------------------------------------------


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("color", "env", "terminal", "expected"),
    [
        ("auto", {}, True, True),
        ("auto", {}, False, False),
        ("auto", {"NO_COLOR": "1"}, True, False),
        ("auto", {"NO_COLOR": ""}, True, True),
        ("auto", {"TERM": "dumb"}, True, False),
        ("always", {"NO_COLOR": "1"}, False, True),
        ("never", {}, True, False),
    ],
)
def test_colours(
    here: Path, monkeypatch: pytest.MonkeyPatch, color, env, terminal, expected
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    out, err = (Terminal() if terminal else io.StringIO() for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        for words in (["inspect", "ckpt-3"], ["inspect", "nothing"]):
            with pytest.raises(SystemExit):
                program.main([*words, "--color", color])
    assert ("\x1b[" in out.getvalue()) is expected
    assert ("\x1b[" in err.getvalue()) is expected


def test_quiet(here: Path) -> None:
    for words in ("convert ckpt-4 out --to 2 --format native", "inspect ckpt-3", "diff ckpt-3 out",
                  "verify out --against ckpt-3", "plan ckpt-3 x --to 2"):  # fmt: skip
        done = cli(*words.split(), "-q")
        assert (done.code, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "words",
    [
        "convert ckpt-4 out --to 3 --format native",
        "convert ckpt-4 out --to 2",
        "consolidate ckpt-3 out --dtype bf16",
        "consolidate ckpt-4 out.safetensors",
        "verify ckpt-4",
        "verify ckpt-3 --against ckpt-4",
        "diff ckpt-3 ckpt-4",
    ],
)
def test_progress_adds_up(here: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """What is told of is what was announced, for every verb."""
    seen: list[tuple[int, int]] = []
    begin = Progress._begin

    def spy(self: Progress, title: str, total: int) -> None:
        begin(self, title, total)
        if total:
            seen.append((total, id(self)))
            progresses.append(self)

    progresses: list[Progress] = []
    monkeypatch.setattr(Progress, "_begin", spy)
    assert cli(*words.split()).code == 0
    ((total, _),) = seen
    assert progresses[0]._done == total


def test_progress_on_a_terminal_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now = clock(monkeypatch)
    stream = Terminal()
    progress = Progress(None, stream)
    with progress.running("convert", 4_000_000_000):
        for _ in range(4):
            now[0] += 1
            progress.add(400_000_000)
    written = stream.getvalue()
    assert "\n" not in written
    assert "\r\x1b[Kconvert  1.60 GB of 4.00 GB, 40%, 400 MB/s, 6.0 s left" in written
    assert written.endswith("\r\x1b[K")


def test_plain_progress_comes_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = clock(monkeypatch)
    stream = io.StringIO()
    progress = Progress(True, stream)
    with progress.running("verify", 10**9):
        for _ in range(int(4 * PLAIN_PAUSE)):
            now[0] += 0.5
            progress.add(10**6)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0] == "verify  10.0 MB of 1.00 GB, 1%, 2.00 MB/s, 8 min 15 s left"


def test_progress_is_silent_where_nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    now = clock(monkeypatch)
    for wish, stream in ((None, io.StringIO()), (False, Terminal())):
        progress = Progress(wish, stream)
        with progress.running("verify", 100):
            now[0] += 60
            progress.add(50)
        assert stream.getvalue() == ""


def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


# -- interrupts and pipes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
@pytest.mark.parametrize("workers", [1, 3])
def test_a_signal_leaves_nothing_behind(
    here: Path, monkeypatch: pytest.MonkeyPatch, number, code, word, workers
) -> None:
    """The signal comes while bytes are being moved, whichever thread moves them."""
    add = Progress.add
    sent = threading.Event()

    def interrupt(self: Progress, nbytes: int) -> None:
        add(self, nbytes)
        if not sent.is_set():
            sent.set()
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Progress, "add", interrupt)
    before = names(here)
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    done = cli("convert", "ckpt-4", "out", "--to", "2", "--workers", str(workers))
    assert (done.code, done.stdout) == (code, "")
    assert done.stderr == f"error: {word}; nothing was written at out\n"
    assert names(here) == before
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_an_interrupt_after_the_end_says_that_all_is_there(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reshard.conversion import Job

    run = Job.run

    def late(self: Job) -> Any:
        run(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(Job, "run", late)
    done = cli("convert", "ckpt-4", "out", "--to", "2")
    assert done.code == 130
    assert "out had just been written and is whole" in done.stderr
    assert open_manifest("out").layout.world == 2


def test_an_interrupt_elsewhere(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("reshard.verification.survey", stop)
    done = cli("verify", "ckpt-3", "--json")
    assert done.code == 130
    assert json.loads(done.stdout)["error"]["kind"] == "interrupted"


def test_a_closed_pipe_is_quiet(scratch: Path) -> None:
    command = [sys.executable, "-m", "reshard.cli", "inspect", "ckpt-3", "--all"]
    env = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONUNBUFFERED": "1"}
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command, cwd=scratch, env=env, stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_terminal_gets_colours_and_no_control_is_left(scratch: Path) -> None:
    main_end, other_end = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    done = subprocess.run(
        [sys.executable, "-m", "reshard.cli", "verify", "ckpt-3"],
        cwd=scratch,
        env={**env, "PYTHONPATH": str(REPO), "TERM": "xterm"},
        stdout=other_end,
        stderr=other_end,
        check=False,
    )
    os.close(other_end)
    text = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(main_end, 4096):
            text += part
    os.close(main_end)
    assert done.returncode == 0
    assert b"\x1b[32mwhole\x1b[0m" in text


def test_the_command_runs_as_a_module(run_cli: Callable[..., CliResult], scratch: Path) -> None:
    done = run_cli("verify", "ckpt-3", "--against", "ckpt-4", cwd=scratch)
    assert (done.code, done.stderr) == (0, "")
    assert run_cli("convert", "ckpt-4", "ckpt-3", cwd=scratch).code == 7


# -- small things ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("5000000", 5_000_000),
        ("5GB", 5_000_000_000),
        ("5gb", 5_000_000_000),
        ("5G", 5_000_000_000),
        ("5GiB", 5 << 30),
        ("512 MiB", 512 << 20),
        ("1.5kB", 1500),
        ("2TiB", 2 << 40),
        ("7B", 7),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert Size().convert(text, None, None) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "0GB", "5XB", "5 5", "1e3", "0.1", "5GBit"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Size().convert(text, None, None)


@pytest.mark.parametrize("text", ["*", "a.?", "[a-z]*", "[[]x", "[]]", "[!]a]b", "x]"])
def test_globs(text: str) -> None:
    assert Glob().convert(text, None, None) == text


@pytest.mark.parametrize("text", ["", "[", "a[b", "[]", "[!]", "[a]["])
def test_what_is_no_glob(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Glob().convert(text, None, None)


def test_numbers_are_written_with_three_digits() -> None:
    written = [size(n) for n in (0, 999, 1000, 9994, 9995, 99_949, 99_951, 999_499, 999_500, 10**9)]
    assert written == ["0 B", "999 B", "1.00 kB", "9.99 kB", "10.0 kB", "99.9 kB", "100 kB",
                       "999 kB", "1.00 MB", "1.00 GB"]  # fmt: skip
    assert [span(1, 1), span(1, 2000)] == ["1 B", "1 B to 2.00 kB"]
    times = [duration(s) for s in (0, 0.04, 0.4, 9.94, 9.96, 59.4, 59.6, 200, 3599.7, 7500)]
    assert times == ["1 ms", "40 ms", "0.4 s", "9.9 s", "10 s", "59 s", "1 min 0 s", "3 min 20 s",
                     "1 h 0 min", "2 h 5 min"]  # fmt: skip
    assert rate(10**9, 2) == "500 MB/s"
    assert [count(1, "tensor"), count(2000, "tensor")] == ["1 tensor", "2,000 tensors"]
    assert some(["a", "b", "c"], 2) == "a, b and 1 more"


def test_columns_are_aligned_whatever_is_coloured() -> None:
    rows = [("a", "1", "x"), (click.style("bcd", fg="red"), "22", "yy")]
    assert [click.unstyle(line) for line in aligned(rows, right=(1,))] == [
        "a     1  x",
        "bcd  22  yy",
    ]


def test_what_cannot_be_seen_is_escaped() -> None:
    assert shown("läyer.0") == "läyer.0"
    assert shown("a\x1b]0;x\x07\u202eb\n\udcff") == "a\\x1b]0;x\\x07\\u202eb\\n\\udcff"
    assert shown("a\nb\t", lines=True) == "a\nb\\t"


def test_the_total_of_a_job_counts_what_is_only_read(here: Path) -> None:
    from reshard.api import prepare

    job = prepare("ckpt-4", "out", Wanted(format="native", world=2))
    masters = sum(t.nbytes for t in open_manifest("ckpt-4").tensors.values())
    assert jobs.job_nbytes(job) >= masters


def test_every_kind_of_error_has_a_failure() -> None:
    failure = failure_of(CorruptError("broken", where="x", hint="copy it again"))
    assert failure.to_json() == {
        "kind": "corrupt",
        "what": "broken",
        "where": "x",
        "hint": "copy it again",
        "exit_code": 4,
    }
