"""Is every element of every tensor there exactly once, and which places are copies of others?

A tensor may lie in several spaces: as boxes that make it up together, or again and again as
replicas. :func:`replicas` sorts its places into covers, each of which holds every element once,
and refuses holes and overlaps. Replicas are told apart so that their bytes can be proved equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from reshard.box import Box, Shape, strides_of
from reshard.errors import IncompleteError, InconsistentError
from reshard.layout import key_text
from reshard.manifest import Manifest, Place, Tensor
from reshard.ruler import Ints, ints, slices

PAIRS = 1 << 20
"""Pairs of boxes that are compared at a time."""


def replicas(manifest: Manifest, tensor: Tensor) -> tuple[int, ...]:
    """Which cover each place of a tensor belongs to.

    Parameters
    ----------
    manifest
        The checkpoint.
    tensor
        One of its tensors.

    Returns
    -------
    tuple of int
        For each of ``tensor.places`` the index of its cover, from 0. Whole copies come first;
        boxes without elements count as part of cover 0.

    Raises
    ------
    IncompleteError
        If a cover has a hole.
    InconsistentError
        If boxes overlap without being the same.
    """
    spaces = manifest.layout.spaces
    found = [spaces[space].entries[entry].box for space, entry in tensor.places]
    if found.count(None) == len(found):
        return tuple(range(len(found)))
    boxes = [Box.whole(tensor.shape) if box is None else box for box in found]
    wholes = sum(b.covers(tensor.shape) for b in boxes)
    next_cover = {Box.whole(tensor.shape): 0}
    covers = []
    together: dict[int, list[Box]] = {}
    for box in boxes:
        cover = 0
        if box.numel:
            cover = next_cover.setdefault(box, wholes)
            next_cover[box] += 1
            together.setdefault(cover, []).append(box)
        covers.append(cover)
    for index in range(wholes, max(covers) + 1):
        _exactly_once(manifest, tensor, together.get(index, []))
    return tuple(covers)


class Replicas:
    """The covers of a checkpoint's tensors, found once for all states that lie in one space.

    Parameters
    ----------
    manifest
        The checkpoint.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._boxes = [[e.box for e in space.entries] for space in manifest.layout.spaces]
        self._known: dict[tuple[Place, ...], tuple[int, ...]] = {}

    def of(self, tensor: Tensor) -> tuple[int, ...]:
        """Which cover each place of a tensor belongs to; see :func:`replicas`."""
        places = tensor.places
        if len(places) == 1 and self._boxes[places[0][0]][places[0][1]] is None:
            return (0,)  # sooner said than looked up
        found = self._known.get(places)
        if found is None:
            found = self._known[places] = replicas(self._manifest, tensor)
        return found

    def places(self, tensor: Tensor) -> tuple[tuple[Place, ...], ...]:
        """The places of each cover of a tensor."""
        covers = self.of(tensor)
        if len(covers) == 1:
            return (tensor.places,)
        found: list[list[Place]] = [[] for _ in range(max(covers) + 1)]
        for place, cover in zip(tensor.places, covers, strict=True):
            found[cover].append(place)
        return tuple(map(tuple, found))


def check(manifest: Manifest) -> None:
    """Prove that every tensor is covered exactly once, replicas aside.

    Raises
    ------
    IncompleteError, InconsistentError
        For the first tensor with a hole or an overlap.
    """
    replicas = Replicas(manifest)
    for tensor in manifest.tensors.values():
        replicas.of(tensor)


def _exactly_once(manifest: Manifest, tensor: Tensor, boxes: list[Box]) -> None:
    if _end_to_end(boxes, tensor.shape):
        return
    clash = _overlap(boxes, len(tensor.shape))
    if clash is not None:
        raise InconsistentError(
            f"{key_text(tensor.key)} has overlapping pieces: {_text(clash[0])} and "
            f"{_text(clash[1])}",
            where=manifest.root,
        )
    covered = sum(b.numel for b in boxes)
    if covered != tensor.numel:
        hole = _hole(boxes, tensor.shape)
        assert hole is not None
        element = sum(i * s for i, s in zip(hole, strides_of(tensor.shape), strict=True))
        raise IncompleteError(
            f"{key_text(tensor.key)} {list(tensor.shape)} has a hole at index {list(hole)} "
            f"(element {element}): {covered} of its {tensor.numel} elements are there",
            where=manifest.root,
            hint="a rank's file or a shard is missing from the checkpoint",
        )


def _end_to_end(boxes: list[Box], shape: Shape) -> bool:
    """Whether boxes are slabs that follow each other from the first element to the last."""
    end = 0
    for box in sorted(boxes, key=lambda box: box.start):
        if not box.contiguous_in(shape) or box.offset_in(shape) != end:
            return False
        end += box.numel
    return end == math.prod(shape)


def _overlap(boxes: list[Box], dims: int) -> tuple[Box, Box] | None:
    """Two boxes that share elements, if there are such."""
    if len(boxes) < 2:
        return None
    low = ints([b.start for b in boxes]).reshape(len(boxes), dims)
    high = ints([b.stop for b in boxes]).reshape(len(boxes), dims)
    # in order of the dim in which they are cut most, few others begin before a box ends
    dim = max(range(dims), key=lambda d: len(set(low[:, d].tolist())))
    order = np.argsort(low[:, dim], kind="stable")
    low, high = low[order], high[order]
    for first, second in _near(low[:, dim], high[:, dim]):
        clash = ((low[first] < high[second]) & (low[second] < high[first])).all(axis=1)
        if clash.any():
            at = int(clash.argmax())
            return boxes[int(order[first[at]])], boxes[int(order[second[at]])]
    return None


def _near(low: Ints, high: Ints) -> Iterator[tuple[Ints, Ints]]:
    """All pairs of sorted intervals that overlap, some at a time: (first, second) indices."""
    row = np.arange(len(low), dtype=np.int64)
    many = np.searchsorted(low, high) - row - 1
    for rows in slices(np.cumsum(many), PAIRS):
        first = np.repeat(row[rows], many[rows])
        ends = np.cumsum(many[rows])
        yield first, first + 1 + np.arange(len(first)) - np.repeat(ends - many[rows], many[rows])


def _hole(boxes: Sequence[Box], shape: Shape, dim: int = 0) -> Shape | None:
    """The first index that no box holds, looking at ``dim`` and the dims after it."""
    if dim == len(shape):
        return None if boxes else ()
    edges = sorted({0, *(b.start[dim] for b in boxes), *(b.stop[dim] for b in boxes)})
    for edge in edges:
        if edge < shape[dim]:
            here = [b for b in boxes if b.start[dim] <= edge < b.stop[dim]]
            rest = _hole(here, shape, dim + 1)
            if rest is not None:
                return (edge, *rest)
    return None


def _text(box: Box) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True)) + "]"
