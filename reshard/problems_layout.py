"""What is wrong with the layout in a document: its mesh, tensors and spaces?

Each check answers with what is known then, ``None`` for what is wrong, so that later checks can
refer to it and one mistake isn't reported twice.
"""

from __future__ import annotations

import math
import re
from dataclasses import MISSING, dataclass, fields
from typing import Any, NamedTuple

from reshard.array_path import LONGEST, SPACE_NAME
from reshard.checks import Checks, encodable
from reshard.dtypes import BY_NAME, DType
from reshard.layout import AXES
from reshard.partition import KINDS, Partition, partition
from reshard.plain import MOST_DIMS, pointer, shown

LARGEST_AXIS = 1 << 24
"""Size of the largest axis of a mesh."""

TOO_MANY = 1 << 63
"""Neither elements nor bytes are counted so far: they are 64-bit integers."""

LARGEST_STEP = 1 << 31
"""Elements of the largest alignment."""

_INDEX = re.compile(r"0|[1-9][0-9]{0,17}")
_WHOLE_BYTES = {d.name: d for d in BY_NAME.values() if d.bits % 8 == 0}


class Row(NamedTuple):
    """A row of the table of tensors."""

    name: str
    shape: tuple[int, ...]
    numel: int


@dataclass(slots=True)
class Space:
    """What is known of a space; ``None`` for what is wrong."""

    place: str
    name: str | None
    states: dict[str, DType] | None
    rows: list[Row | None] | None
    partition: Partition | None = None
    sizes: tuple[list[int], list[int]] | None = None
    """Elements and rows of dim 0 of each entry."""


