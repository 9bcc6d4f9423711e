"""Which keys does a Megatron-Core checkpoint have, and what stands under each?

The optimizer format is ``fully_reshardable``: ``optimizer.state.<state>.<key>``, whole tensors that
any tensor, pipeline and data parallelism loads. Layers that are alike are one key with an axis for
them in front, as Megatron-Core asks for them by default. Values of the script are common state, and
what was a sharded object is one again.

Source: Megatron-Core 0.19, ``optimizer/distrib_optimizer.py`` (``sharded_param_state_fs_bucket_``
and what it calls) and ``transformer/transformer_block.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from reshard.box import Shape
from reshard.errors import RequestError, UnsupportedError
from reshard.format import AS_WRITTEN, Loss, Request, optimizer_states
from reshard.formats._dcp_write_keys import Contents, Item
from reshard.formats._megatron_names import LAYER, is_plain
from reshard.formats._megatron_state import OBJECTS, members
from reshard.formats._megatron_torch_dist import COMMON_STATE
from reshard.layout import BUFFER, CLIENT, MASTER, PARAM, TensorKey, key_text
from reshard.manifest import Manifest
from reshard.plain import LeftOut, TensorRef

_SHARDING = "fully_reshardable"
_OWN = ("optimizer", "iteration", "opt_param_scheduler", "content_metadata")


def contents(source: Manifest, request: Request) -> tuple[Contents, dict[str, Any]]:
    """Choose what is written of a source.

    Returns
    -------
    contents
        Tensors, objects (each in a list, as Megatron-Core stores it) and losses.
    common
        The common state.

    Raises
    ------
    RequestError
        If a name would be read as something else, or the weights that are asked for aren't there.
    UnsupportedError
        If torch has no such element type.
    """
    found = Contents()
    _model(source, request, found)
    _optimizer(source, found)
    for item in found.items:
        if item.dtype.torch is None:
            raise UnsupportedError(
                f"{key_text(item.source)} is {item.dtype}, which torch doesn't have",
                where=source.root,
            )
        if not is_plain(item.key[0]) or "." in item.key[1]:
            raise RequestError(
                f"Megatron-Core would take {key_text(item.key)} for something else than a tensor "
                "of that name",
                where=source.root,
            )
    found.items[:] = _stacked(found.items)
    common = _common(source, found)
    found.values[f"{COMMON_STATE}/shard_0_1",] = [common]
    found.losses += _lost(source, found)
    return found, common


def _model(source: Manifest, request: Request, found: Contents) -> None:
    """One weight a name, tied names too."""
    order: tuple[str, ...] = (PARAM, BUFFER, MASTER)
    if request.state is not None:
        if request.state not in source.states:
            raise RequestError(f"there is no state {request.state!r}", where=source.root)
        order = (request.state, *order)
    weights: dict[str, TensorKey] = {}
    for name, own in source.tensors:
        if own in (*order, PARAM):
            best = next(s for s in order if (name, s) in source.tensors)
            weights[name] = (name, best)
    for alias, name in source.aliases.items():
        if alias not in weights and name in weights:
            weights[alias] = weights[name]
    for name, key in weights.items():
        tensor = source.tensors[key]
        cast = key[1] != BUFFER
        dtype = request.casts.of(name, tensor.dtype) if cast else tensor.dtype
        found.items.append(Item((name,), (name, PARAM), key, tensor.shape, dtype))


def _optimizer(source: Manifest, found: Contents) -> None:
    """The masters and all states of the optimizer."""
    for name, state in source.tensors:
        if state in (MASTER, *optimizer_states(source)):
            tensor = source.tensors[name, state]
            called = "param" if state == MASTER else state
            path = (f"optimizer.state.{called}.{name}",)
            found.items.append(Item(path, tensor.key, tensor.key, tensor.shape, tensor.dtype))


def _stacked(items: list[Item]) -> Iterator[Item]:
    """Layers that are alike become one key."""
    stacks: dict[tuple[str, str], dict[int, Item]] = {}
    for item in items:
        layer = LAYER.fullmatch(str(item.path[0]))
        if layer is not None and str(int(layer[2])) == layer[2]:
            stacks.setdefault((layer[1], layer[3]), {})[int(layer[2])] = item
    whole: dict[str, Item] = {}
    for (before, after), layers in stacks.items():
        alike = len({(item.shape, item.dtype) for item in layers.values()}) == 1
        if alike and sorted(layers) == list(range(len(layers))):
            for number, item in layers.items():
                whole[str(item.path[0])] = replace(
                    item, path=(before + after,), layer=(number, len(layers))
                )
    return (whole.get(str(item.path[0]), item) for item in items)


def _common(source: Manifest, found: Contents) -> dict[str, Any]:
    objects = source.objects
    own = objects.get(OBJECTS)
    written: Mapping[str, Any] = own if isinstance(own, Mapping) else {}
    grids: Mapping[str, Any] = written.get("objects") or {}
    common: dict[str, Any] = {}
    client = objects.get("client")
    for key, value in client.items() if isinstance(client, Mapping) else ():
        if not isinstance(key, str) or key in _OWN or not _is_small(value):
            why = "the common state has no place for it"
            found.losses.append(Loss(f"{CLIENT}:{key}", why))
        elif isinstance(value, list) and math.prod(grids.get(key) or (-1,)) == len(value):
            for number, one in enumerate(value):
                found.values[_shard(key, tuple(grids[key]), number),] = [one]
        else:
            common[key] = value
    if objects.get("step") is not None:
        common["iteration"] = objects["step"]
    if objects.get("scheduler") is not None:
        common["opt_param_scheduler"] = objects["scheduler"]
    common["content_metadata"] = {
        "chained_optim_avoid_prefix": True,
        **(written.get("content_metadata") or {}),
        "distrib_optim_sharding_type": _SHARDING,
        "singleton_local_shards": False,
    }
    if source.groups:
        groups = [{**g.settings, **_step(g.scalars)} for g in source.groups]
        common["optimizer"] = {
            "optimizer": {"param_groups": groups},
            "param_state_sharding_type": _SHARDING,
        }
    return common


def _shard(key: str, shape: Shape, number: int) -> str:
    """What the shard of that number in row-major order is called."""
    offset: list[int] = []
    for size in reversed(shape):
        number, at = divmod(number, size)
        offset.insert(0, at)
    return f"{key}/shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, shape))}"


def _step(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron-Core counts steps in Python's integers."""
    step = scalars.get("step")
    if isinstance(step, (np.ndarray, np.generic)) and step.ndim == 0:
        step = step.item()
    if isinstance(step, float) and step.is_integer():
        step = int(step)
    return {} if step is None else {"step": step}


