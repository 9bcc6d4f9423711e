"""Whatever the layouts of source and target, every element arrives and every byte is accounted for.

Random tensors are cut in two random ways. The oracle writes the source and reads the target
element by element; digests and checksums are taken again from whole arrays and file ranges.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import MEMORY, Arrays, Side

from reshard import coverage, mover, overlap, work
from reshard import execute as execute_module
from reshard import plan as plan_module
from reshard import source as source_module
from reshard.box import Box, Shape
from reshard.digest import CRC32, CRC64NVME
from reshard.dtypes import DType, dtype
from reshard.errors import CorruptError, InconsistentError
from reshard.execute import LEAST_MEMORY, Options, Result, execute
from reshard.layout import Entry, FlatSpace, Layout, TensorKey
from reshard.manifest import Manifest
from reshard.partition import (
    Contiguous,
    Explicit,
    Partition,
    PerTensor,
    Replicated,
    Rows,
    Whole,
)
from reshard.plan import Plan
from reshard.store import Regions

KINDS = (
    "uint8", "bool", "int16", "int64", "float16", "bfloat16", "float32", "float64", "complex64",
    "float8_e4m3fn",
)  # fmt: skip
CASTS = {
    "float32": ("bfloat16", "float16", "float64"),
    "bfloat16": ("float32", "float16"),
    "float16": ("bfloat16", "float32"),
    "float64": ("float32", "bfloat16"),
}
SIZES = (0, 1, 1, 2, 3, 5, 7)
WORLDS = (1, 2, 3, 4, 7, 16, 64)
ALGORITHMS = {a.name: a for a in (CRC64NVME, CRC32)}


@dataclass(frozen=True)
class Family:
    """Tensors whose states lie in the same spaces."""

    shapes: dict[str, Shape]
    states: dict[str, DType]


@dataclass
class Case:
    """A conversion and its truth."""

    source: Side
    target: Side
    given: Arrays
    wanted: Arrays
    origin: dict[TensorKey, TensorKey] = field(default_factory=dict)
    casts: set[TensorKey] = field(default_factory=set)
    proofs: list[tuple[TensorKey, TensorKey]] = field(default_factory=list)
    regions: Regions | None = None

    @property
    def read(self) -> set[TensorKey]:
        """The source tensors that are read."""
        keys = {self.origin.get(k, k) for k in self.wanted}
        return keys | {k for pair in self.proofs for k in pair}


# -- random tensors and layouts -------------------------------------------------------------------


def random_array(rng: random.Random, shape: Shape, kind: DType, *, tame: bool) -> np.ndarray:
    """Any bits at all; ``tame``: numbers that every floating-point type can hold."""
    count = int(np.prod(shape, dtype=int))
    if tame:
        values = np.array([rng.uniform(-200, 200) for _ in range(count)])
        return values.astype(kind.numpy).reshape(shape)
    raw = np.frombuffer(rng.randbytes(count * kind.itemsize), np.uint8)
    if kind.name == "bool":
        raw = raw & 1
    return raw.view(kind.numpy).reshape(shape)


def random_boxes(rng: random.Random, shape: Shape) -> list[Box | None]:
    """Boxes that make up a tensor: the whole, a grid, columns, or the boxes of flat runs."""
    way = rng.choice(["whole", "whole", "grid", "columns", "runs"])
    whole = Box.whole(shape)
    if way == "whole" or not shape:
        return [rng.choice([None, whole])]
    if way == "runs":
        cuts = sorted(rng.randint(0, whole.numel) for _ in range(rng.randint(0, 4)))
        ends = zip([0, *cuts], [*cuts, whole.numel], strict=True)
        return [b for low, high in ends for _, b in whole.split(low, high)] or [None]
    dims = (
        [len(shape) - 1] if way == "columns" else rng.sample(range(len(shape)), min(2, len(shape)))
    )
    boxes = [whole]
    for dim in dims:
        cuts = sorted({0, shape[dim], *(rng.randint(0, shape[dim]) for _ in range(3))})
        boxes = [
            Box(
                (*b.start[:dim], low, *b.start[dim + 1 :]),
                (*b.stop[:dim], high, *b.stop[dim + 1 :]),
            )
            for b in boxes
            for low, high in itertools.pairwise(cuts)
        ]
    if rng.random() < 0.2:  # a rank that has nothing
        boxes.append(Box(shape, shape))
    rng.shuffle(boxes)
    return list(boxes) or [None]


def random_places(rng: random.Random, shape: Shape) -> list[Box | None]:
    """The boxes of a tensor, perhaps several times, perhaps beside a whole copy."""
    boxes = random_boxes(rng, shape)
    copies = rng.choice([1, 1, 1, 2, 3])
    return boxes * copies + [None] * (rng.random() < 0.15)


def random_partition(rng: random.Random, entries: int, most: int) -> Partition:
    world = rng.choice([w for w in WORLDS if w <= most])
    owners = tuple(rng.randrange(world) for _ in range(entries))
    return rng.choice(
        [
            Contiguous(world, rng.choice([1, 1, 4]), rng.choice([1, 2])),
            PerTensor(world),
            Rows(world),
            Replicated(world),
            Whole(world, owners),
            Explicit(world, owners),
        ]
    )


def random_layout(rng: random.Random, families: list[Family], most: int) -> Layout:
    spaces = []
    for f, family in enumerate(families):
        entries: list[list[Entry]] = [[] for _ in range(rng.randint(1, 3))]
        for name, shape in family.shapes.items():
            for box in random_places(rng, shape):
                rng.choice(entries).append(Entry(name, shape, box))
        for i, some in enumerate(entries):
            coords = {"tensor": i} if rng.random() < 0.5 else {}
            rule = random_partition(rng, len(some), most)
            spaces.append(FlatSpace(f"s{f}.{i}", tuple(some), rule, family.states, coords))
    rng.shuffle(spaces)
    return Layout(tuple(spaces), {"shard": most})


def random_family(rng: random.Random, index: int, *, tame: bool) -> Family:
    shapes = {
        f"t{index}.{i}": tuple(rng.choice(SIZES) for _ in range(rng.randint(0, 4)))
        for i in range(rng.randint(1, 3))
    }
    kinds = tuple(CASTS) if tame else KINDS
    states = rng.sample(["param", "exp_avg", "exp_avg_sq"], rng.randint(1, 2))
    return Family(shapes, {s: dtype(rng.choice(kinds)) for s in states})


# -- a case ---------------------------------------------------------------------------------------


def make_case(rng: random.Random, most: int, *, casts: bool = True) -> Case:
    """Two layouts of the same tensors, some of them cast, renamed, twice there or only proved."""
    given: Arrays = {}
    wanted: Arrays = {}
    case = Case(Side(Layout((), {})), Side(Layout((), {})), given, wanted)
    sources, targets = [], []
    for index in range(rng.randint(1, 3)):
        tame = casts and rng.random() < 0.4
        family = random_family(rng, index, tame=tame)
        sources.append(family)
        for name, shape in family.shapes.items():
            for state, kind in family.states.items():
                given[name, state] = random_array(rng, shape, kind, tame=tame)
        targets.append(_same(rng, case, family, tame=tame))
        if rng.random() < 0.2:  # the same tensors once more, under other names
            targets.append(_same(rng, case, family, tame=tame, prefix="again."))
    if casts and rng.random() < 0.5:
        _add_masters(rng, case, sources, targets)
    case.source.layout = random_layout(rng, sources, most)
    case.target.layout = random_layout(rng, targets, most)
    case.source.lay(rng, strided=rng.random() < 0.4)
    case.target.lay(rng, strided=False)
    return case


def _same(
    rng: random.Random, case: Case, family: Family, *, tame: bool, prefix: str = ""
) -> Family:
    """A source's family as the target has it."""
    if rng.random() < 0.2:
        prefix += "new."
    states = {
        s: dtype(rng.choice(CASTS[k.name])) if tame and rng.random() < 0.6 else k
        for s, k in family.states.items()
    }
    shapes = {prefix + name: shape for name, shape in family.shapes.items()}
    for name in family.shapes:
        for state, kind in states.items():
            key, old = (prefix + name, state), case.given[name, state]
            case.wanted[key] = old.astype(kind.numpy)
            if prefix:
                case.origin[key] = (name, state)
            if kind != family.states[state]:
                case.casts.add(key)
    return Family(shapes, states)