class LayoutChecks(Checks):
    """Checks of the keys ``mesh``, ``tensors`` and ``spaces``."""

    mesh: dict[str, int] | None = None
    rows: list[Row | None] | None = None
    names: set[str] | None = None
    groups: int | None = None

    def sizes_of_axes(self, value: object) -> dict[str, int] | None:
        """The key ``mesh``: axis to size."""
        mesh: dict[str, int] = {}
        for axis, size in self.mapping(value, "/mesh").items():
            place = f"/mesh/{pointer(axis)}"
            if axis not in AXES:
                self.add(place, f"is no axis; expected {', '.join(AXES)}")
                continue
            number = self.integer(size, place, 1, LARGEST_AXIS + 1)
            if number is not None:
                mesh[axis] = number
        return mesh if isinstance(value, dict) and len(mesh) == len(value) else None

    # -- tensors --------------------------------------------------------------------------------

    def table(self, value: object) -> list[Row | None] | None:
        """The key ``tensors``: its rows, ``None`` for a bad one."""
        data = self.record(value, "/tensors", ("names", "shapes"))
        names = self.sequence(data["names"], "/tensors/names") if "names" in data else None
        shapes = self.sequence(data["shapes"], "/tensors/shapes") if "shapes" in data else None
        if names is not None and shapes is not None and len(names) != len(shapes):
            text = f"has {len(shapes)} shapes; there are {len(names)} names"
            self.add("/tensors/shapes", text)
        good = self.texts(names or (), "/tensors/names")
        if names is not None and None not in good:
            self.names = {name for name in good if name is not None}
        sizes = [self.shape(s, f"/tensors/shapes/{i}") for i, s in enumerate(shapes or ())]
        if names is None or shapes is None:
            return None
        rows: list[Row | None] = [
            None if name is None or size is None else Row(name, *size)
            for name, size in zip(good, sizes, strict=False)
        ]
        first: dict[Row, int] = {}
        for i, row in enumerate(rows):
            if row is not None and first.setdefault(row, i) != i:
                text = f"is {shown(row.name)} again, of the same shape as row {first[row]}"
                self.add(f"/tensors/names/{i}", text)
        return rows

    def shape(self, value: object, place: str) -> tuple[tuple[int, ...], int] | None:
        """A shape, and the number of its elements."""
        sizes = self.sequence(value, place)
        if sizes is None:
            return None
        if len(sizes) > MOST_DIMS:
            self.add(place, f"has {len(sizes)} dims; expected at most {MOST_DIMS}")
            return None
        if not _are_sizes(sizes):
            for i, size in enumerate(sizes):
                self.integer(size, f"{place}/{i}", 0, TOO_MANY)
            return None
        if math.prod([n or 1 for n in sizes]) >= TOO_MANY:
            self.add(place, f"is {sizes}, which is 2^63 elements or more; expected fewer")
            return None
        return tuple(sizes), math.prod(sizes)

    # -- spaces ---------------------------------------------------------------------------------

    def all_spaces(self, value: object) -> list[Space] | None:
        """The key ``spaces``."""
        spaces = self.sequence(value, "/spaces")
        if spaces is None:
            return None
        found = [self.space(space, f"/spaces/{i}") for i, space in enumerate(spaces)]
        seen: dict[str, int] = {}
        for i, space in enumerate(found):
            if space.name is not None and seen.setdefault(space.name, i) != i:
                text = f"is {shown(space.name)}, as that of space {seen[space.name]}"
                self.add(f"/spaces/{i}/name", f"{text}; expected names that differ")
        self.unused(found)
        return found

    def unused(self, spaces: list[Space]) -> None:
        """Rows that no space refers to."""
        if self.rows is None or any(s.rows is None or None in s.rows for s in spaces):
            return
        used = {row for space in spaces for row in space.rows or ()}
        for i, row in enumerate(self.rows):
            if row is not None and row not in used:
                self.add(f"/tensors/names/{i}", f"is {shown(row.name)}, which no space holds")

    def space(self, value: object, place: str) -> Space:
        """One space."""
        keys = ("name", "partition", "states", "entries")
        data = self.record(value, place, keys, ("boxes", "coords", "group", "shards"))
        space = Space(place, None, None, None)
        if "name" in data:
            name = data["name"]
            if isinstance(name, str) and SPACE_NAME.fullmatch(name) and len(name) <= LONGEST:
                space.name = name
            else:
                self.wrong(f"{place}/name", name, f"a name like {SPACE_NAME.pattern}")
        if "states" in data:
            space.states = self.states(data["states"], f"{place}/states")
        if "entries" in data:
            space.rows = self.entries(data["entries"], f"{place}/entries")
        boxes = self.boxes(data.get("boxes", {}), f"{place}/boxes", space.rows)
        space.sizes = _sizes(space.rows, boxes)
        if "coords" in data:
            self.coords(data["coords"], f"{place}/coords")
        if "group" in data:
            self.group(data["group"], f"{place}/group", space)
        if "partition" in data:
            space.partition = self.partition(data["partition"], space)
        self.shards(data.get("shards", [0, 1]), f"{place}/shards", space.partition)
        return space

    def states(self, value: object, place: str) -> dict[str, DType] | None:
        """State to element type."""
        data = self.mapping(value, place)
        if isinstance(value, dict) and not data:
            self.add(place, "is empty; expected one state or more")
        states: dict[str, DType] = {}
        for state, name in data.items():
            inner = f"{place}/{pointer(state)}"
            kind = _WHOLE_BYTES.get(name) if isinstance(name, str) else None
            if kind is None:
                self.wrong(inner, name, f"an element type: {', '.join(_WHOLE_BYTES)}")
            if not state or not encodable(state):
                self.add(inner, f"is the state {shown(state)}; expected a name in valid Unicode")
            elif kind is not None:
                states[state] = kind
        return states if states and len(states) == len(data) else None

    def entries(self, value: object, place: str) -> list[Row | None] | None:
        """The rows that the entries of a space refer to."""
        entries = self.sequence(value, place)
        if entries is None or self.rows is None:
            return None
        rows, count = self.rows, len(self.rows)
        if not entries or (_are_sizes(entries) and max(entries) < count):
            return [rows[e] for e in entries]
        numbers = [self.integer(e, f"{place}/{i}", 0, count) for i, e in enumerate(entries)]
        return [None if n is None else rows[n] for n in numbers]

    def boxes(
        self, value: object, place: str, rows: list[Row | None] | None
    ) -> dict[int, tuple[int, ...]] | None:
        """The shapes of the boxes, by entry; ``None`` where one is wrong."""
        data = self.mapping(value, place)
        shapes: dict[int, tuple[int, ...]] = {}
        for key, box in data.items():
            inner = f"{place}/{pointer(key)}"
            if not _INDEX.fullmatch(key) or (rows is not None and int(key) >= len(rows)):
                self.add(inner, f"is no entry; expected an index below {len(rows or ())}")
                continue
            shape = self.box(box, inner, rows[int(key)] if rows is not None else None)
            if shape is not None:
                shapes[int(key)] = shape
        return shapes if isinstance(value, dict) and len(shapes) == len(data) else None

    def box(self, value: object, place: str, row: Row | None) -> tuple[int, ...] | None:
        """The shape of a box of a tensor."""
        if not isinstance(value, list) or len(value) != 2:
            self.wrong(place, value, "a pair [start, stop]")
            return None
        start, stop = (self.corner(corner, f"{place}/{i}", row) for i, corner in enumerate(value))
        if start is None or stop is None or row is None:
            return None
        if not all(a <= b <= n for a, b, n in zip(start, stop, row.shape, strict=True)):
            text = f"is the box {start} to {stop}, which isn't inside the tensor"
            self.add(place, f"{text} {shown(row.name)} of shape {list(row.shape)}")
            return None
        return tuple(b - a for a, b in zip(start, stop, strict=True))

    def corner(self, value: object, place: str, row: Row | None) -> list[int] | None:
        """The first or the last index of a box."""
        corner = self.sequence(value, place)
        if corner is None:
            return None
        if not _are_sizes(corner):
            for i, index in enumerate(corner):
                self.integer(index, f"{place}/{i}", 0, TOO_MANY)
            return None
        if len(corner) > MOST_DIMS or (row is not None and len(corner) != len(row.shape)):
            dims = f"the {len(row.shape)} dims" if row is not None else f"up to {MOST_DIMS} dims"
            self.add(place, f"has {len(corner)} dims; expected {dims} of the tensor")
            return None
        return corner

    def coords(self, value: object, place: str) -> None:
        """Where on the mesh a space stands."""
        axes = [axis for axis in AXES if axis != "shard"]
        for axis, index in self.mapping(value, place).items():
            inner = f"{place}/{pointer(axis)}"
            if axis not in axes:
                self.add(inner, f"is no axis of coordinates; expected {', '.join(axes)}")
            elif self.mesh is None:
                self.integer(index, inner, 0, LARGEST_AXIS)
            else:
                self.integer(index, inner, 0, self.mesh.get(axis, 1))

    def group(self, value: object, place: str, space: Space) -> None:
        """The parameter group of a space, or one for each of its entries."""
        count = LARGEST_AXIS if self.groups is None else self.groups
        if not isinstance(value, list):
            self.integer(value, place, 0, count)
            return
        if space.rows is not None and len(value) != len(space.rows):
            self.add(place, f"has {len(value)} groups; the space has {len(space.rows)} entries")
        if value and not (_are_sizes(value) and max(value) < count):
            for i, group in enumerate(value):
                self.integer(group, f"{place}/{i}", 0, count)

    def partition(self, value: object, space: Space) -> Partition | None:
        """How a space is cut."""
        place = f"{space.place}/partition"
        data = self.mapping(value, place)
        if not isinstance(value, dict):
            return None
        kind = data.get("kind")
        rule = KINDS.get(kind) if isinstance(kind, str) else None
        if rule is None:
            self.wrong(f"{place}/kind", kind, f"one of {', '.join(KINDS)}")
            return None
        required = ["kind", *(f.name for f in fields(rule) if f.default is MISSING)]
        optional = [f.name for f in fields(rule) if f.default is not MISSING]
        before = len(self.found)
        self.record(data, place, required, optional)
        for key, high in (
            ("world", LARGEST_AXIS),
            ("align", LARGEST_STEP),
            ("multiple", LARGEST_STEP),
        ):
            if key in data and (key in required or key in optional):
                self.integer(data[key], f"{place}/{key}", 1, high + 1)
        if "owners" in required and "owners" in data:
            self.owners(data, place, space)
        return partition(data) if len(self.found) == before else None

    def owners(self, data: dict[str, Any], place: str, space: Space) -> None:
        """The owner of each entry."""
        owners = self.sequence(data["owners"], f"{place}/owners")
        if owners is None:
            return
        if space.rows is not None and len(owners) != len(space.rows):
            text = f"has {len(owners)} owners; the space has {len(space.rows)} entries"
            self.add(f"{place}/owners", text)
        world = data.get("world")
        high = world if type(world) is int and world > 0 else LARGEST_AXIS
        if owners and not (_are_sizes(owners) and max(owners) < high):
            for i, owner in enumerate(owners):
                self.integer(owner, f"{place}/owners/{i}", 0, high)

    def shards(self, value: object, place: str, rule: Partition | None) -> None:
        """Which indices of the shard axis hold the shards."""
        if not isinstance(value, list) or len(value) != 2:
            self.wrong(place, value, "a pair [start, step]")
            return
        start = self.integer(value[0], f"{place}/0", 0, LARGEST_AXIS)
        step = self.integer(value[1], f"{place}/1", 1, LARGEST_AXIS + 1)
        if start is None or step is None or rule is None or self.mesh is None:
            return
        last, size = start + (rule.world - 1) * step, self.mesh.get("shard", 1)
        if last >= size:
            text = f"put the last of {rule.world} shards on index {last} of the shard axis"
            self.add(place, f"{text}; expected it below {size}, the axis's size")


def _are_sizes(values: list[Any]) -> bool:
    """Whether all are integers from 0 (and neither true nor 1.0)."""
    if not values:
        return True
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) < TOO_MANY


def _sizes(
    rows: list[Row | None] | None, boxes: dict[int, tuple[int, ...]] | None
) -> tuple[list[int], list[int]] | None:
    """Elements and rows of dim 0 of each entry."""
    if rows is None or boxes is None:
        return None
    whole = [row for row in rows if row is not None]
    if len(whole) != len(rows):
        return None
    numel = [row.numel for row in whole]
    first = [row.shape[0] if row.shape else 1 for row in whole]
    for i, shape in boxes.items():
        numel[i] = math.prod(shape)
        first[i] = shape[0] if shape else 1
    return numel, first
