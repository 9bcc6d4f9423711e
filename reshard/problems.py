"""What is wrong with a manifest document?

All problems at once, each with its place. The published schema
(``reshard/schema/manifest-1.schema.json``) says what form a document has; a validator of schemas
takes seconds for a large one, so the same rules stand here by hand, and the tests hold them
together. On top of the form stands what a schema can't say: that the parts fit each other. A
document without problems makes a layout, stores and digests without an error.
"""

from __future__ import annotations

from reshard.array_path import LONGEST, RESERVED, array_path
from reshard.checks import Problem
from reshard.partition import Partition
from reshard.plain import pointer, shown
from reshard.problems_layout import LARGEST_AXIS, TOO_MANY, LayoutChecks, Space
from reshard.ruler import ints

__all__ = ["KEYS", "VERSION", "Problem", "problems"]

VERSION = 1
"""The version that this module checks."""

KEYS = (
    "zreshard", "mesh", "stage", "tensors", "spaces", "arrays", "digests", "groups", "aliases",
    "objects", "crc64nvme",
)  # fmt: skip
"""The keys of a document."""


def problems(document: object) -> list[Problem]:
    """Every problem of a document.

    Parameters
    ----------
    document
        Anything that JSON can hold. Its own checksum isn't compared here, only its form is.

    Returns
    -------
    list of Problem
        Empty for a good one. No input raises.
    """
    return _Document(document).found


