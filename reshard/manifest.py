"""What can be said of a checkpoint without reading its payload?

A **manifest**: the layout, where the bytes lie, the parameter groups, tied names, the state that
isn't tensors, and the checksums that are known. A format's reader makes one of a folder; a
format's writer makes one of a layout before a byte is written. Converting is copying bytes from
one manifest to the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from reshard.box import Shape
from reshard.collector import collector_paused
from reshard.dtypes import DType
from reshard.errors import InconsistentError
from reshard.layout import Entry, FlatSpace, Layout, TensorKey, key_text
from reshard.store import File, Regions, Store

Place = tuple[int, int]
"""Index of a space and of an entry in it."""


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """A parameter group of an optimizer.

    Parameters
    ----------
    settings
        Learning rate, betas and so on, as plain data.
    scalars
        Optimizer state that is one value for the group: ``step``.
    optimizer
        Which optimizer, where there are several.
    """

    settings: Mapping[str, Any]
    scalars: Mapping[str, Any] = field(default_factory=dict)
    optimizer: int = 0


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a checkpoint and the entries that hold it.

    Parameters
    ----------
    name, state
        Its key.
    shape
        The whole tensor's shape.
    dtype
        Element type.
    places
        Where every entry stands that holds it or a box of it.
    """

    name: str
    state: str
    shape: Shape
    dtype: DType
    places: tuple[Place, ...]

    @property
    def key(self) -> TensorKey:
        """Name and state."""
        return self.name, self.state

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.dtype.nbytes(math.prod(self.shape))


@dataclass(frozen=True, slots=True)
class Note:
    """Something that a reader saw and that its user should know.

    Parameters
    ----------
    kind
        ``"left-out"`` for state that can't be carried, ``"note"`` for the rest.
    text
        One sentence.
    where
        The file or key it is about.
    """

    kind: str
    text: str
    where: str


NO_REGIONS = Regions.of("crc64nvme", [])


@dataclass(frozen=True, eq=False)
class Manifest:
    """All that a format can say of a checkpoint without reading its payload.

    Parameters
    ----------
    format
        Name of the format.
    root
        The folder (or the file) that the paths of ``files`` are relative to.
    layout
        Who holds what.
    files
        Every file that holds payload.
    stores
        (space name, state) to where its bytes lie.
    groups
        Parameter groups, in the optimizer's order.
    aliases
        Tied names: alias to the name that is stored.
    objects
        State that isn't tensors, as plain data (see :mod:`reshard.plain`).
    digests
        CRC-64/NVME over the row-major bytes of each tensor, where known.
    regions
        Byte ranges of the files with checksums.
    notes
        What the reader left out or wants to say.
    """

    format: str
    root: Path
    layout: Layout
    files: tuple[File, ...]
    stores: Mapping[tuple[str, str], Store]
    groups: tuple[ParamGroup, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    objects: Mapping[str, Any] = field(default_factory=dict)
    digests: Mapping[TensorKey, int] = field(default_factory=dict)
    regions: Regions = NO_REGIONS
    notes: tuple[Note, ...] = ()

    @cached_property
    @collector_paused()
    def tensors(self) -> dict[TensorKey, Tensor]:
        """Every tensor by its key, in the order of the spaces.

        Raises
        ------
        InconsistentError
            If two entries of one tensor disagree on its shape or element type.
        """
        found: dict[TensorKey, Tensor] = {}
        others: dict[TensorKey, list[Place]] = {}
        for space_index, space in enumerate(self.layout.spaces):
            places = [((space_index, i),) for i in range(len(space.entries))]
            for state, dtype in space.states.items():
                for entry, place in zip(space.entries, places, strict=True):
                    key = (entry.name, state)
                    seen = found.get(key)
                    if seen is None:
                        found[key] = Tensor(entry.name, state, entry.shape, dtype, place)
                    else:
                        self._check_same(seen, entry, dtype)
                        others.setdefault(key, []).extend(place)
        for key, more in others.items():
            found[key] = replace(found[key], places=(*found[key].places, *more))
        return found

    @cached_property
    def nbytes(self) -> dict[str, int]:
        """Bytes of the tensors of each state, one replica of each."""
        found: dict[str, int] = {}
        for tensor in self.tensors.values():
            found[tensor.state] = found.get(tensor.state, 0) + tensor.nbytes
        return found

    @property
    def states(self) -> tuple[str, ...]:
        """The states that occur, in the order of the spaces."""
        return tuple(dict.fromkeys(s for space in self.layout.spaces for s in space.states))

    def path(self, file: int) -> Path:
        """Where a file lies."""
        name = self.files[file].path
        return self.root if name == "" else self.root / name

    def space(self, index: int) -> FlatSpace:
        """A space by its index."""
        return self.layout.spaces[index]

    def _check_same(self, seen: Tensor, entry: Entry, dtype: DType) -> None:
        if seen.shape != entry.shape or seen.dtype != dtype:
            raise InconsistentError(
                f"{key_text(seen.key)} is {seen.dtype} {list(seen.shape)} in one place and "
                f"{dtype} {list(entry.shape)} in another",
                where=self.root,
            )
