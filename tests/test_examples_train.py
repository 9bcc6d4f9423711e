"""Does the training example survive a kill, and end with the same weights on other ranks?"""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import ranks
from torch._C._distributed_c10d import TCPStore

REPO = Path(__file__).resolve().parent.parent
SCRIPT = REPO / "examples" / "train.py"
STEPS, EVERY = 16, 4


def arguments(folder: Path, *options: str) -> list[str]:
    fixed = ("--folder", str(folder), "--steps", str(STEPS), "--save-every", str(EVERY))
    return [str(SCRIPT), *fixed, *options]


def one_rank(rank: int, world: int, port: int, printed: Path, words: list[str]) -> None:
    """Be what torchrun starts."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    sys.argv = words
    with printed.open("a") as file, contextlib.redirect_stdout(file):
        runpy.run_path(str(SCRIPT), run_name="__main__")


class Job:
    """The example on some ranks, forked from a server that has torch loaded."""

    def __init__(self, world: int, folder: Path, *options: str) -> None:
        self.folder, self.printed = folder, folder.with_name(f"{folder.name}-{world}.txt")
        # The store lives here, as it lives in torchrun.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ranks: list[BaseProcess] = []
        for rank in range(world):
            printed = self.printed if rank == 0 else Path(os.devnull)
            words = arguments(folder, *options)
            args = (rank, world, self._store.port, printed, words)
            self.ranks.append(ranks._CONTEXT.Process(target=one_rank, args=args, daemon=True))
            self.ranks[-1].start()

    def codes(self) -> list[int | None]:
        """The ranks' exit codes."""
        for rank in self.ranks:
            rank.join(60)
        return [rank.exitcode for rank in self.ranks]

    def losses(self) -> dict[int, str]:
        return losses(self.printed.read_text())


def losses(printed: str) -> dict[int, str]:
    return {int(n): loss for n, loss in re.findall(r"step +(\d+)  loss ([\d.]+)", printed)}


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def wait_for(path: Path) -> None:
    limit = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < limit, f"{path} doesn't come"
        time.sleep(0.002)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_killed_and_resumed_on_other_ranks_at_another_stage(tmp_path: Path, precision: str) -> None:
    whole = Job(1, tmp_path / "whole", "--stage", "0", "--precision", precision)
    assert whole.codes() == [0]
    killed = Job(2, tmp_path / "parts", "--stage", "3", "--precision", precision)
    wait_for(killed.folder / f"step-{EVERY}")
    killed.ranks[1].kill()
    codes = killed.codes()
    assert codes[1] == -signal.SIGKILL and codes[0] not in (0, None)
    assert not (killed.folder / "model.safetensors").exists()

    resumed = Job(4, killed.folder, "--stage", "2", "--precision", precision, "--resume")
    assert resumed.codes() == [0] * 4
    found, expected = resumed.losses(), whole.losses()
    assert EVERY <= min(found) - 1 < STEPS and (min(found) - 1) % EVERY == 0
    assert list(expected) == list(range(1, STEPS + 1))
    assert found == {step: loss for step, loss in expected.items() if step in found}
    assert max(found) == STEPS and killed.losses().items() <= expected.items()
    assert weights(resumed.folder) == weights(whole.folder)


def test_stopping_early_is_no_end(tmp_path: Path) -> None:
    first = Job(1, tmp_path / "run", "--stage", "1", "--until", "6")
    assert first.codes() == [0]
    assert list(first.losses()) == [1, 2, 3, 4, 5, 6]
    names = {path.name for path in first.folder.iterdir()}
    assert names == {"step-4", "step-6"}


@pytest.mark.slow
def test_torchrun_starts_it_again(tmp_path: Path) -> None:
    """A rank is killed from outside; torchrun's next attempt goes on from the newest save."""
    folder = tmp_path / "run"
    path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    job = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"),
            *("2", "--max-restarts", "1", "--monitor-interval", "0.1"),
            *arguments(folder, "--stage", "3", "--resume"),
        ],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(folder / f"step-{EVERY}")
    os.kill(children(job.pid)[-1], 9)
    printed, errors = job.communicate(timeout=120)
    assert job.returncode == 0, errors
    assert "goes on from step-" in printed
    assert list(losses(printed)) == list(range(1, STEPS + 1))
    assert (folder / "model.safetensors").is_file()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.slow
def test_an_agent_is_lost(tmp_path: Path) -> None:
    """Two agents with a rank each; one is killed with its rank, the other goes on alone."""
    folder, whole = tmp_path / "run", Job(1, tmp_path / "whole", "--stage", "0")
    path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    words = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"),
        *("--nproc-per-node", "1", "--max-restarts", "3", "--monitor-interval", "0.1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"),
        *("--rdzv-id", "lost", "--local-addr", "127.0.0.1", "--rdzv-conf"),
        "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3",
        *arguments(folder, "--stage", "3", "--resume"),
    ]
    environment = {
        **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"
    }  # fmt: skip
    agents = []
    for number in range(2):
        printed = (tmp_path / f"agent{number}.txt").open("w")
        agents.append(
            subprocess.Popen(
                words, env=environment, stdout=printed, stderr=printed, start_new_session=True
            )
        )
        if number == 0:
            time.sleep(1)  # the first agent serves the store, and is the one that stays
    try:
        wait_for(folder / f"step-{EVERY}")
        for child in children(agents[1].pid):
            os.kill(child, signal.SIGKILL)
        agents[1].kill()
        code = agents[0].wait(timeout=120)
    finally:
        for agent in agents:
            for pid in (*children(agent.pid), agent.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            agent.wait()
    said = "".join((tmp_path / f"agent{number}.txt").read_text() for number in range(2))
    assert code == 0, said
    assert "world size 2," in said and "world size 1," in said, said
    assert whole.codes() == [0]
    expected = whole.losses()
    assert losses(said).items() <= expected.items() and max(losses(said)) == STEPS
    assert weights(folder) == weights(whole.folder)


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]
