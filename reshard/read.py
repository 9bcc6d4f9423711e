"""How is a region of one tensor read, and nothing but its bytes?

The region is met with each place that holds the tensor. What they have in common is found in the
place's shards as runs (or, where an entry has an extent of its own, as a strided view) and copied
into the result.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.box import Box, Shape, strides_of
from reshard.coverage import replicas
from reshard.manifest import Manifest, Tensor
from reshard.ruler import Ints, ints
from reshard.source import Fetcher, Mapped, Read, SourceFiles, way_to_read
from reshard.store import EntryStore, ShardStore


class Reader:
    """Reads regions of a checkpoint's tensors.

    Parameters
    ----------
    manifest
        The checkpoint.

    Attributes
    ----------
    nbytes_read
        Bytes of payload that were read so far.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.nbytes_read = 0
        self._manifest = manifest
        self._files = SourceFiles(manifest)
        self._mapped = way_to_read(manifest.root) == "map"

    def region(self, tensor: Tensor, box: Box) -> NDArray[Any]:
        """The elements of a region.

        Parameters
        ----------
        tensor
            One of the manifest's.
        box
            Inside of it.

        Returns
        -------
        ndarray
            Of the box's shape, a copy.
        """
        out = np.empty(box.shape, tensor.dtype.numpy)
        if not out.size:
            return out
        covers = replicas(self._manifest, tensor)
        for (space, entry), cover in zip(tensor.places, covers, strict=True):
            if cover:
                continue
            held = self._manifest.space(space).entries[entry].region
            common = box.intersect(held)
            if common is not None:
                where = tuple(
                    slice(a - o, b - o)
                    for a, b, o in zip(common.start, common.stop, box.start, strict=True)
                )
                out[where] = self._common(tensor, space, entry, held, common)
        return out

    def _common(
        self, tensor: Tensor, space: int, entry: int, held: Box, common: Box
    ) -> NDArray[Any]:
        store = self._manifest.stores[self._manifest.space(space).name, tensor.state]
        if isinstance(store, EntryStore):
            return self._of_entry(tensor, store, entry, held, common)
        return self._of_shards(tensor, space, store, entry, held, common)

    def _of_entry(
        self, tensor: Tensor, store: EntryStore, entry: int, held: Box, common: Box
    ) -> NDArray[Any]:
        width = tensor.dtype.itemsize
        strides = store.strides_of(entry) or strides_of(held.shape)
        first = sum((a - o) * s for a, o, s in zip(common.start, held.start, strides, strict=True))
        reach = sum((n - 1) * s for n, s in zip(common.shape, strides, strict=True)) + 1
        offset = int(store.offsets[entry]) + first * width
        data = self._fetch(int(store.files[entry]), offset, reach * width)
        steps = tuple(s * width for s in strides)
        view: NDArray[Any] = np.ndarray(common.shape, tensor.dtype.numpy, data, 0, steps)
        return view

    def _of_shards(
        self, tensor: Tensor, space: int, store: ShardStore, entry: int, held: Box, common: Box
    ) -> NDArray[Any]:
        width = tensor.dtype.itemsize
        starts, run = rows(common, held)
        count = np.full(len(starts), run, np.int64)
        index = np.full(len(starts), entry, np.int64)
        _, found = self._manifest.space(space).ruler.locate(index, starts, count)
        cut = store.split(found)
        offsets = store.offsets[cut.multiple] + cut.within * width
        packed = np.empty(common.numel * width, np.uint8)
        columns = (store.files[cut.multiple], offsets, cut.count * width)
        at = 0
        for file, offset, nbytes in zip(*(c.tolist() for c in columns), strict=True):
            packed[at : at + nbytes] = np.frombuffer(self._fetch(file, offset, nbytes), np.uint8)
            at += nbytes
        return packed.view(tensor.dtype.numpy).reshape(common.shape)

    def _fetch(self, file: int, offset: int, nbytes: int) -> memoryview:
        self.nbytes_read += nbytes
        fetcher: Fetcher = Mapped(self._files) if self._mapped else Read(self._files, nbytes)
        return fetcher.fetch(file, offset, nbytes)


def rows(common: Box, held: Box) -> tuple[Ints, int]:
    """The runs that a region makes of the box that holds it.

    Returns
    -------
    starts, run
        Row-major element of the holding box at which each run begins, in the order of the
        region, and the length that all of them have.
    """
    shape, strides = held.shape, strides_of(held.shape)
    dim = len(shape)
    while dim and common.shape[dim:] == shape[dim:]:
        dim -= 1
    first = sum((a - o) * s for a, o, s in zip(common.start, held.start, strides, strict=True))
    starts = ints([first])
    for d in range(dim):
        steps = np.arange(common.shape[d], dtype=np.int64) * strides[d]
        starts = (starts[:, None] + steps).ravel()
    return starts, math.prod(common.shape[dim:])


def box_of(index: Any, shape: Shape) -> tuple[Box, tuple[Any, ...]]:
    """The smallest box that a numpy index of integers and slices reads, and the index inside it.

    Raises
    ------
    IndexError
        If the index is out of range, or of a kind that isn't supported.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    if items.count(Ellipsis) > 1:
        raise IndexError("an index can have one ellipsis")
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (len(shape) - len(items) + 1)
    items += [slice(None)] * (len(shape) - len(items))
    if len(items) > len(shape):
        raise IndexError(f"{len(items)} indices for {len(shape)} dim(s)")
    start: list[int] = []
    stop: list[int] = []
    inner: list[slice | int] = []
    for item, size in zip(items, shape, strict=True):
        if isinstance(item, slice):
            span = range(size)[item]
            low, high = (min(span[0], span[-1]), max(span[0], span[-1]) + 1) if span else (0, 0)
            start.append(low)
            stop.append(high)
            step = slice(None) if span.step == 1 else slice(None, None, span.step)
            inner.append(step)
        else:
            position = range(size)[item.__index__()]
            start.append(position)
            stop.append(position + 1)
            inner.append(0)
    return Box(tuple(start), tuple(stop)), tuple(inner)
