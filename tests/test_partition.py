"""The closed forms of all partitions against walking over every element."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import owners

from reshard.errors import CorruptError
from reshard.partition import (
    KINDS,
    Contiguous,
    Explicit,
    Partition,
    PerTensor,
    Replicated,
    Rows,
    Whole,
    partition,
)
from reshard.ruler import Ruler, cut_at, ints, pick, slices

lengths = st.sampled_from([0, 0, 1, 1, 2, 3, 5, 7, 16, 33])


@st.composite
def rulers(draw) -> tuple[Partition, Ruler, list[int], list[int]]:
    shapes = draw(st.lists(st.tuples(st.sampled_from([0, 1, 2, 3, 7]), lengths), max_size=8))
    rows = [r for r, _ in shapes]
    numel = [r * n for r, n in shapes]
    world = draw(st.integers(1, 70))
    whole = st.lists(st.integers(0, world - 1), min_size=len(rows), max_size=len(rows)).map(tuple)
    rule = draw(
        st.one_of(
            st.builds(Contiguous, st.just(world), st.integers(1, 5), st.integers(1, 3)),
            st.just(PerTensor(world)),
            st.just(Rows(world)),
            st.just(Replicated(world)),
            st.builds(Whole, st.just(world), whole),
            st.builds(Explicit, st.just(world), whole),
        )
    )
    return rule, rule.ruler(ints(numel), ints(rows)), numel, rows


def elements(pieces) -> list[tuple[int, int, int, int]]:
    """(entry, element, shard, element of the shard) of every element of some pieces."""
    columns = (pieces.entry, pieces.start, pieces.count, pieces.shard, pieces.local)
    return [
        (entry, start + x, shard, local + x)
        for entry, start, count, shard, local in zip(*(c.tolist() for c in columns), strict=True)
        for x in range(count)
    ]


@given(rulers())
def test_what_a_shard_holds(case):
    rule, ruler, numel, rows = case
    truth = owners(rule, numel, rows)
    kept = ruler.kept(rule.stored_shards)
    for shard in range(rule.stored_shards):
        found = elements(ruler.shard(shard))
        wanted = [
            (e, x, shard, local)
            for e, entry in enumerate(truth)
            for x, (owner, local) in enumerate(entry)
            if owner == shard
        ]
        assert found == sorted(wanted, key=lambda row: row[3])
        assert kept[shard] == len(wanted)
        assert all(local < ruler.part for *_, local in found)


@given(rulers(), st.data())
def test_a_range_of_entries_of_a_shard(case, data):
    rule, ruler, numel, _ = case
    low, high = sorted(data.draw(st.tuples(*2 * [st.integers(0, len(numel))])))
    shard = data.draw(st.integers(0, rule.stored_shards - 1))
    whole = elements(ruler.shard(shard))
    assert elements(ruler.shard(shard, low, high)) == [r for r in whole if low <= r[0] < high]


@given(rulers(), st.data())
def test_which_shards_hold_runs(case, data):
    rule, ruler, numel, rows = case
    some = [e for e, n in enumerate(numel) if n]
    if not some:
        return
    truth = owners(rule, numel, rows)
    runs = []
    for entry in data.draw(st.lists(st.sampled_from(some), min_size=1, max_size=30)):
        start = data.draw(st.integers(0, numel[entry] - 1))
        runs.append((entry, start, data.draw(st.integers(1, numel[entry] - start))))
    query, pieces = ruler.locate(*(ints(c) for c in zip(*runs, strict=True)))
    found = elements(pieces)
    assert [row[:2] for row in found] == [(e, s + x) for e, s, n in runs for x in range(n)]
    assert all(truth[e][x] == (shard, local) for e, x, shard, local in found)
    each = pick(ints(range(len(runs))), query)
    lengths_ = np.zeros(len(runs), int)
    np.add.at(lengths_, each, pieces.count)
    assert lengths_.tolist() == [n for *_, n in runs]
    # pieces are as long as can be: neighbours of one run lie on different shards
    same = (np.diff(each) == 0) & (np.diff(pieces.shard) == 0)
    assert not same.any()


@pytest.mark.parametrize("world", [1, 2, 3, 8, 64])
def test_deepspeed_stages_1_and_2(world):
    """Parameters end to end, padded to a multiple of 2 * dp, cut in dp equal slices."""
    numel = [10, 1, 0, 33, 7]
    flat = np.concatenate([np.full(n, e) for e, n in enumerate(numel)])
    padded = np.concatenate([flat, np.full(-len(flat) % (2 * world), -1)])
    ruler = Contiguous(world, multiple=2).ruler(ints(numel), ints(numel))
    assert ruler.part == len(padded) // world
    for rank, piece in enumerate(np.split(padded, world)):
        found = np.full(ruler.part, -1)
        for entry, _, _, local in elements(ruler.shard(rank)):
            found[local] = entry
        assert found.tolist() == piece.tolist()


@pytest.mark.parametrize("world", [1, 2, 3, 8, 64])
def test_deepspeed_stage_3(world):
    """Each parameter in slices of ceil(N / dp); a rank's slices follow each other."""
    numel = [10, 1, 33, 64, 7]
    ruler = PerTensor(world).ruler(ints(numel), ints(numel))
    assert ruler.part == sum(math.ceil(n / world) for n in numel)
    for rank in range(world):
        base, wanted = 0, []
        for entry, n in enumerate(numel):
            size = math.ceil(n / world)
            wanted += [
                (entry, x, rank, base + x - rank * size)
                for x in range(rank * size, min(n, (rank + 1) * size))
            ]
            base += size
        assert elements(ruler.shard(rank)) == wanted


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("shape", [(5, 3), (8, 2), (1,), (4,), (10, 1, 2), (6, 0)], ids=str)
def test_rows_are_those_of_torch_chunk(shape, world):
    torch = pytest.importorskip("torch")
    numel = math.prod(shape)
    chunks = torch.chunk(torch.arange(numel).reshape(shape), world)
    ruler = Rows(world).ruler(ints([numel]), ints([shape[0]]))
    for rank in range(world):
        wanted = chunks[rank].flatten().tolist() if rank < len(chunks) else []
        assert [x for _, x, *_ in elements(ruler.shard(rank))] == wanted


