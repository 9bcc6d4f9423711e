"""Tensors that are cut in slabs are met as intervals: which of them are, and where they are cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from oracle import Side

from reshard.box import Box
from reshard.dtypes import dtype
from reshard.layout import Entry, FlatSpace, Layout
from reshard.manifest import Manifest
from reshard.partition import Contiguous, Explicit, PerTensor
from reshard.plan import Plan
from reshard.ruler import Pieces, ints
from reshard.slabs import APART, Slabs
from reshard.store import EntryStore


def manifest(boxes: dict[str, list[Box | None]], shape=(6, 4), rule=None) -> Manifest:
    entries = tuple(Entry(name, shape, box) for name, some in boxes.items() for box in some)
    space = FlatSpace("s", entries, rule or Contiguous(1), {"param": dtype("float32")})
    return Side(Layout((space,), {})).lay_plainly().manifest(Path("/ckpt"))


def rows(*cuts: int, shape=(6, 4)) -> list[Box | None]:
    ends = zip([0, *cuts], [*cuts, shape[0]], strict=True)
    return [Box((low, *[0] * len(shape[1:])), (high, *shape[1:])) for low, high in ends]


COLUMNS: list[Box | None] = [Box((0, 0), (6, 1)), Box((0, 1), (6, 4))]


def slabs(source: Manifest, target: Manifest) -> Slabs:
    return Slabs(source, Plan(source, target).join.sources[0, "param"])


def whole(*entries: int, numel: int = 24) -> Pieces:
    zero = np.zeros(len(entries), np.int64)
    return Pieces(ints(entries), zero, np.full(len(entries), numel), zero, zero)


def test_a_piece_is_cut_where_slabs_end():
    source = manifest({"a": rows(1, 4), "b": rows(3)})
    found = slabs(source, manifest({"a": [None], "b": [None]}))
    assert found.line.tolist() == [0, 24]
    (portion,) = found.cut(whole(0, 1), 100)
    assert portion.part == (0, "param")
    assert portion.entry.tolist() == [0, 1, 2, 3, 4]
    assert portion.start.tolist() == [0] * 5
    assert portion.count.tolist() == [4, 12, 8, 12, 12]
    assert portion.piece.tolist() == [0, 0, 0, 1, 1]
    assert portion.moved.tolist() == [0, 4, 16, 0, 12]
    assert portion.at.tolist() == [0, 4, 16, 0, 12]


def test_part_of_a_box_that_begins_inside_of_a_tensor():
    target = manifest({"a": rows(2)})  # its second box is rows 2 to 6
    found = slabs(manifest({"a": rows(1, 4)}), target)
    assert found.line.tolist() == [0, 8]
    piece = Pieces(ints([1]), ints([3]), ints([6]), ints([0]), ints([3]))  # elements 11 to 17
    (portion,) = found.cut(piece, 100)
    assert portion.entry.tolist() == [1, 2]
    assert portion.start.tolist() == [7, 0]
    assert portion.count.tolist() == [5, 1]
    assert portion.moved.tolist() == [0, 5]
    assert portion.at.tolist() == [11, 16]


def test_few_pieces_are_made_at_a_time():
    found = slabs(
        manifest({"a": rows(1, 2, 3), "b": rows(1)}), manifest({"a": [None], "b": [None]})
    )
    portions = list(found.cut(whole(0, 1), 3))
    assert [p.entry.tolist() for p in portions] == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("before", "after"), [(COLUMNS, rows(2)), (rows(2), COLUMNS)], ids=["source", "target"]
)
def test_columns_are_not_on_the_line(before, after):
    source = manifest({"a": before, "b": rows(2)})
    found = slabs(source, manifest({"a": after, "b": [None]}))
    assert found.line.tolist() == [APART, APART, 0]


def test_a_box_that_both_have_is_not_looked_for():
    found = slabs(manifest({"a": rows(2)}), manifest({"a": rows(2)}))
    assert found.line.tolist() == [APART, APART]


def test_elements_with_strides_are_not_on_the_line():
    source = manifest({"a": rows(2)}, rule=Explicit(1, (0, 0)))
    store = EntryStore(ints([0, 0]), ints([0, 32]), ((1, 2), None))
    source = replace(source, stores={("s", "param"): store})
    assert slabs(source, manifest({"a": rows(3)})).line.tolist() == [APART, APART]


def test_a_slab_may_be_part_of_a_row():
    boxes: list[Box | None] = [Box((0, 0), (1, 3)), Box((0, 3), (1, 4)), Box((1, 0), (6, 4))]
    found = slabs(manifest({"a": boxes}), manifest({"a": [None]}))
    (portion,) = found.cut(whole(0), 100)
    assert portion.count.tolist() == [3, 1, 20]


def test_tensors_without_elements_are_left_alone():
    source = manifest({"a": [Box((0, 0), (0, 4))], "b": [None]}, shape=(0, 4))
    plan = Plan(source, manifest({"a": [None], "b": [None]}, shape=(0, 4)))
    assert not [b for file in plan.files for b in plan.batches(file) if len(b.runs)]


def test_many_tensors_are_one_batch():
    names = [f"t{i}" for i in range(50)]
    source = manifest({name: rows(1, 2, 4) for name in names}, rule=PerTensor(1))
    plan = Plan(source, manifest({name: [None] for name in names}))
    (batch,) = plan.batches(0)
    assert len(batch.runs) == 50 * 4
    assert int(batch.runs.count.sum()) == 50 * 24
