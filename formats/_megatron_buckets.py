"""Which parameter is where in the optimizer's buckets, which store no names?

``dp_reshardable`` and ``dp_zero_gather_scatter`` keep, for each group of data-parallel ranks, the
buckets of the distributed optimizer: 1-D arrays in which the masters (and each moment) of the
group's shards of parameters lie one behind the other, each beginning at a multiple of 64. They are
told by their content (:mod:`._megatron_match`); here that becomes states with names.

Source: Megatron-Core 0.12 and 0.19, ``distributed/param_and_grad_buffer.py`` and
``optimizer/distrib_optimizer.py``.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from reshard.box import Box
from reshard.errors import IncompleteError, InconsistentError
from reshard.formats._megatron_parts import Part, Piece, run
from reshard.layout import MASTER, TensorKey

KEY = re.compile(
    r"((?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+)\."
    r"(gbuf_idx_\d+\.dtype_\(.*\)\.bucket_idx_\d+)\.([^.]+)"
)
_MASTER = "param"


class Line:
    """The pieces of a 1-D part, in order."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self._pieces = sorted(part.pieces, key=lambda p: p.box.start)
        self._starts = [p.box.start[0] for p in self._pieces]

    def over(self, start: int, stop: int) -> Iterator[tuple[Piece, int, int]]:
        """The pieces that hold ``[start, stop)``, and what of it each has.

        Raises
        ------
        IncompleteError
            If some of it is in none.
        """
        at = start
        for piece in self._pieces[max(0, bisect_right(self._starts, start) - 1) :]:
            (low,), (high,) = piece.box.start, piece.box.stop
            if at >= stop or low > at:
                break
            if high > at:
                yield piece, at, min(high, stop)
                at = high
        if at < stop:
            raise IncompleteError(f"element {at} of {self.part.key} is in no file")


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket: its 1-D parts by state; the masters are among them."""

    group: str
    name: str
    parts: Mapping[str, Part]

    @property
    def master(self) -> Part:
        """The part with the masters."""
        return self.parts[_MASTER]


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A box of a weight, as one rank had it."""

    name: str
    part: Part
    piece: Piece

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return self.piece.box.numel

    def __str__(self) -> str:
        return f"{self.name} {list(self.piece.box.start)} to {list(self.piece.box.stop)}"


@dataclass(frozen=True, slots=True)
class Match:
    """A shard and the place of its first element in a bucket."""

    shard: Shard
    bucket: Bucket
    at: int


def collect(tensors: Mapping[str, Part], where: Path) -> tuple[list[Bucket], list[Part]]:
    """The buckets, and the tensors that are in none.

    Raises
    ------
    IncompleteError
        If a bucket lacks the masters, or a state that others have.
    """
    found: dict[tuple[str, str], dict[str, Part]] = {}
    rest = []
    for key, part in tensors.items():
        match = KEY.fullmatch(key)
        if match is None:
            rest.append(part)
        else:
            found.setdefault((match[1], match[2]), {})[match[3]] = part
    buckets = [Bucket(group, name, parts) for (group, name), parts in found.items()]
    check_buckets(buckets, where)
    return buckets, rest


def check_buckets(buckets: Iterable[Bucket], where: Path) -> None:
    """See that all buckets have the same states, each of one length."""
    every = dict.fromkeys(state for bucket in buckets for state in bucket.parts)
    for bucket in buckets:
        if missing := [s for s in (_MASTER, *every) if s not in bucket.parts]:
            raise IncompleteError(
                f"{bucket.group}.{bucket.name} lacks {missing[0]}", where=where,
                hint="keys were lost from the metadata: save or copy the checkpoint again",
            )  # fmt: skip
        for part in bucket.parts.values():
            if part.shape != bucket.master.shape or len(part.shape) != 1:
                raise InconsistentError(
                    f"{part.key} is {list(part.shape)}, and the masters are "
                    f"{list(bucket.master.shape)}",
                    where=where,
                )


def states(found: Mapping[Shard, Iterable[Match]]) -> dict[TensorKey, Part]:
    """The optimizer's states by name; what several groups have of one shard are copies."""
    lines: dict[str, Line] = {}
    pieces: dict[TensorKey, list[list[Piece]]] = {}
    whole: dict[TensorKey, Part] = {}
    for shard, matches in found.items():
        for copy, match in enumerate(matches):
            for state, part in match.bucket.parts.items():
                key = (shard.name, MASTER if state == _MASTER else state)
                whole[key] = replace(part, shape=shard.part.shape)
                copies = pieces.setdefault(key, [])
                copies += [[] for _ in range(copy + 1 - len(copies))]
                line = lines.setdefault(part.key, Line(part))
                copies[copy] += _boxes(line, shard.piece.box, match.at)
    return {
        key: replace(part, pieces=tuple(pieces[key][0]), copies=tuple(map(tuple, pieces[key][1:])))
        for key, part in whole.items()
    }


def _boxes(line: Line, box: Box, at: int) -> Iterator[Piece]:
    """The boxes of a shard that begins at an element of a bucket."""
    dtype = line.part.dtype
    for piece, low, high in line.over(at, at + box.numel):
        offset = piece.offset + dtype.nbytes(low - piece.box.start[0])
        yield from run(box, low - at, high - at, piece._replace(offset=offset), dtype)
