"""Boxes and runs of them against walking over every index."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.box import Box, strides_of

sizes = st.integers(0, 5)
shapes = st.lists(sizes, max_size=4).map(tuple)


@st.composite
def boxes(draw, shape=None):
    shape = draw(shapes) if shape is None else shape
    pairs = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


def indices(box: Box) -> list[tuple[int, ...]]:
    """Every index of a box, row-major."""
    return [
        tuple(a + i for a, i in zip(box.start, index, strict=True))
        for index in np.ndindex(box.shape)
    ]


@given(shapes)
def test_strides_are_those_of_numpy(shape):
    array = np.empty(tuple(max(1, n) for n in shape), np.int8)
    assert strides_of(array.shape) == array.strides


@given(st.data())
def test_a_run_is_cut_into_boxes_in_order(data):
    box = data.draw(boxes())
    start, stop = sorted(data.draw(st.tuples(st.integers(0, box.numel), st.integers(0, box.numel))))
    found = list(box.split(start, stop))
    elements = [index for _, part in found for index in indices(part)]
    assert elements == indices(box)[start:stop]
    at = start
    for offset, part in found:
        assert offset == at
        at += part.numel
    assert len(found) <= max(1, 2 * len(box.start) - 1)
    assert all(part.contiguous_in(box.shape) for _, part in _moved_to_origin(box, found))


def _moved_to_origin(box: Box, found: list[tuple[int, Box]]) -> list[tuple[int, Box]]:
    return [
        (
            offset,
            Box(
                tuple(a - o for a, o in zip(part.start, box.start, strict=True)),
                tuple(b - o for b, o in zip(part.stop, box.start, strict=True)),
            ),
        )
        for offset, part in found
    ]


@given(st.data())
def test_what_two_boxes_share(data):
    shape = data.draw(shapes)
    first, second = data.draw(boxes(shape)), data.draw(boxes(shape))
    shared = sorted(set(indices(first)) & set(indices(second)))
    found = first.intersect(second)
    assert (indices(found) if found is not None else []) == shared
    assert found == second.intersect(first)


@given(st.data())
def test_contiguous_boxes_and_their_offset(data):
    shape = data.draw(shapes)
    box = data.draw(boxes(shape))
    flat = [int(np.ravel_multi_index(i, shape)) if shape else 0 for i in indices(box)]
    if flat:
        assert box.offset_in(shape) == flat[0]
        assert box.contiguous_in(shape) == (flat == list(range(flat[0], flat[0] + len(flat))))
    assert box.within(shape)
    assert box.covers(shape) == (box == Box.whole(shape))
    assert box.numel == len(flat)


@pytest.mark.parametrize(("start", "stop"), [((0,), (1, 2)), ((2,), (1,)), ((-1,), (1,))], ids=str)
def test_a_box_cannot_be_invalid(start, stop):
    with pytest.raises(AssertionError):
        Box(start, stop)


def test_a_box_of_other_dims_is_not_within():
    assert not Box((0,), (1,)).within((1, 1))
    assert not Box((0, 0), (2, 3)).within((2, 2))
