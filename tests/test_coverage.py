"""Every element exactly once, or several times as whole replicas; nothing else is let through."""

from __future__ import annotations

import math
import random
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import Side

from reshard import coverage
from reshard.box import Box
from reshard.coverage import check, replicas
from reshard.dtypes import dtype
from reshard.errors import IncompleteError, InconsistentError
from reshard.layout import Entry, FlatSpace, Layout
from reshard.manifest import Manifest
from reshard.partition import Explicit


def manifest(shape, boxes) -> Manifest:
    """A manifest with one tensor ``w``."""
    entries = tuple(Entry("w", shape, None if b is None else Box(*b)) for b in boxes)
    rule = Explicit(1, (0,) * len(entries))
    space = FlatSpace("s", entries, rule, {"param": dtype("uint8")})
    return Side(Layout((space,), {})).lay_plainly().manifest(Path("/ckpt"))


def covers(shape, boxes) -> list[int]:
    made = manifest(shape, boxes)
    return list(replicas(made, made.tensors["w", "param"]))


A, B = ((0, 0), (2, 3)), ((2, 0), (4, 3))  # the halves of a (4, 3)
LEFT, RIGHT = ((0, 0), (4, 1)), ((0, 1), (4, 3))


@pytest.mark.parametrize(
    ("shape", "boxes", "wanted"),
    [
        ((4, 3), [None], [0]),
        ((4, 3), [((0, 0), (4, 3))], [0]),
        ((4, 3), [A, B], [0, 0]),
        ((4, 3), [B, A], [0, 0]),
        ((4, 3), [LEFT, RIGHT], [0, 0]),
        ((4, 3), [None, ((0, 0), (4, 3)), None], [0, 1, 2]),
        ((4, 3), [A, A, B, B, A, B], [0, 1, 0, 1, 2, 2]),
        ((4, 3), [A, None, B], [1, 0, 1]),
        ((4, 3), [None, A, B, None], [0, 2, 2, 1]),
        ((4, 3), [A, ((4, 0), (4, 3)), B, ((4, 0), (4, 3))], [0, 0, 0, 0]),
        ((), [None], [0]),
        ((), [((), ())], [0]),
        ((), [None, ((), ())], [0, 1]),
        ((0,), [None], [0]),
        ((0,), [((0,), (0,)), ((0,), (0,))], [0, 0]),
        ((0, 4), [((0, 0), (0, 2)), ((0, 2), (0, 4))], [0, 0]),
        ((1,), [((0,), (0,)), ((0,), (1,)), ((1,), (1,))], [0, 0, 0]),
    ],
    ids=str,
)
def test_which_places_are_replicas(shape, boxes, wanted):
    assert covers(shape, boxes) == wanted


def test_a_hole_is_named():
    with pytest.raises(IncompleteError) as error:
        covers((4, 3), [((0, 0), (2, 3)), ((2, 0), (3, 2)), ((3, 0), (4, 3))])
    assert error.value.what == (
        "param:w [4, 3] has a hole at index [2, 2] (element 8): 11 of its 12 elements are there"
    )
    assert error.value.where == "/ckpt"


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((4, 3), [A]),
        ((4, 3), [A, B, A]),  # the second replica is only a half
        ((4, 3), [None, A]),
        ((4, 3), [((0, 0), (0, 3))]),
        ((1,), [((0,), (0,)), ((1,), (1,))]),
    ],
    ids=str,
)
def test_holes(shape, boxes):
    with pytest.raises(IncompleteError, match="has a hole"):
        covers(shape, boxes)


@pytest.mark.parametrize(
    "boxes",
    [
        [A, ((1, 0), (4, 3))],
        [LEFT, A, RIGHT],
        [((0, 0), (3, 2)), ((1, 1), (4, 3))],
        [((0, 0), (4, 2)), ((3, 1), (4, 3))],
    ],
    ids=str,
)
def test_overlaps(boxes):
    with pytest.raises(InconsistentError, match="param:w has overlapping pieces: "):
        covers((4, 3), boxes)


