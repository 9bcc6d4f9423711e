"""Byte ranges with checksums: which of them holds a byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.ruler import Pieces, ints, pick
from reshard.store import EntryStore, Regions, ShardStore


@st.composite
def regions(draw) -> Regions:
    rows = []
    for file in draw(st.lists(st.integers(0, 5), unique=True)):
        at = 0
        for gap, size in draw(
            st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=4)
        ):
            rows.append((file, at + gap, size, size, f"{file}.{at}"))
            at += gap + size
    return Regions.of("crc32", draw(st.permutations(rows)))


def rows_of(some: Regions) -> list[tuple[int, int, int]]:
    columns = (some.files, some.offsets, some.sizes)
    return list(zip(*(c.tolist() for c in columns), strict=True))


@given(regions())
def test_the_region_of_a_byte(some):
    places = [(f, o) for f in range(8) for o in range(25)]
    found = some.find(*(ints(c) for c in zip(*places, strict=True))).tolist()
    for (file, byte), region in zip(places, found, strict=True):
        wanted = [i for i, (f, o, n) in enumerate(rows_of(some)) if f == file and o <= byte < o + n]
        assert [region] == (wanted or [-1])


@given(regions(), st.integers(0, 7), st.integers(0, 20), st.integers(1, 9))
def test_the_regions_that_share_bytes(some, file, low, nbytes):
    found = [i for i in some.overlapping(file, low, low + nbytes) if some.sizes[i]]
    assert found == [
        i
        for i, (f, o, n) in enumerate(rows_of(some))
        if n and f == file and o < low + nbytes and low < o + n
    ]


def test_values_are_kept_with_their_regions():
    some = Regions.of("crc32", [(1, 0, 4, 7, "b"), (0, 8, 4, 6, "a"), (0, 0, 4, 5, "c")])
    assert some.values is not None
    assert some.values.tolist() == [5, 6, 7]
    assert some.labels == ("c", "a", "b")
    assert Regions.of("crc32", [(0, 0, 4, None, "a"), (0, 4, 4, 1, "b")]).values is None


def test_regions_must_not_overlap():
    with pytest.raises(AssertionError, match="overlapping"):
        Regions.of("crc32", [(0, 0, 4, 1, "a"), (0, 3, 4, 1, "b")])


@given(st.integers(1, 4), st.integers(1, 6), st.data())
def test_chunks_of_shards(each, chunk, data):
    store = ShardStore(each * chunk, chunk, ints(range(3 * each)), ints([0] * 3 * each))
    assert store.chunks_per_shard == each
    rows = []
    for shard in range(3):
        local = data.draw(st.integers(0, store.part - 1))
        rows.append((shard, local, data.draw(st.integers(1, store.part - local))))
    shard, local, count = (ints(c) for c in zip(*rows, strict=True))
    cut = store.split(Pieces(shard, local, count, shard, local))
    query = pick(ints(range(3)), cut.query).tolist()
    found = [
        (q, c, w + x)
        for q, c, w, n in zip(
            query, cut.multiple.tolist(), cut.within.tolist(), cut.count.tolist(), strict=True
        )
        for x in range(n)
    ]
    assert found == [
        (i, shard * each + x // chunk, x % chunk)
        for i, (shard, local, count) in enumerate(rows)
        for x in range(local, local + count)
    ]


def test_stores_cannot_be_invalid():
    with pytest.raises(AssertionError):
        ShardStore(5, 2, ints([0]), ints([0]))
    with pytest.raises(AssertionError):
        ShardStore(4, 2, ints([0, 1]), ints([0]))
    with pytest.raises(AssertionError):
        EntryStore(ints([0, 1]), ints([0, 0]), ((1,),))
    assert EntryStore(ints([0]), ints([0])).strides_of(0) is None
    assert ShardStore.per_shard(4, [0, 1], [0, 8]).offsets.dtype == np.int64