@given(rulers())
def test_json_and_back(case):
    rule = case[0]
    data = rule.to_json()
    assert data["kind"] in KINDS
    assert partition(data) == rule
    listed = {k: list(v) if isinstance(v, tuple) else v for k, v in data.items()}
    assert partition(listed) == rule


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"kind": "other", "world": 2},
        {"kind": ["rows"], "world": 2},
        {"kind": "rows"},
        {"kind": "rows", "world": 0},
        {"kind": "rows", "world": -1},
        {"kind": "rows", "world": "2"},
        {"kind": "rows", "world": 2.0},
        {"kind": "rows", "world": True},
        {"kind": "rows", "world": None},
        {"kind": "rows", "world": 1 << 40},
        {"kind": "rows", "world": 2, "more": 1},
        {"kind": "contiguous", "world": 2, "align": 0},
        {"kind": "contiguous", "world": 2, "multiple": -2},
        {"kind": "whole", "world": 2},
        {"kind": "whole", "world": 2, "owners": 1},
        {"kind": "whole", "world": 2, "owners": [2]},
        {"kind": "whole", "world": 2, "owners": [-1]},
        {"kind": "explicit", "world": 2, "owners": [0.5]},
        {"kind": "explicit", "world": 2, "owners": None},
    ],
    ids=str,
)
def test_bad_data_is_refused(data):
    with pytest.raises(CorruptError):
        partition(data)


def test_every_entry_needs_an_owner():
    with pytest.raises(AssertionError, match="one owner an entry"):
        Whole(2, (0, 1)).ruler(ints([1]), ints([1]))


def test_partitions_are_values():
    assert PerTensor(4) == PerTensor(4) != PerTensor(5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        PerTensor(4).world = 5  # type: ignore[misc]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50), st.integers(1, 20)), max_size=20),
    st.none() | st.integers(1, 20),
)
def test_cutting_intervals(rows, one_size):
    start, count, sizes = (ints([r[i] for r in rows]) for i in range(3))
    cut = cut_at(start, count, sizes if one_size is None else one_size)
    query = pick(ints(range(len(rows))), cut.query).tolist()
    columns = (cut.multiple, cut.within, cut.moved, cut.count)
    pieces = [(q, *r) for q, *r in zip(query, *(c.tolist() for c in columns), strict=True)]
    wanted = []
    for i, (begin, length, size) in enumerate(rows):
        size = one_size or size
        for x in range(begin, begin + length):
            if x == begin or x % size == 0:
                wanted.append((i, x // size, x % size, x - begin, 0))
            wanted[-1] = (*wanted[-1][:4], wanted[-1][4] + 1)
    assert pieces == wanted


@given(st.lists(st.integers(0, 9)), st.integers(1, 9))
def test_slices_hold_all_rows_once(parts, size):
    filled = ints(np.cumsum(parts)) if parts else ints([])
    found = [range(s.start, s.stop) for s in slices(filled, size)]
    assert [x for r in found for x in r] == list(range(len(parts)))
    for r in found:
        assert sum(parts[r.start + 1 : r.stop]) < size
