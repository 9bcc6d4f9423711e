"""What a plan refuses, what it reads, and that it is made a file at a time."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from oracle import Side

from reshard import overlap
from reshard import plan as plan_module
from reshard.box import Box
from reshard.copies import PROOF, Block
from reshard.dtypes import dtype
from reshard.errors import InconsistentError, NotFoundError, RequestError, UnsupportedError
from reshard.layout import Entry, FlatSpace, Layout
from reshard.manifest import Manifest
from reshard.partition import Contiguous, Partition, PerTensor, Replicated
from reshard.plan import Plan
from reshard.ruler import ints
from reshard.store import EntryStore, File, ShardStore


def space(name, entries, states, rule: Partition | None = None) -> FlatSpace:
    kinds = {s: dtype(d) for s, d in states.items()}
    return FlatSpace(name, tuple(entries), rule or Contiguous(1), kinds)


def manifest(*spaces: FlatSpace) -> Manifest:
    return Side(Layout(spaces, {})).lay_plainly().manifest(Path("/ckpt"))


def one(kind="float32", shape=(4, 3), state="param", name="w", box=None) -> Manifest:
    return manifest(space("s", [Entry(name, shape, box)], {state: kind}))


# -- what is refused ------------------------------------------------------------------------------


def test_a_tensor_that_the_source_lacks():
    with pytest.raises(NotFoundError, match="the source has no param:v") as error:
        Plan(one(), one(name="v"))
    assert error.value.where == "/ckpt"


def test_another_shape():
    with pytest.raises(InconsistentError, match=r"\[4, 3\] in the source and \[3, 4\] in the ta"):
        Plan(one(), one(shape=(3, 4)))


def test_another_type_needs_a_cast():
    with pytest.raises(RequestError, match="param:w is float32 in the source and bfloat16 in"):
        Plan(one(), one("bfloat16"))
    Plan(one(), one("bfloat16"), casts={("w", "param")})


@pytest.mark.parametrize(
    ("old", "new"),
    [("int64", "int32"), ("float32", "int32"), ("bool", "float32"), ("complex64", "float32")],
)
def test_only_floats_are_cast(old, new):
    with pytest.raises(RequestError, match=f"can't be cast from {old} to {new}"):
        Plan(one(old), one(new), casts={("w", "param")})


def test_a_proof_of_another_shape():
    source = manifest(
        space("a", [Entry("w", (4, 3))], {"param": "bfloat16"}),
        space("b", [Entry("w", (12,))], {"master": "float32"}),
    )
    with pytest.raises(InconsistentError, match=r"must be the rounding of, is \[12\]"):
        Plan(source, one(), origin={("w", "param"): ("w", "param")}, casts={("w", "param")},
             proofs=[(("w", "param"), ("w", "master"))])  # fmt: skip


def test_a_cut_inside_a_byte():
    """Elements of 4 bits can be copied as long as whole bytes of them are."""

    def side(rule: Partition) -> Manifest:
        only = space("s", [Entry("w", (8,))], {"param": "float4_e2m1fn"}, rule)
        part, files = only.ruler.part, range(only.shards)
        store = ShardStore.per_shard(part, files, [0] * len(files))
        sizes = tuple(File(f"{i}", part // 2) for i in files)
        return Manifest("x", Path("/t"), Layout((only,), {}), sizes, {("s", "param"): store})

    (batch,) = Plan(side(PerTensor(2)), side(PerTensor(4))).batches(3)
    assert (batch.runs.file.tolist(), batch.runs.source.tolist()) == ([1], [1])
    assert (batch.runs.count.tolist(), batch.nbytes) == ([2], 1)
    with pytest.raises(UnsupportedError, match="a cut inside a byte"):
        list(Plan(side(PerTensor(2)), side(PerTensor(8))).batches(3))


# -- what is read ---------------------------------------------------------------------------------


def copies(*replicas: str) -> Manifest:
    """The same tensor in several spaces."""
    return manifest(*(space(name, [Entry("w", (4,))], {"param": "float32"}) for name in replicas))


def files_read(plan: Plan) -> list[set[int]]:
    """The source files that each target file is made of, and that the proofs read, in order."""
    batches = [list(plan.batches(f)) for f in plan.files] + [list(plan.proofs())]
    return [{f for b in some for f in b.runs.file.tolist()} for some in batches]


def test_each_replica_is_made_of_its_own():
    assert files_read(Plan(copies("a", "b"), copies("x", "y"))) == [{0}, {1}, set()]


def test_replicas_that_the_source_lacks_are_made_of_the_first():
    assert files_read(Plan(copies("a"), copies("x", "y"))) == [{0}, {0}, set()]


def test_replicas_that_the_target_lacks_are_read():
    plan = Plan(copies("a", "b", "c"), copies("x"))
    assert files_read(plan) == [{0}, {1, 2}]
    assert plan.copies_of == [("w", "param")] * 2
    assert all(b.target_file == PROOF for b in plan.proofs())


def test_the_first_replica_alone():
    plan = Plan(copies("a", "b", "c"), copies("x", "y"), replicas="first")
    assert files_read(plan) == [{0}, {0}, set()]
    assert plan.copies_of == []


def test_masters_are_not_read_twice_to_prove_weights():
    source = manifest(
        space("a", [Entry("w", (4,))], {"master": "float32"}),
        space("b", [Entry("w", (4,))], {"param": "bfloat16"}),
    )
    proofs = [(("w", "param"), ("w", "master"))]
    masters = one(shape=(4,), state="master")
    assert files_read(Plan(source, masters, proofs=proofs)) == [{0}, {1}]
    weights = one("bfloat16", shape=(4,))
    assert files_read(Plan(source, weights, proofs=proofs)) == [{1}, {0}]
    rounded = one("bfloat16", shape=(4,), state="master")
    cast = {("w", "master")}
    assert files_read(Plan(source, rounded, casts=cast, proofs=proofs)) == [{0}, {1}]
    narrow = one("float16", shape=(4,), state="master")  # another cast than the proof's
    assert files_read(Plan(source, narrow, casts=cast, proofs=proofs)) == [{0}, {0, 1}]


# -- what batches look like -----------------------------------------------------------------------


def test_runs_are_sorted_and_joined_where_a_column_cut_is_undone():
    left, right = Box((0, 0), (4, 1)), Box((0, 1), (4, 3))
    cut = manifest(space("s", [Entry("w", (4, 3), left), Entry("w", (4, 3), right)],
                         {"param": "float32"}))  # fmt: skip
    (batch,) = Plan(cut, one()).batches(0)
    assert batch.runs.target.tolist() == [0, 4, 12, 16, 24, 28, 36, 40]
    assert batch.runs.source.tolist() == [0, 16, 4, 24, 8, 32, 12, 40]
    assert batch.runs.at.tolist() == batch.runs.target.tolist()


def test_the_same_columns_on_both_sides_are_cut_by_intervals(monkeypatch):
    """Tensor-parallel columns at another world size: nothing is searched for."""
    monkeypatch.setattr(overlap.Overlap, "searched", None)

    def side(world: int) -> Manifest:
        boxes = [Box((0, 0), (4, 1)), Box((0, 1), (4, 3))]
        return manifest(*(
            space(f"t{i}", [Entry("w", (4, 3), b)], {"param": "float32"}, PerTensor(world))
            for i, b in enumerate(boxes)
        ))  # fmt: skip

    plan = Plan(side(3), side(2))
    runs = [r for f in plan.files for b in plan.batches(f) for r in b.runs.at.tolist()]
    assert len(runs) == len(set(runs))
    assert sum(int(b.runs.count.sum()) for f in plan.files for b in plan.batches(f)) == 12


def test_a_transposed_tensor_is_a_block():
    source = one()
    store = EntryStore(ints([0]), ints([0]), ((1, 4),))
    strided = Manifest("x", Path("/ckpt"), source.layout, source.files, {("s", "param"): store})
    (batch,) = Plan(strided, one()).batches(0)
    assert batch.blocks == (Block(0, 0, (4, 3), (4, 16), 0, 0, 0, (12, 4)),)
    assert batch.nbytes == 48


def test_gaps_are_what_no_copy_fills():
    rule = Contiguous(2, align=4, multiple=4)  # two tensors of 3 in 2 x 4 elements
    target = manifest(space("s", [Entry("v", (3,)), Entry("w", (3,))], {"param": "float32"}, rule))
    stores = {("s", "param"): ShardStore(6, 6, ints([0, 0]), ints([2, 26]))}
    longer = Manifest("x", Path("/t"), target.layout, (File("f", 50),), stores)
    gaps = [b.gaps for b in Plan(target, longer).batches(0) if len(b.gaps[0])]
    assert [(o.tolist(), n.tolist()) for o, n in gaps] == [([14], [12]), ([38], [12])]


# -- what states share ----------------------------------------------------------------------------


def states(world: int, chunk: int | None = None) -> Manifest:
    """Three states of a space of two tensors, a file a state and shard (or a chunk of one)."""
    names = dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), "float32")
    only = space("s", [Entry("v", (7,)), Entry("w", (4, 3))], names, PerTensor(world))
    each = 1 if chunk is None else -(-only.ruler.part // chunk)
    chunk = chunk or only.ruler.part
    files, stores = [], {}
    for state in names:
        numbers = np.arange(len(files), len(files) + only.shards * each)
        stores["s", state] = ShardStore(chunk * each, chunk, numbers, np.zeros_like(numbers))
        files += [File(f"{state}/{i}", 4 * chunk) for i in range(len(numbers))]
    layout = Layout((only,), {"shard": world})
    return Manifest("x", Path("/ckpt"), layout, tuple(files), stores)


@pytest.mark.parametrize("chunk", [None, 2])
def test_what_states_have_in_common_is_found_once(chunk, monkeypatch):
    """Three files of each chunk, and the source is looked through for the first of them."""
    found = Counter()
    crossing = plan_module.crossing

    def counted(*args):
        found["crossings"] += 1
        return crossing(*args)

    monkeypatch.setattr(plan_module, "crossing", counted)
    plan = Plan(states(3), states(4, chunk))
    copies = {file: list(plan.batches(file)) for file in plan.files}
    assert sorted(copies) == list(range(len(plan.target.files)))
    assert found["crossings"] == len(copies) // 3
    assert sum(b.nbytes for some in copies.values() for b in some) == 3 * 4 * 19


def test_files_of_the_states_of_a_shard_follow_each_other():
    target = states(4)
    paths = [target.files[file].path for file in Plan(states(1), target).files]
    assert paths[:6] == [
        *("master/0", "exp_avg/0", "exp_avg_sq/0"),
        *("master/1", "exp_avg/1", "exp_avg_sq/1"),
    ]


def test_a_file_without_payload_is_worked_off_too():
    target = states(2)
    more = replace(target, files=(File("nothing", 0), *target.files), stores={
        key: replace(store, files=store.files + 1) for key, store in target.stores.items()
    })  # fmt: skip
    plan = Plan(states(1), more)
    assert sorted(plan.files) == list(range(7))
    assert list(plan.batches(0)) == []


def test_states_that_are_stored_otherwise_are_looked_at_on_their_own():
    """One state in smaller chunks, one entry by entry, one in a space of its own."""
    target = states(2)
    names = ("master", "exp_avg", "exp_avg_sq")
    entries = [Entry("v", (7,)), Entry("w", (4, 3))]
    first = space("s", entries, dict.fromkeys(names[:2], "float32"), PerTensor(3))
    second = space("t", entries[::-1], {names[2]: "float32"}, PerTensor(3))
    chunks = np.arange(9)
    source = Manifest(
        "x",
        Path("/ckpt"),
        Layout((first, second), {"shard": 3}),
        tuple(File(str(i), 1000) for i in range(12)),
        {
            ("s", "master"): ShardStore(9, 3, chunks, np.zeros_like(chunks)),
            ("s", "exp_avg"): EntryStore(ints([9, 10]), ints([0, 8])),
            ("t", "exp_avg_sq"): ShardStore(7, 7, ints([11] * 3), ints([0, 28, 56])),
        },
    )
    plan = Plan(source, target)
    frames = [sources.frames for sources in plan.join.sources.values()]
    assert len(set(map(id, frames))) == 3
    read = {0: set(range(9)), 1: {9, 10}, 2: {11}}
    for state, files in read.items():
        batches = [b for f in (2 * state, 2 * state + 1) for b in plan.batches(f)]
        assert {i for b in batches for i in b.runs.file.tolist()} <= files
        assert sum(b.nbytes for b in batches) == 4 * 19


# -- laziness -------------------------------------------------------------------------------------


def large(rule: Partition, tensors: int = 10_000) -> Manifest:
    entries = [Entry(f"layer.{i}.w", (37 + i % 64, 96)) for i in range(tensors)]
    only = space("s", entries, {"master": "float32"}, rule)
    part = only.ruler.part
    files = tuple(File(f"c/{i}", 4 * part) for i in range(only.shards))
    stores = {("s", "master"): ShardStore.per_shard(part, range(len(files)), [0] * len(files))}
    return Manifest("x", Path("/ckpt"), Layout((only,), {"shard": rule.world}), files, stores)


@pytest.mark.parametrize(
    ("before", "after"),
    list(itertools.product([Contiguous, PerTensor], repeat=2)),
    ids=lambda k: k.kind,
)
def test_single_files_of_a_large_plan(before, after):
    """Ten thousand tensors from 1024 ranks to 4096: one rank's copies, and no more than those."""
    source, target = large(before(1024)), large(after(4096))
    plan = Plan(source, target)
    tracemalloc.start()
    for rank in (0, 1, 2047, 4095):
        kept = int(target.layout.spaces[0].ruler.shard(rank).count.sum())
        batches = list(plan.batches(rank))
        assert sum(int(b.runs.count.sum()) for b in batches) == kept
        assert all(len(b.runs) <= overlap.ROWS for b in batches)
        ends = np.concatenate([b.runs.target + 4 * b.runs.count for b in batches])
        starts = np.concatenate([b.runs.target for b in batches])
        assert (starts[1:] >= ends[:-1]).all()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