def _add_masters(
    rng: random.Random, case: Case, sources: list[Family], targets: list[Family]
) -> None:
    """Masters, and weights that must be their rounding; the target may lack either."""
    kind = dtype(rng.choice(["bfloat16", "float16", "float32"]))
    shapes = {"m.0": (3, 5), "m.1": (rng.randint(0, 9),)}
    sources.append(Family(shapes, {"master": dtype("float32")}))
    sources.append(Family(shapes, {"param": kind}))
    for name, shape in shapes.items():
        master = random_array(rng, shape, dtype("float32"), tame=True)
        if master.size and kind.name == "float16" and rng.random() < 0.5:
            master.reshape(-1)[0] = 1e6  # overflows in both
        case.given[name, "master"] = master
        with np.errstate(over="ignore"):
            case.given[name, "param"] = master.astype(kind.numpy)
        case.proofs.append(((name, "param"), (name, "master")))
    kept = rng.choice([{"master": "float32"}, {"param": kind.name}, {"master": "bfloat16"}])
    for state, name in kept.items():
        targets.append(Family(shapes, {state: dtype(name)}))
        for tensor in shapes:
            old = case.given[tensor, state]
            case.wanted[tensor, state] = old.astype(dtype(name).numpy)
            if case.wanted[tensor, state].dtype != old.dtype:
                case.casts.add((tensor, state))


