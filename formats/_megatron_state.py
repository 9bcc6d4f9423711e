"""What does a Megatron-Core checkpoint hold that isn't tensors?

The **common state** (iteration, arguments, the scheduler, parameter groups) and **sharded objects**
(RNG states, extra states of modules), each a list of its shards in row-major order. Which parameter
was in which group isn't stored. With one group it is plain; two that differ in ``wd_mult`` as
Megatron-Core's default makes them are told apart by its rule (no weight decay for biases and 1-D
parameters), and that is noted; otherwise parameters are in no group, and a note says so.

Source: Megatron-Core 0.8 to 0.19, ``optimizer/__init__.py`` (``_get_param_groups``) and
``optimizer/distrib_optimizer.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reshard.box import Shape
from reshard.builder import Builder, Placed
from reshard.errors import CorruptError, InconsistentError
from reshard.format import AS_WRITTEN
from reshard.formats._megatron_parts import Contents, Objects
from reshard.formats._torch import Values
from reshard.layout import CLIENT
from reshard.manifest import ParamGroup
from reshard.plain import encode
from reshard.torchfile import TorchFile

OBJECTS = "megatron" + AS_WRITTEN
"""The key of a manifest's objects under which stands what only this format needs."""

_GROUPS = "param_groups"
_STEP = "step"
_OF_RANKS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.(.+)")


class State:
    """Reads what isn't tensors.

    Parameters
    ----------
    builder
        The manifest in the making.
    contents
        What is in the checkpoint.
    """

    def __init__(self, builder: Builder, contents: Contents) -> None:
        self._builder = builder
        self._contents = contents
        self._placed: list[Placed] = []

    def add(self) -> None:
        """Add everything to the manifest."""
        common = self._plain(self._contents.common, "common")
        if not isinstance(common, dict):
            raise CorruptError("isn't a dict", where=self._contents.common.path)
        optimizer = common.pop("optimizer", None)
        groups = list(_groups(optimizer))
        written: dict[str, Any] = {}
        if optimizer is not None:
            written["optimizer"] = _without_groups(optimizer)
        if "content_metadata" in common:
            written["content_metadata"] = common.pop("content_metadata")
        of_ranks: list[list[dict[str, Any]]] = []
        grids: dict[str, list[int]] = {}
        objects = self._builder.objects
        for key, found in self._contents.objects.items():
            match = _OF_RANKS.fullmatch(key)
            if match is not None:
                if match[1] == "optimizer":
                    of_ranks.append(list(_groups(self._only(key, found))))
                continue
            if key in common:
                raise CorruptError(f"{key} is a sharded object and common state", where=key)
            common[key] = self._shards(key, found)
            grids[key] = list(found.shape)
        if grids:
            written["objects"] = grids
        self._agree(of_ranks)
        self._builder.groups += map(_group, groups or (of_ranks[0] if of_ranks else []))
        if type(common.get("iteration")) is int:
            objects["step"] = common.pop("iteration")
        if isinstance(common.get("opt_param_scheduler"), dict):
            objects["scheduler"] = common.pop("opt_param_scheduler")
        if common:
            objects["client"] = common
        objects[OBJECTS] = written
        self._builder.add_placed("client.inside", CLIENT, self._placed)

    def _plain(self, file: TorchFile, prefix: str) -> Any:
        value = file.value
        if prefix == "common" and isinstance(value, list) and value:
            value = value[0]
        values = Values(self._builder, file, prefix=f"{prefix}/")
        found = values.plain(value)
        self._placed += values.tensors
        return found

    def _shards(self, key: str, found: Objects) -> list[Any]:
        result = []
        for number, opener in enumerate(found.shards):
            file = opener()
            if isinstance(file.value, list) and len(file.value) == 1:
                file = TorchFile(file.path, file.value[0], file.opaque, file.members)
            result.append(self._plain(file, f"{key}/{number}"))
        return result

    def _only(self, key: str, found: Objects) -> Any:
        shards = self._shards(key, found)
        if len(shards) != 1:
            raise CorruptError(f"{key} has {len(shards)} shards", where=self._builder.root)
        return shards[0]

    def _agree(self, of_ranks: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Ranks of the model's axes must have the same groups, at the same step."""
        for groups in of_ranks:
            if encode(list(groups)) != encode(list(of_ranks[0])):
                raise InconsistentError(
                    "the parameter groups of its ranks differ",
                    where=self._builder.root,
                    hint="the ranks were at different steps, or their models have different groups",
                )


def _groups(value: Any) -> Iterable[dict[str, Any]]:
    """All parameter groups in a value, in its order."""
    if not isinstance(value, Mapping):
        return
    found = value.get(_GROUPS)
    if isinstance(found, list) and all(isinstance(group, Mapping) for group in found):
        state = value.get("state")
        step = state.get("common_step") if isinstance(state, Mapping) else None
        for group in found:
            yield ({_STEP: step} if step is not None else {}) | dict(group)
        return
    for one in value.values():
        yield from _groups(one)


def _without_groups(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {k: _without_groups(v) for k, v in value.items() if k != _GROUPS}


def _group(settings: Mapping[str, Any]) -> ParamGroup:
    own = {k: v for k, v in settings.items() if k not in (_STEP, "params")}
    scalars = {_STEP: settings[_STEP]} if settings.get(_STEP) is not None else {}
    return ParamGroup(own, scalars)


def assign(builder: Builder, shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Which parameter group each parameter that has state is in; what isn't stored is noted.

    Parameters
    ----------
    builder
        Has the groups; notes are added.
    shapes
        Of the parameters that have state, by name.
    """
    groups = builder.groups
    found = members(groups, shapes)
    if len(groups) > 1 and shapes:
        text = f"which parameters were in which of the {len(groups)} groups isn't stored"
        if found:
            text += (
                ": biases and 1-D parameters were put into the group without weight decay, as "
                "Megatron-Core does by default"
            )
        builder.note("note", text, "groups")
    return found


def members(groups: Sequence[ParamGroup], shapes: Mapping[str, Shape]) -> dict[str, int]:
    """The group of each parameter, as far as that can be told of the groups."""
    if len(groups) == 1:
        return dict.fromkeys(shapes, 0)
    decay = [group.settings.get("wd_mult") for group in groups]
    others = {repr(encode(_others(group))) for group in groups}
    if sorted(decay, key=repr) != [0.0, 1.0] or len(others) != 1:
        return {}
    return {
        name: decay.index(0.0 if len(shape) == 1 or name.endswith(".bias") else 1.0)
        for name, shape in shapes.items()
    }


def _others(group: ParamGroup) -> dict[str, Any]:
    """What both of the default's groups have alike."""
    own = {k: v for k, v in group.settings.items() if k != "wd_mult"}
    return {**own, **group.scalars}