def test_a_batch_is_bounded_where_one_file_takes_everything():
    source, target = large(PerTensor(1024), tensors=300), large(Replicated(4), tensors=300)
    sizes = [len(b.runs) for b in Plan(source, target).batches(0)]
    assert sum(sizes) > 200_000
    assert max(sizes) <= overlap.ROWS + 1024
    assert len(sizes) < 40


def test_a_batch_is_bounded_where_one_box_has_many_rows():
    shape = (200_000, 2)
    halves = [Box((0, 0), (200_000, 1)), Box((0, 1), (200_000, 2))]
    columns = manifest(space("s", [Entry("w", shape, b) for b in halves], {"param": "uint8"}))
    sizes = [len(b.runs) for b in Plan(columns, columns).batches(0)]
    assert sum(sizes) == 400_000
    assert max(sizes) <= 2 * overlap.ROWS


def test_a_batch_is_bounded_where_boxes_are_searched():
    shape = (50_000, 4)
    halves = [Box((0, 0), (50_000, 2)), Box((0, 2), (50_000, 4))]
    source = manifest(space("s", [Entry("w", shape, b) for b in halves], {"param": "uint8"}))
    sizes = [len(b.runs) for b in Plan(source, one("uint8", shape)).batches(0)]
    assert sum(sizes) >= 100_000
    assert max(sizes) <= 2 * overlap.ROWS
