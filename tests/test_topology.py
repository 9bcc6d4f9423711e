"""Do the ranks that talk most sit in one node, and are sums over copies still in order?"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import netns
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch._C._distributed_c10d import TCPStore

from reshard.engine.counter import pairwise_sum
from reshard.engine.topology import AXES, Topology
from reshard.engine.transport import Transport, connect
from reshard.errors import RequestError

degree = st.sampled_from([1, 2, 3, 4])


@given(pipeline=degree, copies=degree, per_node=degree, shard=degree, tensor=degree)
def test_groups_divide_the_ranks_and_stay_in_their_node(
    pipeline: int, copies: int, per_node: int, shard: int, tensor: int
) -> None:
    node = per_node * shard * tensor
    world = node * copies * pipeline
    topology = Topology(world, node, pipeline=pipeline, tensor=tensor, shard=shard)
    assert topology.replicate == copies * per_node
    for axis, degree in zip(AXES, topology.degrees, strict=True):
        groups = topology.groups_of(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        assert {len(group) for group in groups} == {degree}
        if axis in ("shard", "tensor"):
            assert all(len({rank // node for rank in group}) == 1 for group in groups)
    for rank in (0, world // 2, world - 1):
        place = topology.coordinate(rank)
        number = 0
        for axis, degree in zip(AXES, topology.degrees, strict=True):
            number = number * degree + place[axis]
        assert number == rank
        data = topology.group_of(rank, "replicate", "shard")
        # Neighbours share a copy: the tree over all data ranks is the shards', then the copies'.
        copies_of = [topology.coordinate(r)["replicate"] for r in data]
        assert copies_of == sorted(copies_of)


def test_a_copy_fills_a_node_unless_told_otherwise() -> None:
    assert Topology(32, 8).degrees == (1, 4, 8, 1)
    assert Topology(32, 8, tensor=2).degrees == (1, 4, 4, 2)
    assert Topology(32, 8, pipeline=4).degrees == (4, 1, 8, 1)
    assert Topology(8, 8, pipeline=4, tensor=2).degrees == (4, 1, 1, 2)
    assert Topology(32, 8, shard=2).degrees == (1, 16, 2, 1)
    assert Topology(16, 4, pipeline=2, tensor=2).groups_of("shard")[:4] == [
        (0, 2),
        (1, 3),
        (4, 6),
        (5, 7),
    ]
    assert Topology(16, 4, pipeline=2, tensor=2).groups_of("replicate")[:2] == [(0, 4), (1, 5)]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (dict(world=12, node=8), "8 ranks of a node don't divide 12 ranks"),
        (dict(world=16, node=8, pipeline=3), "pipeline x tensor = 3 x 1 don't divide 16"),
        (dict(world=16, node=4, tensor=8), "8 tensor ranks don't divide 4 ranks of a node"),
        (dict(world=16, node=4, shard=3), "3 shard ranks don't divide 16 data ranks"),
        (dict(world=16, node=4, shard=8), "8 shard ranks don't divide 4 places of a node"),
        (dict(world=0, node=4), "world is 0"),
        (dict(world=4, node=4, shard=-1), "shard is -1"),
    ],
)
def test_numbers_that_dont_fit(numbers: dict[str, int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Topology(**numbers)


def reduce_all(shard: Transport, copies: Transport, flat: torch.Tensor, out: torch.Tensor) -> None:
    """Sum over the shard group, then over the copies; every copy has the slice's sum."""
    shard.reduce(flat, even(flat.numel(), shard.size), out, "flat").wait()
    bounds = even(out.numel(), copies.size)
    run = out.new_empty(bounds[copies.rank + 1] - bounds[copies.rank])
    copies.reduce(out, bounds, run, "slice").wait()
    out[bounds[copies.rank] : bounds[copies.rank + 1]] = run
    copies.gather(out, bounds, "slice").wait()


def even(n: int, ranks: int) -> list[int]:
    return [rank * n // ranks for rank in range(ranks + 1)]


def _sum_over_mesh(node: int) -> Any:
    world = connect()
    groups = Topology(world.size, node).make()
    shard, copies = connect(groups.shard, name="shard"), connect(groups.replicate, name="copies")
    assert connect(groups.data).size == world.size
    n = 1001
    parts = [torch.randn(n, generator=torch.Generator().manual_seed(r)) for r in range(world.size)]
    truth = pairwise_sum([part.clone() for part in parts])
    bounds = even(n, shard.size)
    run = slice(bounds[shard.rank], bounds[shard.rank + 1])
    out = torch.empty(run.stop - run.start)
    reduce_all(shard, copies, parts[world.rank], out)
    assert torch.equal(out, truth[run])
    with pytest.raises(RequestError, match="for 16 ranks"):
        Topology(16, 2).make()


@pytest.mark.parametrize(("world", "node"), [(4, 2), (4, 4), (4, 1), (8, 4)])
def test_sums_over_copies_are_those_of_all_ranks_in_order(world: int, node: int) -> None:
    run_ranks(_sum_over_mesh, world, node)


N = 1 << 20
ROUNDS = 4


def _node(node: int) -> None:
    """Run the two ranks of a node, and print what a step of stage 3 sends over the cable."""
    child = os.fork()
    rank = 2 * node + (0 if child else 1)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "wire"
    store = TCPStore("10.77.0.1", 29500, 4, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    connect()
    right = Topology(4, 2).make()
    wrong: list[Any] = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3], [0, 1], [2, 3])]
    for order, shard, copies in (
        ("right", right.shard, right.replicate),
        ("wrong", wrong[rank % 2], wrong[2 + rank // 2]),
    ):
        transports = connect(shard, name="shard"), connect(copies, name="copies")
        step(*transports)
        dist.barrier()
        before = netns.sent("wire")
        dist.barrier()
        for _ in range(ROUNDS):
            step(*transports)
        dist.barrier()
        if child:
            print(f"{order} {netns.sent('wire') - before}", flush=True)
        dist.barrier()
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def step(shard: Transport, copies: Transport) -> None:
    flat = torch.ones(N)
    bounds = even(N, shard.size)
    for _ in range(2):  # forward and backward
        shard.gather(flat, bounds, "flat").wait()
    reduce_all(shard, copies, flat, flat.new_empty(bounds[shard.rank + 1] - bounds[shard.rank]))


def test_only_slices_cross_between_nodes() -> None:
    """A node's two ranks send N/2 elements each to sum slices; the other order sends 3 N/2."""
    with netns.two_nodes() as nodes:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        processes = [
            subprocess.Popen(
                [*prefix, sys.executable, __file__, str(node)],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for node, prefix in enumerate(nodes)
        ]
        said = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    theory = ROUNDS * 2 * (N // 2) * 4
    for text, _ in said:
        found = {order: int(sent) for order, sent in re.findall(r"(\w+) (\d+)", text)}
        assert theory <= found["right"] <= 1.02 * theory, found
        assert 3 * theory <= found["wrong"] <= 1.02 * 3 * theory, found


if __name__ == "__main__":
    _node(int(sys.argv[1]))
