"""How are contenders told apart, and made to take turns? Each has processes of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SMALL_BLOCKS = {"MALLOC_MMAP_THRESHOLD_": "131072"}
"""Has freed memory leave the process at once, so that its size says what is in use."""


class Crew:
    """The ranks of one contender, kept alive and idle between requests.

    Parameters
    ----------
    name
        A contender of :func:`bench.engine_contenders.contender`.
    size
        A name of :data:`bench.engine_model.SIZES`.
    ranks
        How many processes.
    logs
        Folder for what the ranks print.
    python
        The interpreter that has what the contender needs.
    extra
        Further environment variables.
    """

    def __init__(
        self,
        name: str,
        size: str,
        ranks: int,
        logs: Path,
        python: str = sys.executable,
        extra: dict[str, str] | None = None,
    ) -> None:
        self.name, self._log = name, logs / f"{name.replace(' ', '-')}.log"
        self._port = _free_port()
        environment = {
            **os.environ,
            **(extra or {}),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
            "WORLD_SIZE": str(ranks),
            "GLOO_SOCKET_IFNAME": "lo",
            "DS_ACCELERATOR": "cpu",
        }
        command = [python, str(ROOT / "bench" / "engine_rank.py"), name, size]
        with self._log.open("w") as log:
            self._ranks = [
                subprocess.Popen(
                    [*command, str(rank), str(ranks)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
                for rank in range(ranks)
            ]
        self._answers()

    def ask(self, do: str, **request: Any) -> list[dict[str, Any]]:
        """Have all ranks do something; returns what each says, in rank order."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps({"do": do, **request}) + "\n")
            rank.stdin.flush()
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        found = []
        for number, rank in enumerate(self._ranks):
            assert rank.stdout is not None
            line = rank.stdout.readline()
            if not line:
                raise RuntimeError(f"rank {number} of {self.name} ended; see {self._log}")
            found.append(json.loads(line))
        return found

    def close(self) -> None:
        """End the processes."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            rank.wait()
        for left in Path("/dev/shm").glob(f"deepspeed_*_{self._port}_*"):  # DeepSpeed keeps them
            left.unlink()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
