"""Is each sample read exactly once, and does each rank have random numbers of its own, whatever
the ranks that resume?"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard.engine import random_state
from reshard.engine.data import Position, Samples, mix, permuted, seed_of
from reshard.errors import CorruptError, RequestError

phases = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=4
)
"""(ranks, samples of a micro-batch, micro-batches of each rank)"""


@given(st.integers(1, 40), st.integers(0, 1 << 40), st.booleans(), phases)
def test_every_sample_once_an_epoch_across_resumes(
    count: int, seed: int, shuffle: bool, phases: list[tuple[int, int, int]]
) -> None:
    position = Position(0, count, seed, shuffle)
    stream: dict[int, int] = {}
    for world, size, taken in phases:
        ranks = [Samples(count, size, rank=r, world=world) for r in range(world)]
        for rank, samples in enumerate(ranks):
            samples.resume(position)
            for j in range(taken):
                begin = position.read + (j * world + rank) * size
                for at, sample in enumerate(samples.take().tolist(), begin):
                    assert at not in stream
                    stream[at] = sample
        assert len({s.position for s in ranks}) == 1
        position = Position.from_plain(ranks[0].position.to_plain())
    assert sorted(stream) == list(range(position.read))
    for epoch in range(position.read // count):
        here = [stream[at] for at in range(epoch * count, (epoch + 1) * count)]
        assert sorted(here) == list(range(count))
        assert shuffle or here == list(range(count))


@given(st.integers(1, 5000), st.integers(0, 1 << 62))
def test_a_permutation_takes_each_index_once(count: int, key: int) -> None:
    found = permuted(np.arange(count), count, key)
    assert np.array_equal(np.sort(found), np.arange(count))


def test_permutations_differ_and_look_random() -> None:
    """Neighbours are far apart, and about one element stays where it was."""
    count = 10007
    apart = [permuted(np.arange(count), count, key) for key in range(20)]
    fixed = np.mean([(p == np.arange(count)).sum() for p in apart])
    assert 0.2 < fixed < 3
    for p in apart:
        assert abs(np.corrcoef(p[1:], p[:-1])[0, 1]) < 0.05
        assert abs(np.corrcoef(p, np.arange(count))[0, 1]) < 0.05
    assert len({p.tobytes() for p in apart}) == 20


def test_the_streams_mean_the_same_for_ever() -> None:
    """A checkpoint's position is worth nothing if these numbers change."""
    assert seed_of(1, 2, 3) == 5819642974144035115
    assert permuted(np.arange(8), 8, 5).tolist() == [2, 6, 0, 5, 7, 3, 1, 4]
    # the reference sequence of SplitMix64 with the seed 0
    golden = (np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    assert [hex(v) for v in mix(golden).tolist()] == [
        "0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f",
    ]  # fmt: skip


def test_seeds_are_distinct() -> None:
    seeds = {seed_of(s, t, r) for s in range(10) for t in range(20) for r in range(50)}
    assert len(seeds) == 10 * 20 * 50
    assert all(0 <= s < 1 << 63 for s in seeds)
    assert seed_of(1, 2) != seed_of(2, 1)


def test_positions_of_other_data_are_refused() -> None:
    samples = Samples(10, 2)
    with pytest.raises(RequestError, match="10"):
        samples.resume(Position(4, 11))
    with pytest.raises(CorruptError):
        Position.from_plain({"read": 1, "count": True, "seed": 0, "shuffle": True})
    with pytest.raises(RequestError):
        Samples(10, 2, rank=2, world=2)


def draws() -> list[float]:
    return [torch.rand(1).item(), random.random(), float(np.random.rand())]


def test_generators_go_on_where_they_stood() -> None:
    before = random_state.capture()
    try:
        random_state.begin(1, 2, 3)
        draws()
        kept = random_state.parse(random_state.capture())
        after = draws()
        draws()
        random_state.put(kept)
        assert draws() == after
    finally:
        random_state.put(random_state.parse(before))


def test_streams_of_ranks_are_distinct_and_repeatable() -> None:
    before = random_state.capture()
    try:
        found = []
        for rank in (0, 1, 2, 0):
            random_state.begin(7, 100, rank)
            found.append(tuple(draws()))
        assert found[0] == found[3]
        for place in range(3):
            assert len({f[place] for f in found[:3]}) == 3
    finally:
        random_state.put(random_state.parse(before))


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"python": 1}', b'{"torch": {"$array": 1}}'])
def test_a_damaged_random_state_is_an_error(data: bytes) -> None:
    with pytest.raises(CorruptError):
        random_state.parse(data)
