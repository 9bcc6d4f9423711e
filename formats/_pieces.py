"""How do pieces of tensors, met in any order and perhaps several times, become spaces?

The formats that list boxes have no rule of who holds what: each box is an entry. One that is there
again, stored by another rank, is a replica: it stands at a ``replicate`` coordinate of its own, so
that copies are proved equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from reshard.box import Box
from reshard.builder import Builder, Placed
from reshard.layout import Entry, TensorKey
from reshard.partition import Replicated


@dataclass(slots=True)
class Pieces:
    """Placed boxes, by state and copy."""

    _of: dict[tuple[str, int], list[Placed]] = field(default_factory=dict)
    _copies: dict[tuple[TensorKey, Box], int] = field(default_factory=dict)
    _seen: set[tuple[TensorKey, Box, int, int]] = field(default_factory=set)

    def add(self, state: str, piece: Placed) -> None:
        """Take a box; the same bytes may come again, and count once."""
        entry = piece.entry
        key, box = (entry.name, state), entry.region
        place = (key, box, piece.file, piece.offset)
        if place in self._seen:
            return
        self._seen.add(place)
        copy = self._copies.get((key, box), 0)
        self._copies[key, box] = copy + 1
        if entry.box is not None and entry.box.covers(entry.shape):
            piece = piece._replace(entry=Entry(entry.name, entry.shape))
        self._of.setdefault((state, copy), []).append(piece)

    def build(self, builder: Builder, world: int) -> None:
        """Put them into a manifest of so many ranks."""
        for (state, copy), placed in self._of.items():
            name = state if not copy else f"{state}.copy{copy}"
            coords = {"replicate": copy} if copy else {}
            builder.add_placed(name, state, placed, coords=coords, partition=Replicated(world))


def outside(path: str) -> bool:
    """Whether a path that a file names leads out of its folder, or nowhere."""
    parts: Iterable[str] = path.split("/")
    return not path or path.startswith("/") or "\\" in path or not {"", ".", ".."}.isdisjoint(parts)