def _is_small(value: Any) -> bool:
    """Whether all of a value is in memory."""
    if isinstance(value, Mapping):
        return all(map(_is_small, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_small, value))
    return not isinstance(value, (TensorRef, LeftOut))


def _lost(source: Manifest, found: Contents) -> Iterator[Loss]:
    used = {item.source for item in found.items}
    for key in source.tensors:
        if key not in used:
            client = "large tensors among the script's values aren't written"
            why = client if key[1] == CLIENT else "another state is written as the weight"
            yield Loss(key_text(key), why)
    for name in source.objects:
        if name not in ("client", "step", "scheduler") and not name.endswith(AS_WRITTEN):
            yield Loss(name, "a checkpoint of Megatron-Core has no place for it")
    for note in source.notes:
        if note.kind == "left-out":
            yield Loss(note.where, note.text)
    for number, group in enumerate(source.groups):
        for scalar in group.scalars:
            if scalar != "step":
                yield Loss(f"groups/{number}/{scalar}", "groups keep their step alone")
    shapes: dict[str, Shape] = {}
    of: dict[str, int] = {}
    for space in source.layout.spaces:
        for group_of, entries in space.in_groups().items():
            shapes.update((entry.name, entry.shape) for entry in entries)
            of.update((entry.name, group_of) for entry in entries)
    if of and members(source.groups, shapes) != of:
        yield Loss("groups", "which parameters are in which group isn't stored")
