"""Do ranks meet again after a restart, whatever the last attempt left in the store?"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from reshard.engine import rounds
from reshard.engine.failures import RankFailed

REPO = Path(__file__).resolve().parent.parent


def join_all(store: Store, world: int, seconds: float = 30) -> list[Store]:
    limit = timedelta(seconds=seconds)
    with ThreadPoolExecutor(world) as pool:
        jobs = [pool.submit(rounds.join, store, r, world, timeout=limit) for r in range(world)]
        return [job.result() for job in jobs]


def one_place(stores: list[Store]) -> bool:
    """Whether what the first writes is what all read."""
    stores[0].set("said", "hello")
    return all(store.check(["said"]) for store in stores)


def test_every_round_has_a_place_of_its_own() -> None:
    store = HashStore()
    first = join_all(store, 3)
    assert one_place(first)
    for world in (3, 5, 2, 1):
        again = join_all(store, world)
        assert not again[0].check(["said"])
        assert one_place(again)


def test_what_dead_ranks_left_is_not_believed() -> None:
    """A dead attempt of four left everything but the last word."""
    store = HashStore()
    meeting = PrefixStore("reshard/meeting", store)
    for rank in range(4):
        meeting.set(f"here/{rank}", f"dead {rank}")
        meeting.set(f"yes/dead/{rank}", "")
    numbers = {str(rank): f"dead {rank}" for rank in range(4)}
    meeting.set("round", json.dumps({"name": "dead", "numbers": numbers}))
    meeting.set("open/dead", "")
    assert one_place(join_all(store, 4))


def test_a_late_rank_replaces_what_its_forerunner_said() -> None:
    """Rank 0 has drawn a round with a dead rank's number before the new one comes."""
    store = HashStore()
    PrefixStore("reshard/meeting", store).set("here/1", "dead")
    found: list[Store] = []
    leader = threading.Thread(
        target=lambda: found.append(rounds.join(store, 0, 2, timeout=timedelta(seconds=30)))
    )
    leader.start()
    while not store.check(["reshard/meeting/round"]):
        pass
    found.append(rounds.join(store, 1, 2, timeout=timedelta(seconds=30)))
    leader.join()
    assert one_place(found)


def test_who_didnt_come_is_named() -> None:
    limit = timedelta(seconds=0.3)
    with pytest.raises(RankFailed, match=r"ranks \[1, 2\] didn't come"):
        rounds.join(HashStore(), 0, 3, timeout=limit)
    with pytest.raises(RankFailed, match="rank 0 didn't come"):
        rounds.join(HashStore(), 1, 3, timeout=limit)


SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist
from reshard.engine import rounds
from reshard.engine.transport import connect
torch.set_num_threads(1)
rounds.start("gloo")
transport = connect()
rank, world = transport.rank, transport.size
flag = sys.argv[1]
flat = torch.zeros(world)
flat[rank] = rank + 1
transport.gather(flat, range(world + 1), "first").wait()
if rank == 1 and not os.path.exists(flag):
    open(flag, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
total = transport.agree(torch.tensor([float(rank)]), "sum", "second")
print(f"rank {rank} of {world} attempt {os.environ['TORCHELASTIC_RESTART_COUNT']} "
      f"has {flat.tolist()} {total.item()}", flush=True)
transport.close()
dist.destroy_process_group()
"""


def test_torchrun_restarts_after_a_rank_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
            *(str(script), str(tmp_path / "flag")),
        ],
        env={**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # ranks share the output, and the end of one's line may come after the other's beginning
    lines = re.findall(r"rank \d of \d attempt \d has \[[\d., ]+\] [\d.]+", done.stdout)
    assert sorted(lines) == [f"rank {r} of 2 attempt 1 has [1.0, 2.0] 1.0" for r in range(2)]