def test_both_overlapping_pieces_are_named():
    with pytest.raises(InconsistentError, match=r"\[0:2, 0:3\] and \[1:4, 0:3\]"):
        covers((4, 3), [A, ((1, 0), (4, 3))])


seeds = st.integers(0, 2**32 - 1)


@given(seeds, st.booleans())
def test_random_boxes_against_counting(seed, small):
    """Boxes made by cutting boxes, then one of them lost, moved, doubled or left alone."""
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 3)))
    boxes = [Box.whole(shape)]
    for _ in range(rng.randint(1, 8)):
        box = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.randrange(len(shape))
        cut = rng.randint(box.start[dim], box.stop[dim])
        for low, high in ((box.start[dim], cut), (cut, box.stop[dim])):
            boxes.append(
                Box(
                    (*box.start[:dim], low, *box.start[dim + 1 :]),
                    (*box.stop[:dim], high, *box.stop[dim + 1 :]),
                )
            )
    rng.shuffle(boxes)
    if rng.random() < 0.5:
        boxes.pop()
    elif rng.random() < 0.5:
        start = tuple(rng.randint(0, n) for n in shape)
        boxes[0] = Box(start, tuple(rng.randint(a, n) for a, n in zip(start, shape, strict=True)))
    counts = np.zeros(shape, int)
    for box in set(boxes):
        counts[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] += 1
    several = len([b for b in boxes if b.numel]) > len({b for b in boxes if b.numel})
    wholes = any(b.covers(shape) for b in boxes)
    if several or wholes or not boxes:
        return
    with mock.patch.object(coverage, "PAIRS", 2 if small else coverage.PAIRS):
        if (counts > 1).any():
            with pytest.raises(InconsistentError):
                covers(shape, [(b.start, b.stop) for b in boxes])
        elif (counts == 0).any():
            hole = [int(i) for i in np.argwhere(counts == 0)[0]]
            with pytest.raises(IncompleteError) as error:
                covers(shape, [(b.start, b.stop) for b in boxes])
            assert f"hole at index {hole} " in error.value.what
            assert f"{int(counts.sum())} of its {math.prod(shape)} elements" in error.value.what
        else:
            assert covers(shape, [(b.start, b.stop) for b in boxes]) == [0] * len(boxes)


def test_check_looks_at_every_tensor():
    check(manifest((4, 3), [A, B]))
    with pytest.raises(IncompleteError):
        check(manifest((4, 3), [A]))


def test_a_tensor_of_two_shapes_or_types_is_refused():
    for other in (Entry("w", (3, 4)), Entry("w", (4, 3))):
        spaces = (
            FlatSpace("a", (Entry("w", (4, 3)),), Explicit(1, (0,)), {"param": dtype("uint8")}),
            FlatSpace("b", (other,), Explicit(1, (0,)), {"param": dtype("int8")}),
        )
        made = Side(Layout(spaces, {})).lay_plainly().manifest(Path("/ckpt"))
        with pytest.raises(InconsistentError, match="in one place and"):
            check(made)


def test_states_of_a_space_are_checked_once(monkeypatch):
    looked_at = []
    monkeypatch.setattr(
        coverage, "replicas", lambda made, t: looked_at.append(t.key) or replicas(made, t)
    )
    entries = tuple(Entry("w", (4, 3), Box(*b)) for b in (A, B))
    names = ["master", "exp_avg", "exp_avg_sq"]
    kinds = {name: dtype("uint8") for name in names}
    space = FlatSpace("s", entries, Explicit(1, (0, 0)), kinds)
    check(Side(Layout((space,), {})).lay_plainly().manifest(Path("/ckpt")))
    assert looked_at == [("w", "master")]


def test_replicas_of_boxes_are_gathered_once(monkeypatch):
    """A hundred replicas: each box is looked at a few times, not once for each of them."""
    looked_at = []
    numel = Box.numel.fget
    assert numel is not None
    monkeypatch.setattr(Box, "numel", property(lambda box: looked_at.append(box) or numel(box)))
    made = manifest((4, 3), [A, B] * 100)
    looked_at.clear()
    assert replicas(made, made.tensors["w", "param"]) == tuple(i // 2 for i in range(200))
    assert len(looked_at) <= 5 * 200