def random_regions(rng: random.Random, side: Side, contents: list[bytearray] | None) -> Regions:
    """Byte ranges with checksums; the source's also hold gaps, or end inside of an extent."""
    algorithm = rng.choice(list(ALGORITHMS.values()))
    way = rng.choice(
        ["none", "extents", "extents", "files", "halves"]
        if contents
        else ["none", "extents", "extents"]
    )
    ranges: list[tuple[int, int, int]] = []
    if way == "extents":
        ranges = [e for e in side.extents if rng.random() < 0.9]
    elif way == "files":
        ranges = [(f, 0, n) for f, n in enumerate(side.sizes)]
    elif way == "halves":
        for file, offset, nbytes in side.extents:
            cut = rng.randint(0, nbytes)
            ranges += [(file, offset, cut), (file, offset + cut, nbytes - cut)]
    rows = []
    for i, (file, offset, nbytes) in enumerate(ranges):
        value = None
        if contents is not None:
            value = algorithm.of(bytes(contents[file][offset : offset + nbytes]))
        rows.append((file, offset, nbytes, value, f"region {i}"))
    return Regions.of(algorithm.name, rows)


def run(rng: random.Random, case: Case, folder: Path, source: Manifest, **how: Any) -> Result:
    """Plan and execute, in a random way."""
    target = case.target.manifest(folder / "target", random_regions(rng, case.target, None), {})
    plan = Plan(source, target, origin=case.origin, casts=case.casts, proofs=case.proofs)
    moved: list[int] = []
    options = Options(
        workers=rng.randint(1, 4),
        max_memory=rng.choice([LEAST_MEMORY, 64 << 20]),
        read=rng.choice(["map", "read"]),
        sync=False,
        progress=moved.append,
        **how,
    )
    (folder / "target").mkdir()
    result = execute(plan, folder / "target", options)
    assert sum(moved) == result.nbytes
    contents = case.target.check(folder / "target", case.wanted)
    rows = zip(
        *(c.tolist() for c in (target.regions.files, target.regions.offsets, target.regions.sizes)),
        result.regions.tolist(),
        strict=True,
    )
    for file, offset, nbytes, value in rows:
        crc = ALGORITHMS[target.regions.algorithm].of(contents[file][offset : offset + nbytes])
        assert value == crc
    return result


def prepare(rng: random.Random, case: Case, folder: Path) -> tuple[Manifest, list[bytearray]]:
    """Write the source; its manifest knows some regions and digests."""
    contents = case.source.write(folder / "source", case.given, rng)
    digests = {k: crc(a) for k, a in case.given.items() if rng.random() < 0.5}
    regions = random_regions(rng, case.source, contents)
    return case.source.manifest(folder / "source", regions, digests), contents


def crc(array: np.ndarray) -> int:
    return CRC64NVME.of(np.ascontiguousarray(array).tobytes())


