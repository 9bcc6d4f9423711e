"""A checkpoint written and read in the plainest way: element by element, and only with numpy.

Where an element lies is said here a second time, out of the documents and without the library's
arithmetic: :func:`owners` walks over the elements of a space, and :class:`Side` keeps, for each
element, its file and its byte.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from reshard.box import Box
from reshard.dtypes import DType
from reshard.layout import FlatSpace, Layout, TensorKey
from reshard.manifest import NO_REGIONS, Manifest
from reshard.partition import Contiguous, Partition, PerTensor, Replicated, Rows, Whole
from reshard.ruler import ints
from reshard.store import EntryStore, File, Regions, ShardStore, Store

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where random cases are written: many small files for a moment."""

Arrays = dict[TensorKey, np.ndarray]
Owner = tuple[int, int]  # shard, element of the shard


def owners(partition: Partition, numel: Sequence[int], rows: Sequence[int]) -> list[list[Owner]]:
    """Where each element of each entry lies, walking over them one by one."""
    world = partition.world
    found: list[list[Owner]] = []
    if isinstance(partition, Contiguous):
        at, line = 0, []
        for n in numel:
            while at % partition.align:
                at += 1
            line.append([at + x for x in range(n)])
            at += n
        while at % (world * partition.multiple):
            at += 1
        part = max(1, at // world)
        return [[(x // part, x % part) for x in entry] for entry in line]
    if isinstance(partition, (PerTensor, Rows)):
        base = 0
        for n, r in zip(numel, rows, strict=True):
            if isinstance(partition, PerTensor):
                size = -(-n // world)
            else:
                size = -(-r // world) * (n // r if r else 0)  # torch.chunk: ceil(rows / P) rows
            found.append([(x // size, base + x % size) for x in range(n)])
            base += size
        return found
    if isinstance(partition, Replicated):
        base = 0
        for n in numel:
            found.append([(0, base + x) for x in range(n)])
            base += n
        return found
    assert isinstance(partition, Whole)  # and Explicit
    filled = [0] * world
    for n, owner in zip(numel, partition.owners, strict=True):
        found.append([(owner, filled[owner] + x) for x in range(n)])
        filled[owner] += n
    return found


def owners_of(space: FlatSpace) -> list[list[Owner]]:
    """Where each element of a space's entries lies."""
    numel = [e.numel for e in space.entries]
    rows = [e.local_shape[0] if e.local_shape else 1 for e in space.entries]
    return owners(space.partition, numel, rows)


def longest(space: FlatSpace) -> int:
    """Elements of the longest shard, without padding at its end."""
    return max((local + 1 for entry in owners_of(space) for _, local in entry), default=1)


@dataclass
class Side:
    """One checkpoint: its files as arrays of bytes, and where each element of each box lies."""

    layout: Layout
    sizes: list[int] = field(default_factory=list)
    stores: dict[tuple[str, str], Store] = field(default_factory=dict)
    extents: list[tuple[int, int, int]] = field(default_factory=list)  # file, first byte, bytes
    places: dict[tuple[str, str, int], list[tuple[int, int]]] = field(default_factory=dict)

    # -- laying out ---------------------------------------------------------------------------

    def extent(self, rng: random.Random, nbytes: int) -> tuple[int, int]:
        """Take bytes of a new file or at the end of an old one, after a header or a gap."""
        if not self.sizes or rng.random() < (0.4 if len(self.sizes) < 16 else 0.02):
            self.sizes.append(0)
            file = len(self.sizes) - 1
        else:
            file = rng.randrange(len(self.sizes))
        offset = self.sizes[file] + rng.choice([0, 0, 1, 7, 64])
        self.sizes[file] = offset + nbytes + rng.choice([0, 0, 3])
        self.extents.append((file, offset, nbytes))
        return file, offset

    def lay(self, rng: random.Random, *, strided: bool) -> None:
        """Choose a store for each state of each space."""
        for space in self.layout.spaces:
            for state, dtype in space.states.items():
                if rng.random() < 0.5:
                    self._lay_shards(rng, space, state, dtype)
                else:
                    self._lay_entries(rng, space, state, dtype, strided)

    def lay_plainly(self) -> Side:
        """One file a shard, nothing before or between the elements."""
        for space in self.layout.spaces:
            for state, dtype in space.states.items():
                part = longest(space)
                first = len(self.sizes)
                self.sizes += [part * dtype.itemsize] * space.shards
                files = range(first, len(self.sizes))
                self.extents += [(f, 0, self.sizes[f]) for f in files]
                self.stores[space.name, state] = ShardStore.per_shard(
                    part, list(files), [0] * space.shards
                )
                for index, entry in enumerate(owners_of(space)):
                    self.places[space.name, state, index] = [
                        (first + shard, local * dtype.itemsize) for shard, local in entry
                    ]
        return self

    def _lay_shards(self, rng: random.Random, space: FlatSpace, state: str, dtype: DType) -> None:
        part = longest(space) + rng.choice([0, 0, 5])
        each = rng.choice([1, 1, 2, 3])
        chunk = -(-part // each)
        part = chunk * each
        chunks = [self.extent(rng, chunk * dtype.itemsize) for _ in range(space.shards * each)]
        self.stores[space.name, state] = ShardStore(
            part, chunk, ints([f for f, _ in chunks]), ints([o for _, o in chunks])
        )
        for index, entry in enumerate(owners_of(space)):
            found = []
            for shard, local in entry:
                file, offset = chunks[shard * each + local // chunk]
                found.append((file, offset + local % chunk * dtype.itemsize))
            self.places[space.name, state, index] = found

    def _lay_entries(
        self, rng: random.Random, space: FlatSpace, state: str, dtype: DType, strided: bool
    ) -> None:
        files, offsets, strides = [], [], []
        for index, entry in enumerate(space.entries):
            shape = entry.local_shape
            order = list(range(len(shape)))
            gap = 1
            if strided and rng.random() < 0.5:
                rng.shuffle(order)
                gap = rng.choice([1, 1, 2])
            steps, step = [0] * len(shape), 1
            for dim in reversed(order):
                steps[dim] = step
                step *= max(1, shape[dim]) * gap
            index_of = list(np.ndindex(*shape))
            ends = [sum(i * s for i, s in zip(x, steps, strict=True)) for x in index_of]
            width = dtype.itemsize
            file, offset = self.extent(rng, (max(ends) + 1) * width if ends else 0)
            files.append(file)
            offsets.append(offset)
            strides.append(tuple(steps) if strided and entry.numel else None)
            self.places[space.name, state, index] = [(file, offset + e * width) for e in ends]
        self.stores[space.name, state] = EntryStore(
            ints(files), ints(offsets), tuple(strides) if strided else None
        )

    def manifest(
        self,
        root: Path,
        regions: Regions = NO_REGIONS,
        digests: Mapping[TensorKey, int] | None = None,
    ) -> Manifest:
        """The manifest of what was laid out."""
        files = tuple(File(f"f/{i}.bin", n) for i, n in enumerate(self.sizes))
        return Manifest(
            format="oracle",
            root=root,
            layout=self.layout,
            files=files,
            stores=self.stores,
            digests=digests or {},
            regions=regions,
        )

    # -- writing and reading ------------------------------------------------------------------

    def write(self, root: Path, arrays: Arrays, rng: random.Random) -> list[bytearray]:
        """Write the files; what no element lies in is noise."""
        contents = [bytearray(rng.randbytes(n)) for n in self.sizes]
        for space, state, index, values in self._boxes(arrays):
            width = values.dtype.itemsize
            raw = values.reshape(-1).view(np.uint8).tobytes()
            for x, (file, byte) in enumerate(self.places[space, state, index]):
                contents[file][byte : byte + width] = raw[x * width : (x + 1) * width]
        (root / "f").mkdir(parents=True)
        for i, data in enumerate(contents):
            (root / f"f/{i}.bin").write_bytes(data)
        return contents

    def check(self, root: Path, arrays: Arrays) -> list[bytes]:
        """Compare every element with the truth, and every other byte with zero."""
        contents = [(root / f"f/{i}.bin").read_bytes() for i in range(len(self.sizes))]
        assert [len(c) for c in contents] == self.sizes
        free = [np.ones(n, bool) for n in self.sizes]
        for space, state, index, values in self._boxes(arrays):
            width = values.dtype.itemsize
            raw = values.reshape(-1).view(np.uint8).tobytes()
            for x, (file, byte) in enumerate(self.places[space, state, index]):
                wanted = raw[x * width : (x + 1) * width]
                assert contents[file][byte : byte + width] == wanted, (space, state, index, x)
                free[file][byte : byte + width] = False
        for data, unused in zip(contents, free, strict=True):
            assert not np.frombuffer(data, np.uint8)[unused].any(), "padding isn't zero"
        return contents

    def _boxes(self, arrays: Arrays) -> list[tuple[str, str, int, np.ndarray]]:
        return [
            (space.name, state, i, np.ascontiguousarray(_cut(arrays[e.name, state], e.box)))
            for space in self.layout.spaces
            for state in space.states
            for i, e in enumerate(space.entries)
        ]


def _cut(array: np.ndarray, box: Box | None) -> np.ndarray:
    if box is None:
        return array
    return array[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
