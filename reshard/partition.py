"""How is a flat space cut over P shards? Six rules, each in closed form.

==============  ====================================================================
``contiguous``  ZeRO stages 1 and 2: laid end to end, padded, cut in P equal parts
``per_tensor``  ZeRO stage 3: each entry cut in P, ``ceil(n / P)`` elements a shard
``rows``        FSDP2: dim 0 of each entry cut by ``torch.chunk``'s rule
``whole``       each entry on one shard (ZeroRedundancyOptimizer)
``replicated``  every shard holds everything; stored once
``explicit``    listed boxes, each with its owner (DCP in general)
==============  ====================================================================

A rule turns the entries' sizes into a :class:`~reshard.ruler.Ruler`; nothing else in the library
asks which rule it was.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from reshard.errors import CorruptError
from reshard.ruler import Ints, Ruler, ints


def _ceil(a: Ints, b: int) -> Ints:
    return -(-a // b)


def _starts(sizes: Ints) -> Ints:
    return np.cumsum(sizes) - sizes


def _check(number: int, least: int = 1) -> None:
    """An integer, and none that would leave 64 bits when elements are counted with it."""
    assert type(number) is int, number
    assert least <= number < 1 << 31, number


@dataclass(frozen=True, slots=True)
class Partition:
    """A rule that cuts a flat space over ``world`` shards."""

    kind: ClassVar[str]
    world: int

    def __post_init__(self) -> None:
        _check(self.world)

    def ruler(self, numel: Ints, rows: Ints) -> Ruler:
        """Lay the rule on entries of ``numel`` elements, whose dim 0 has ``rows`` indices."""
        raise AssertionError(f"{type(self).__name__} has no ruler")

    @property
    def stored_shards(self) -> int:
        """How many shards are stored (one, where all hold the same)."""
        return self.world

    def to_json(self) -> dict[str, Any]:
        """The rule as plain data; see :func:`partition`."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True, slots=True)
class Contiguous(Partition):
    """ZeRO stages 1 and 2: shard i owns ``[i*N/P, (i+1)*N/P)`` of the padded space.

    Parameters
    ----------
    align
        Each entry begins at a multiple of this many elements (nothing follows the last one).
    multiple
        A shard's length is a multiple of this (DeepSpeed: 2, so that the space is padded to a
        multiple of 2 x P).
    """

    kind: ClassVar[str] = "contiguous"
    align: int = 1
    multiple: int = 1

    def __post_init__(self) -> None:
        _check(self.world)
        _check(self.align)
        _check(self.multiple)

    def ruler(self, numel: Ints, rows: Ints) -> Ruler:
        """See :meth:`Partition.ruler`."""
        offset = _starts(_ceil(numel, self.align) * self.align)
        end = int(offset[-1] + numel[-1]) if len(numel) else 0
        part = max(1, self.multiple * -(-end // (self.multiple * self.world)))
        zero = np.zeros_like(numel)
        return Ruler(numel, np.full_like(numel, part), offset, zero, zero, part)


@dataclass(frozen=True, slots=True)
class PerTensor(Partition):
    """ZeRO stage 3: ``ceil(n / P)`` elements of each entry a shard, padding at the end."""

    kind: ClassVar[str] = "per_tensor"

    def ruler(self, numel: Ints, rows: Ints) -> Ruler:
        """See :meth:`Partition.ruler`."""
        return _each(numel, _ceil(numel, self.world))


@dataclass(frozen=True, slots=True)
class Rows(Partition):
    """FSDP2: ``ceil(rows / P)`` rows of dim 0 a shard, so that the last may hold none."""

    kind: ClassVar[str] = "rows"

    def ruler(self, numel: Ints, rows: Ints) -> Ruler:
        """See :meth:`Partition.ruler`."""
        row = numel // np.maximum(rows, 1)
        return _each(numel, _ceil(rows, self.world) * row)


def _each(numel: Ints, size: Ints) -> Ruler:
    zero = np.zeros_like(numel)
    return Ruler(numel, np.maximum(size, 1), zero, zero, _starts(size), max(1, int(size.sum())))


@dataclass(frozen=True, slots=True)
class Replicated(Partition):
    """Every shard holds all entries; one copy is stored."""

    kind: ClassVar[str] = "replicated"

    def ruler(self, numel: Ints, rows: Ints) -> Ruler:
        """See :meth:`Partition.ruler`."""
        zero = np.zeros_like(numel)
        return Ruler(
            numel, np.maximum(numel, 1), zero, zero, _starts(numel), max(1, int(numel.sum()))
        )

    @property
    def stored_shards(self) -> int:
        """One."""
        return 1


@dataclass(frozen=True, slots=True)
class Whole(Partition):
    """Each entry lies whole on the shard that owns it.

    Parameters
    ----------
    owners
        The owner of each entry.
    """

    kind: ClassVar[str] = "whole"
    owners: tuple[int, ...]

    def __post_init__(self) -> None:
        _check(self.world)
        for owner in self.owners:
            _check(owner, least=0)
            assert owner < self.world, (self.world, owner)

    def ruler(self, numel: Ints, rows: Ints) -> Ruler:
        """See :meth:`Partition.ruler`."""
        owners = ints(self.owners)
        assert owners.shape == numel.shape, "one owner an entry"
        order = np.argsort(owners, kind="stable")
        start = _starts(numel[order])
        heads = np.searchsorted(owners[order], np.arange(self.world))
        ends = np.append(start, numel.sum())
        base = np.empty_like(numel)
        base[order] = start - ends[heads][owners[order]]
        part = int((ends[np.append(heads[1:], len(owners))] - ends[heads]).max(initial=1))
        return Ruler(numel, np.maximum(numel, 1), np.zeros_like(numel), owners, base, part)


@dataclass(frozen=True, slots=True)
class Explicit(Whole):
    """Listed boxes, each an entry with its owner: what no other rule gives."""

    kind: ClassVar[str] = "explicit"


KINDS: dict[str, type[Partition]] = {
    c.kind: c for c in (Contiguous, PerTensor, Rows, Replicated, Whole, Explicit)
}


def partition(data: dict[str, Any]) -> Partition:
    """Make a partition of its plain data.

    Raises
    ------
    CorruptError
        If the kind is unknown or a number is out of range.
    """
    fields = dict(data)
    kind = KINDS.get(str(fields.pop("kind", None)))
    if kind is None:
        raise CorruptError(f"unknown partition {data.get('kind')!r}; known: {', '.join(KINDS)}")
    try:
        if "owners" in fields:
            fields["owners"] = tuple(fields["owners"])
        return kind(**fields)
    except (TypeError, AssertionError) as error:
        raise CorruptError(f"bad {kind.kind} partition: {data!r}") from error