@contextmanager
def cramped(rng: random.Random) -> Iterator[None]:
    """Everything that bounds memory or is done in portions, so small that it matters here."""
    step = rng.choice([16, 24, 64])
    with ExitStack() as stack:
        for where, what, value in (
            (execute_module, "OPEN_FILES", rng.choice([1, 4])),
            (work, "SHARE", rng.choice([16, 40, 1000])),
            (plan_module, "ROWS", rng.choice([1, 3, 10])),
            (overlap, "ROWS", rng.choice([1, 3, 10])),
            (overlap, "FEW_PLACES", 1),
            (mover, "PARTS", 2),
            (coverage, "PAIRS", 3),
            (source_module, "OPEN_FILES", 2),
            (Options, "step", step),
        ):
            stack.enter_context(mock.patch.object(where, what, value))
        yield


seeds = st.integers(0, 2**32 - 1)
worlds = st.sampled_from([1, 4, 64])


@given(seeds, worlds, st.booleans())
def test_every_element_arrives(seed, most, small):
    rng = random.Random(seed)
    case = make_case(rng, most)
    with tempfile.TemporaryDirectory(dir=MEMORY) as name, cramped(rng) if small else nullcontext():
        source, _ = prepare(rng, case, Path(name))
        result = run(rng, case, Path(name), source)
    assert dict(result.digests) == {k: crc(a) for k, a in case.wanted.items()}


@given(seeds, worlds)
def test_a_flipped_byte_is_found(seed, most):
    """Anywhere in a region that is read from, padding and gaps included."""
    rng = random.Random(seed)
    case = make_case(rng, most, casts=False)
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        folder = Path(name)
        source, contents = prepare(rng, case, folder)
        regions = source.regions
        read = {
            place
            for space in source.layout.spaces
            for state in space.states
            for i, entry in enumerate(space.entries)
            if (entry.name, state) in case.read
            for place in case.source.places[space.name, state, i]
        }
        columns = (regions.files, regions.offsets, regions.sizes)
        rows = list(zip(*(c.tolist() for c in columns), strict=True))
        some = [
            r for r, (f, o, n) in enumerate(rows) if any((f, b) in read for b in range(o, o + n))
        ]
        if not some:
            return
        region = rng.choice(some)
        file, offset, nbytes = rows[region]
        contents[file][offset + rng.randrange(nbytes)] ^= 1 << rng.randrange(8)
        source.path(file).write_bytes(contents[file])
        with pytest.raises(
            CorruptError, match=f"{regions.labels[region]} has the checksum"
        ) as error:
            run(rng, case, folder, source)
        assert error.value.where == str(source.path(file))


@given(seeds)
def test_without_verification_only_the_digests_notice(seed):
    rng = random.Random(seed)
    case = make_case(rng, 4)
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        source, _ = prepare(rng, case, Path(name))
        if source.regions.values is not None:
            wrong = replace(source.regions, values=source.regions.values ^ np.uint64(1))
            source = replace(source, regions=wrong)
        result = run(rng, case, Path(name), source, verify=False)
    assert result.regions_checked == 0


@given(seeds)
def test_replicas_that_differ_are_refused(seed):
    rng = random.Random(seed)
    case = make_case(rng, 4)
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        folder = Path(name)
        contents = case.source.write(folder / "source", case.given, rng)
        source = case.source.manifest(folder / "source", Regions.of("crc32", []), {})
        several = [
            (space.name, state, i)
            for space in source.layout.spaces
            for state in space.states
            for i, e in enumerate(space.entries)
            if e.numel and (e.name, state) in case.read
            and sum(
                other.region == e.region
                for another in source.layout.spaces if state in another.states
                for other in another.entries if other.name == e.name
            ) > 1
        ]  # fmt: skip
        if not several:
            return
        key = rng.choice(several)
        file, byte = rng.choice(case.source.places[key])
        contents[file][byte] ^= 1
        source.path(file).write_bytes(contents[file])
        with pytest.raises(InconsistentError, match=r"its copies differ|rounded to its type"):
            run(rng, case, folder, source)


@given(seeds)
def test_a_recorded_digest_must_fit(seed):
    rng = random.Random(seed)
    case = make_case(rng, 4)
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        folder = Path(name)
        source, _ = prepare(rng, case, folder)
        name, state = rng.choice(sorted(case.read))
        wrong = {(name, state): crc(case.given[name, state]) ^ 1}
        source = replace(source, digests=wrong)
        with pytest.raises(CorruptError, match=f"{state}:{name} has the digest"):
            run(rng, case, folder, source)
