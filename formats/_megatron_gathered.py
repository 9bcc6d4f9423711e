"""Where are the buckets of the optimizer format ``dp_zero_gather_scatter``?

In one object for each group of data-parallel ranks (``dp_group_idx_G.param_state``): rank 0
gathered all buckets of an element type, laid them end to end without their padding at the end, and
pickled them as tensors. Their payload stays where it is; only the places are taken.

Source: Megatron-Core 0.12 and 0.19, ``optimizer/distrib_optimizer.py``
(``get_parameter_state_dp_zero``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reshard.box import Box
from reshard.builder import Builder
from reshard.dtypes import dtype
from reshard.errors import CorruptError, UnsupportedError
from reshard.formats._megatron_buckets import Bucket, check_buckets
from reshard.formats._megatron_parts import Contents, Part, Piece
from reshard.formats._torch import placed
from reshard.layout import Entry
from reshard.stored import StoredTensor, brief
from reshard.torchfile import TorchFile

_KEY = re.compile(r"((?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+)\.param_state")


def gathered(builder: Builder, contents: Contents) -> tuple[list[Bucket], dict[int, Path]]:
    """The buckets in a checkpoint's objects, and where the files lie that have them.

    Raises
    ------
    CorruptError
        If such an object makes no sense.
    UnsupportedError
        If its buckets weren't coalesced, as early releases of Megatron-Core did.
    """
    found: list[Bucket] = []
    paths: dict[int, Path] = {}
    for key, objects in contents.objects.items():
        match = _KEY.fullmatch(key)
        if match is None:
            continue
        if len(objects.shards) != 1:
            raise CorruptError(f"{key} has {len(objects.shards)} shards", where=builder.root)
        found += _buckets(builder, match[1], objects.shards[0](), paths)
    check_buckets(found, builder.root)
    return found, paths


def _buckets(
    builder: Builder, group: str, file: TorchFile, paths: dict[int, Path]
) -> Iterator[Bucket]:
    value = file.value
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, Mapping):
        raise CorruptError(f"{group} has the state {brief(value)}", where=file.path)
    if value.get("buckets_coalesced") is not True:
        raise UnsupportedError(
            f"{group} has buckets that aren't coalesced, as early releases of Megatron-Core wrote",
            where=file.path,
            hint="load it with Megatron-Core and save it with fully_reshardable",
        )
    for number, of_types in value.items():
        if number == "buckets_coalesced":
            continue
        if type(number) is not int or not isinstance(of_types, Mapping):
            raise CorruptError(f"{group} has a buffer {brief(number)}", where=file.path)
        for types, states in of_types.items():
            yield _bucket(builder, group, f"{number}.{types}", states, file, paths)


def _bucket(
    builder: Builder, group: str, name: str, states: Any, file: TorchFile, paths: dict[int, Path]
) -> Bucket:
    if not isinstance(states, Mapping):
        raise CorruptError(f"{group} has the states {brief(states)}", where=file.path)
    parts: dict[str, Part] = {}
    for state, tensor in states.items():
        if not isinstance(state, str) or not isinstance(tensor, StoredTensor):
            continue  # numel_unpadded
        if len(tensor.shape) != 1:
            raise CorruptError(f"{group} has a bucket {list(tensor.shape)}", where=file.path)
        at = placed(builder, file, tensor, Entry(f"{group}.{name}", tensor.shape))
        if at.strides is not None:
            raise UnsupportedError(f"{group} has a bucket with strides", where=file.path)
        paths[at.file] = file.path
        piece = Piece(Box.whole(tensor.shape), 0, at.file, at.offset)
        parts[state] = Part(f"{group}.{name}.{state}", tensor.shape, dtype(tensor.dtype), (piece,))
    return Bucket(group, name, parts)