class _Document(LayoutChecks):
    """A whole document, from the top down: what comes later may refer to what came before."""

    def __init__(self, document: object) -> None:
        super().__init__()
        top = self.record(document, "", KEYS)
        if "zreshard" in top:
            self.version(top["zreshard"])
        if "crc64nvme" in top:
            self.checksum(top["crc64nvme"], "/crc64nvme")
        self.mesh = self.sizes_of_axes(top["mesh"]) if "mesh" in top else None
        if top.get("stage") is not None:
            self.integer(top["stage"], "/stage", 0, 4)
        self.groups = self.param_groups(top["groups"]) if "groups" in top else None
        self.rows = self.table(top["tensors"]) if "tensors" in top else None
        self.spaces = self.all_spaces(top["spaces"]) if "spaces" in top else None
        if "arrays" in top:
            self.arrays(top["arrays"])
        if "digests" in top:
            self.digests(top["digests"])
        if "aliases" in top:
            self.aliases(top["aliases"])
        if "objects" in top:
            self.plain(top["objects"], "/objects")

    def version(self, value: object) -> None:
        if type(value) is not int or value < 1:
            self.wrong("/zreshard", value, "a version: an integer from 1")
        elif value != VERSION:
            self.wrong("/zreshard", value, f"version {VERSION}")

    def param_groups(self, value: object) -> int | None:
        """How many parameter groups there are."""
        groups = self.sequence(value, "/groups")
        for i, group in enumerate(groups or ()):
            place = f"/groups/{i}"
            data = self.record(group, place, ("settings", "scalars", "optimizer"))
            for key in ("settings", "scalars"):
                if key in data:
                    self.plain(data[key], f"{place}/{key}")
            if "optimizer" in data:
                self.integer(data["optimizer"], f"{place}/optimizer", 0, LARGEST_AXIS)
        return None if groups is None else len(groups)

    # -- arrays and what else has a column a space ------------------------------------------------

    def arrays(self, value: object) -> None:
        arrays = self.sequence(value, "/arrays")
        if arrays is None:
            return
        wanted = self.wanted()
        for i, array in enumerate(arrays):
            self.array(array, f"/arrays/{i}", wanted)
        for name, state in wanted or ():
            self.add("/arrays", f"has none of the state {shown(state)} of space {shown(name)}")

    def wanted(self) -> dict[tuple[str, str], Space] | None:
        """The states that must have an array, where all spaces are good."""
        if self.spaces is None:
            return None
        found: dict[tuple[str, str], Space] = {}
        for space in self.spaces:
            if space.name is None or space.states is None:
                return None
            found.update({(space.name, state): space for state in space.states})
        return found

    def array(self, value: object, place: str, wanted: dict[tuple[str, str], Space] | None) -> None:
        data = self.record(value, place, ("path", "space", "state", "part", "chunk", "crc64nvme"))
        texts = {
            key: self.text(data[key], f"{place}/{key}")
            for key in ("path", "space", "state")
            if key in data
        }
        name, state, space = texts.get("space"), texts.get("state"), None
        if wanted is not None and name is not None and state is not None:
            space = wanted.pop((name, state), None)
            if space is None:
                text = f"is {shown(state)}; expected a state of space {shown(name)}"
                self.add(f"{place}/state", f"{text} that has no array yet")
            elif texts.get("path") not in (None, array_path(name, state)):
                self.wrong(f"{place}/path", texts["path"], shown(array_path(name, state)))
        path = texts.get("path")
        if path is not None and (len(path) > LONGEST or path in RESERVED):
            self.wrong(f"{place}/path", path, f"another name, of at most {LONGEST} bytes")
        numbers = {
            key: self.integer(data[key], f"{place}/{key}", 1, TOO_MANY)
            for key in ("part", "chunk")
            if key in data
        }
        checksums = None
        if "crc64nvme" in data:
            checksums = self.sequence(data["crc64nvme"], f"{place}/crc64nvme")
            self.column(checksums or (), f"{place}/crc64nvme", gaps=False)
        part, chunk = numbers.get("part"), numbers.get("chunk")
        if part is None or chunk is None:
            return
        if part % chunk:
            self.add(f"{place}/part", f"is {part}; expected a multiple of the chunk, {chunk}")
        elif space is not None and state is not None and checksums is not None:
            self.extent(place, part, part // chunk, len(checksums), space, state)

    def extent(
        self, place: str, part: int, each: int, count: int, space: Space, state: str
    ) -> None:
        """Whether the shards fit the array: ``each`` chunks a shard, ``count`` in all."""
        rule = space.partition
        if rule is None:
            return
        shards = rule.stored_shards
        if count != shards * each:
            text = f"has {count} checksums; {shards} shard(s) of {each} chunk(s)"
            self.add(f"{place}/crc64nvme", f"{text} need {shards * each}")
            return
        assert space.states is not None
        if part * shards * space.states[state].itemsize >= TOO_MANY:
            self.wrong(f"{place}/part", part, f"an array of fewer than 2^63 bytes in {shards}")
            return
        if space.sizes is None:
            return
        numel, rows = space.sizes
        # shards are no more than checksums here, so that the columns of a ruler are no longer
        # than the document; and the sums stay below 2^63
        if _bound(numel, rule) >= TOO_MANY:
            self.add(f"{space.place}/entries", "hold 2^63 elements or more; expected fewer")
            return
        least = rule.ruler(ints(numel), ints(rows)).part
        if part < least:
            self.wrong(f"{place}/part", part, f"at least {least}, which the largest shard needs")

    def digests(self, value: object) -> None:
        if self.spaces is None or any(s.name is None or s.states is None for s in self.spaces):
            self.mapping(value, "/digests")
            return
        spaces = {s.name: s for s in self.spaces if s.name is not None}
        data = self.record(value, "/digests", spaces)
        known: dict[str, dict[str, str | None]] = {}
        for name, columns in data.items():
            if name not in spaces:
                continue
            space, place = spaces[name], f"/digests/{pointer(name)}"
            found = self.record(columns, place, space.states or ())
            for state, values in found.items():
                if state in (space.states or ()):
                    inner = f"{place}/{pointer(state)}"
                    self.digest_column(values, inner, space, known.setdefault(state, {}))

    def digest_column(
        self, value: object, place: str, space: Space, known: dict[str, str | None]
    ) -> None:
        values = self.sequence(value, place)
        if values is None:
            return
        before = len(self.found)
        self.column(values, place, gaps=True)
        if space.rows is None:
            return
        if len(values) != len(space.rows):
            self.add(place, f"has {len(values)} digests; the space has {len(space.rows)} entries")
            return
        if len(self.found) != before:
            return
        names = [None if row is None else row.name for row in space.rows]
        for i, (name, digest) in enumerate(zip(names, values, strict=True)):
            if name is not None and digest is not None:
                other = known.setdefault(name, digest)
                if other != digest:
                    text = f"is {shown(digest)}; another entry of {shown(name)} has"
                    self.add(f"{place}/{i}", f"{text} {shown(other)}")

    def aliases(self, value: object) -> None:
        data = self.mapping(value, "/aliases")
        names = self.names
        for alias, name in data.items():
            place = f"/aliases/{pointer(alias)}"
            self.text(alias, place)
            if self.text(name, place) is None or names is None:
                continue
            if alias in names:
                self.add(place, "is the name of a tensor too; expected one or the other")
            if name in names:
                continue
            if name in data:
                self.wrong(place, name, "a tensor's name, not an alias")
            else:
                self.wrong(place, name, "the name of a tensor that is there")


def _bound(numel: list[int], rule: Partition) -> int:
    """No sum or product that the rule's ruler makes is larger."""
    align, multiple = getattr(rule, "align", 1), getattr(rule, "multiple", 1)
    return sum(numel) * 2 + len(numel) * (align + rule.world) + multiple * rule.world * 2
