"""How do a Megatron-Core checkpoint's tensors become spaces of a manifest?

A piece is an entry: a box with the rank that wrote it. States of the optimizer that are cut alike
share a space; those of one parameter group are that group's. Copies are replicas, which are proved
equal when they are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reshard.builder import Builder
from reshard.dtypes import DType
from reshard.formats._megatron_parts import Part, Piece
from reshard.layout import PARAM, Entry, FlatSpace, TensorKey
from reshard.partition import Explicit
from reshard.store import EntryStore


@dataclass(frozen=True, slots=True)
class Spaces:
    """Puts tensors into a manifest.

    Parameters
    ----------
    builder
        The manifest in the making.
    world
        How many ranks there were.
    """

    builder: Builder
    world: int

    def add(self, tensors: Mapping[TensorKey, Part], group_of: Mapping[str, int]) -> None:
        """Add tensors.

        Parameters
        ----------
        tensors
            By name and state.
        group_of
            The parameter group of a name, for those that have one.
        """
        weights: dict[DType, list[tuple[str, Mapping[str, Part]]]] = {}
        states: dict[str, dict[str, Part]] = {}
        for (name, state), part in tensors.items():
            if state == PARAM:
                weights.setdefault(part.dtype, []).append((name, {state: part}))
            else:
                states.setdefault(name, {})[state] = part
        for dtype, some in weights.items():
            self._space(f"{PARAM}.{dtype}", some, None)
        self._optimizer(states, group_of)
        self._copies(tensors)

    def _optimizer(
        self, states: Mapping[str, Mapping[str, Part]], group_of: Mapping[str, int]
    ) -> None:
        """One space for each group, and for each way in which states are cut together."""
        spaces: dict[object, list[tuple[str, Mapping[str, Part]]]] = {}
        for name, parts in states.items():
            for alike in _alike(parts):
                kinds = tuple((state, part.dtype) for state, part in sorted(alike.items()))
                spaces.setdefault((group_of.get(name), kinds), []).append((name, alike))
        for number, some in enumerate(spaces.values()):
            self._space(f"optimizer{number}", some, group_of.get(some[0][0]))

    def _space(
        self, name: str, tensors: Sequence[tuple[str, Mapping[str, Part]]], group: int | None
    ) -> None:
        entries: list[Entry] = []
        owners: list[int] = []
        places: dict[str, list[Piece]] = {}
        kinds: dict[str, DType] = {}
        for tensor, states in tensors:
            first = next(iter(states.values()))
            for piece in first.pieces:
                entries.append(_entry(tensor, first, piece))
                owners.append(piece.owner)
            for state, part in states.items():
                kinds[state] = part.dtype
                places.setdefault(state, []).extend(part.pieces)
        space = FlatSpace(
            name=name,
            entries=tuple(entries),
            partition=Explicit(self.world, tuple(owners)),
            states=kinds,
            group=group,
        )
        self.builder.add(space, {state: _store(pieces) for state, pieces in places.items()})

    def _copies(self, tensors: Mapping[TensorKey, Part]) -> None:
        spaces: dict[tuple[str, DType, int], list[tuple[Entry, Piece]]] = {}
        for (name, state), part in tensors.items():
            for number, pieces in enumerate(part.copies, 1):
                some = spaces.setdefault((state, part.dtype, number), [])
                some += [(_entry(name, part, piece), piece) for piece in pieces]
        for (state, dtype, number), rows in spaces.items():
            space = FlatSpace(
                name=f"{state}.{dtype}.replicate{number}",
                entries=tuple(entry for entry, _ in rows),
                partition=Explicit(1, (0,) * len(rows)),
                states={state: dtype},
                coords={"replicate": number},
            )
            self.builder.add(space, {state: _store([piece for _, piece in rows])})


def _entry(name: str, part: Part, piece: Piece) -> Entry:
    return Entry(name, part.shape, None if piece.box.covers(part.shape) else piece.box)


def _store(pieces: Sequence[Piece]) -> EntryStore:
    return EntryStore.of((piece.file, piece.offset, piece.strides) for piece in pieces)


def _alike(parts: Mapping[str, Part]) -> list[dict[str, Part]]:
    """Sort the states of a parameter by how they are cut."""
    found: dict[object, dict[str, Part]] = {}
    for state, part in parts.items():
        cut = tuple((piece.box, piece.owner) for piece in part.pieces)
        found.setdefault(cut, {})[state] = part
    return list(found.values())
