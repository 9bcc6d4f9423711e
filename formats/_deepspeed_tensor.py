"""Which box of a whole parameter does a tensor-parallel rank hold?

DeepSpeed keeps that under ``universal_checkpoint_info`` of the model's state
(``deepspeed/checkpoint/constants.py``, ``universal_checkpoint.py``, ``ds_to_universal.py`` of
0.19.8): either an ``affine_map`` with the pieces of every rank, or lists of patterns of names.
Where there is nothing, nobody can tell, and the ranks' parts keep names of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.box import Box, Shape, strides_of
from reshard.errors import InconsistentError, UnsupportedError
from reshard.layout import Entry
from reshard.pickle_stubs import Record

REPLICATED = ("tp_replicated_parameter_patterns", "parameter_to_average_patterns")
ROWS = "parameter_with_row_parallelism_patterns"
TWO_PARTS = "parameter_with_2_sub_params_cat_dim_0"
SUB_PARAMS = "parameter_with_sub_params"
VOCABULARY = "vocabulary_parameter_patterns"


Part = tuple[Shape, Sequence[Entry]]
"""What a rank holds of a tensor: its shape there, and the boxes that it is made of."""


@dataclass(frozen=True, slots=True)
class TensorRules:
    """The rules of one checkpoint.

    Parameters
    ----------
    info
        ``universal_checkpoint_info``, empty where there is none.
    degree
        Size of the tensor axis.
    """

    info: Mapping[str, Any]
    degree: int

    def entries(self, name: str, local: Shape, rank: int) -> list[Entry]:
        """What the rank's part of a parameter is, as entries in the order in which they lie.

        Parameters
        ----------
        name
            Of the parameter.
        local
            Shape of the rank's part.
        rank
            Index on the tensor axis.
        """
        if self.degree == 1:
            return [Entry(name, local)]
        if not self.info:
            return [Entry(part_name(name, rank), local)]
        mapped = self._mapped(name)
        if mapped is not None:
            return _affine(name, mapped, local, rank)
        if _any(self.info, REPLICATED, name):
            return [Entry(name, local)]
        if _any(self.info, (TWO_PARTS,), name):
            return self._parts(name, local, rank, 2)
        if self._sub_param(name) is not None:
            raise UnsupportedError(
                f"{name} is cut by sub-parameters ({SUB_PARAMS}), which isn't supported",
                hint="convert at the same tensor-parallel degree, or save with an affine_map",
            )
        dim = 1 if _any(self.info, (ROWS,), name) and len(local) > 1 else 0
        if not local:
            return [Entry(name, local)]
        shape = tuple(n * self.degree if d == dim else n for d, n in enumerate(local))
        start = tuple(rank * n if d == dim else 0 for d, n in enumerate(local))
        stop = tuple((rank + 1) * n if d == dim else n for d, n in enumerate(local))
        return [Entry(name, shape, Box(start, stop))]

    def _parts(self, name: str, local: Shape, rank: int, count: int) -> list[Entry]:
        """Parts stacked on dim 0, each of them cut over the ranks on dim 0."""
        if local[0] % count:
            raise InconsistentError(f"{name} {list(local)} isn't made of {count} equal parts")
        rows = local[0] // count
        shape = (local[0] * self.degree, *local[1:])
        found = []
        for part in range(count):
            first = part * rows * self.degree + rank * rows
            start = (first, *(0 for _ in local[1:]))
            found.append(Entry(name, shape, Box(start, (first + rows, *local[1:]))))
        return found

    def _mapped(self, name: str) -> Mapping[str, Any] | None:
        table = self.info.get("affine_map")
        params = table.get("params") if isinstance(table, Mapping) else None
        if not isinstance(params, Mapping):
            return None
        for pattern, found in params.items():
            if re.fullmatch(pattern, name) and isinstance(found, Mapping):
                return found
        return None

    def _sub_param(self, name: str) -> object | None:
        for one in _list(self.info.get(SUB_PARAMS)):
            fields = one.fields if isinstance(one, Record) else one
            patterns = fields.get("patterns") if isinstance(fields, Mapping) else None
            if any(re.match(str(p), name) for p in _list(patterns)):
                found: object = one
                return found
        return None


def mapped_anew(info: Mapping[str, Any], ranks: Sequence[Mapping[str, Part]]) -> dict[str, Any]:
    """``universal_checkpoint_info`` for another degree: its affine map made anew.

    The patterns hold at any degree.

    Parameters
    ----------
    info
        The source's.
    ranks
        For each index of the tensor axis, names to (shape, entries) of what it holds.
    """
    table = info.get("affine_map")
    if not isinstance(table, Mapping):
        return dict(info)
    params = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        held = {index: rank[name] for index, rank in enumerate(ranks) if name in rank}
        (_, entries), *_ = held.values()
        params[f"^{re.escape(name)}$"] = {
            "logical_shape": list(entries[0].shape),
            "ranks": {i: _pieces(part, held) for i, part in held.items()},
        }
    return {**info, "affine_map": {**table, "params": params}}


def _pieces(part: Part, held: Mapping[int, Part]) -> dict[str, Any]:
    shape, entries = part
    pieces, at = [], 0
    for entry in entries:
        region = entry.region
        pieces.append(
            {
                "shape": list(region.shape),
                "source": [region.offset_in(entry.shape), list(strides_of(entry.shape))],
                "dest": [at, list(strides_of(shape))],
                "locations": [
                    i for i, (_, some) in held.items() if any(e.region == region for e in some)
                ],
            }
        )
        at += entry.numel
    return {"shard_shape": list(shape), "pieces": pieces}


def part_name(name: str, rank: int) -> str:
    """The name of a tensor rank's part where nothing says how the parts fit together."""
    return f"{name}[tensor={rank}]"


def _list(value: object) -> Iterable[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _any(info: Mapping[str, Any], keys: Sequence[str], name: str) -> bool:
    return any(re.match(str(p), name) for key in keys for p in _list(info.get(key)))


def _affine(name: str, mapped: Mapping[str, Any], local: Shape, rank: int) -> list[Entry]:
    """Entries of an affine map: each piece is a box of the whole and a run of the part."""
    shape = tuple(int(n) for n in mapped["logical_shape"])
    mine = mapped["ranks"][rank]
    if tuple(mine["shard_shape"]) != local:
        raise InconsistentError(
            f"{name} is {list(local)}, but its affine map says {list(mine['shard_shape'])}"
        )
    found: list[tuple[int, Entry]] = []
    for piece in mine["pieces"]:
        size = tuple(int(n) for n in piece["shape"])
        (offset, strides), (at, into) = piece["source"], piece["dest"]
        start = _unravel(int(offset), shape)
        box = Box(start, tuple(a + n for a, n in zip(start, size, strict=True)))
        straight = tuple(strides) == strides_of(shape) and box.within(shape)
        part = Box.whole(size)
        if not straight or tuple(into) != strides_of(local) or not part.contiguous_in(local):
            raise UnsupportedError(f"{name} is cut by an affine map that isn't made of boxes")
        found.append((int(at), Entry(name, shape, None if box.covers(shape) else box)))
    found.sort(key=lambda row: row[0])
    expected = 0
    for at, entry in found:
        if at != expected:
            raise UnsupportedError(f"{name}: the pieces of its affine map leave holes in a part")
        expected += entry.numel
    return [entry for _, entry in found]


def _unravel(offset: int, shape: Shape) -> Shape:
    index = []
    for stride in strides_of(shape):
        at, offset = divmod(offset, stride) if stride else (0, offset)
        index.append(at)
    return tuple(index)
