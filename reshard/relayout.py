"""What does the layout of a checkpoint become at another world size or ZeRO stage?

The spaces of a parameter group at one coordinate of the mesh (DeepSpeed cuts a group in
sub-groups at stage 3) are joined and cut by the stage's rule: ``contiguous`` for stages 1 and 2,
``per_tensor`` for stage 3. Weights are replicated at stages 1 and 2 and cut at stage 3; buffers
and client tensors are replicated at all. The axes other than ``shard`` stay as they are. Boxes
that make up a tensor together, as the chunks of a mesh do, become the whole tensor again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from reshard.box import Box
from reshard.dtypes import DType
from reshard.errors import InconsistentError, RequestError
from reshard.layout import PARAM, Entry, FlatSpace, Layout
from reshard.partition import Contiguous, Partition, PerTensor, Replicated

STAGES = (0, 1, 2, 3)


def rule(stage: int, world: int) -> Partition:
    """How optimizer state is cut at a stage: stage 1's rule also stands for stage 2."""
    if stage not in STAGES:
        raise RequestError(f"there is no ZeRO stage {stage}", hint="stages are 0, 1, 2 and 3")
    if world < 1:
        raise RequestError(f"a world size of {world} makes no sense", hint="give 1 or more")
    if stage == 0:
        return Replicated(world)
    return PerTensor(world) if stage == 3 else Contiguous(world, multiple=2)


@dataclass(slots=True)
class Joined:
    """Spaces of one group at one coordinate, joined."""

    group: int | None
    coords: Mapping[str, int]
    states: Mapping[str, DType]
    entries: list[Entry] = field(default_factory=list)
    index: int = 0


def joined_groups(layout: Layout, experts: int = 1, kept: int = 1) -> list[Joined]:
    """The parameter groups of a layout, their sub-groups joined, in order.

    Parameters
    ----------
    layout
        Any.
    experts, kept
        Size of the expert axis now and in the target, which divides it.

    Raises
    ------
    InconsistentError
        If sub-groups of one group hold different states.
    """
    found: dict[tuple[int, tuple[tuple[str, int], ...]], Joined] = {}
    for space in layout.spaces:
        if space.coords.get("replicate", 0):
            continue
        coords = dict(space.coords)
        if "expert" in coords:
            coords["expert"] = coords["expert"] * kept // experts
        for group, entries in space.in_groups().items():
            key = (group, tuple(sorted(coords.items())))
            if key not in found:
                found[key] = Joined(group, coords, dict(space.states))
            elif found[key].states != dict(space.states):
                raise InconsistentError(
                    f"parts of parameter group {group} hold different states: "
                    f"{_states(found[key].states)} and {_states(space.states)}"
                )
            found[key].entries.extend(entries)
    for one in found.values():
        one.entries = _pieced(one.entries)
    return list(found.values())


def _pieced(entries: list[Entry]) -> list[Entry]:
    """Boxes that make up a whole tensor, as one entry where the first of them stands.

    That no two of them overlap is proved before (:mod:`reshard.coverage`).
    """
    if all(entry.box is None for entry in entries):
        return entries
    there: dict[str, int] = {}
    for entry in entries:
        there[entry.name] = there.get(entry.name, 0) + entry.numel
    found: dict[object, Entry] = {}
    for i, entry in enumerate(entries):
        if there[entry.name] == math.prod(entry.shape) > 0:
            found.setdefault(entry.name, Entry(entry.name, entry.shape))
        else:
            found[i] = entry
    return list(found.values())


def _states(states: Mapping[str, DType]) -> str:
    return ", ".join(f"{s} {d}" for s, d in states.items())


def ungrouped(
    layout: Layout, cast: Callable[[str, str, DType], DType] | None = None
) -> list[Joined]:
    """Tensors that belong to no parameter group, by state and element type, each box once.

    Parameters
    ----------
    layout
        Any.
    cast
        (name, state, own type) to the type in the target.
    """
    found: dict[tuple[str, DType, tuple[tuple[str, int], ...]], Joined] = {}
    seen: set[tuple[str, str, Box]] = set()
    for space in layout.spaces:
        if space.group is not None or space.coords.get("replicate", 0):
            continue
        for state, own in space.states.items():
            for entry in space.entries:
                if (entry.name, state, entry.region) in seen:
                    continue
                seen.add((entry.name, state, entry.region))
                kind = own if cast is None else cast(entry.name, state, own)
                whole = entry.box is None or entry.box.covers(entry.shape)
                coords = {} if whole else dict(space.coords)
                key = (state, kind, tuple(sorted(coords.items())))
                if key not in found:
                    found[key] = Joined(None, coords, {state: kind})
                found[key].entries.append(entry)
    for one in found.values():
        one.entries = _pieced(one.entries)
    return list(found.values())


def relayout(
    layout: Layout,
    world: int,
    stage: int,
    cast: Callable[[str, str, DType], DType] | None = None,
) -> Layout:
    """Cut a layout for another world size and stage.

    Parameters
    ----------
    layout
        The source's.
    world, stage
        The target's.
    cast
        (name, state, own type) to the type in the target, for tensors outside of groups.

    Returns
    -------
    Layout
        With the same tensors.
    """
    rule(stage, world)
    experts = layout.mesh.get("expert", 1)
    kept = experts if world % experts == 0 else math.gcd(world, experts)
    mesh = {a: n for a, n in layout.mesh.items() if a not in ("shard", "expert", "replicate")}
    mesh["shard"] = world
    if experts > 1:
        mesh["expert"] = kept
    spaces = [_group_space(g, world, stage, kept) for g in joined_groups(layout, experts, kept)]
    spaces += [_plain_space(p, world, stage) for p in ungrouped(layout, cast)]
    return Layout(tuple(spaces), mesh, stage)


def _group_space(group: Joined, world: int, stage: int, experts: int) -> FlatSpace:
    start, step = 0, 1
    if "expert" in group.coords:
        start, step = group.coords["expert"], experts
    return FlatSpace(
        name=_name(f"group{group.group}", group.coords),
        entries=tuple(group.entries),
        partition=rule(stage, world // step),
        states=group.states,
        coords=group.coords,
        group=group.group,
        shard_start=start,
        shard_step=step,
    )


def _plain_space(plain: Joined, world: int, stage: int) -> FlatSpace:
    (state, kind), *_ = plain.states.items()
    cut = stage == 3 and state == PARAM
    return FlatSpace(
        name=_name(f"{state}.{kind}", plain.coords),
        entries=tuple(plain.entries),
        partition=PerTensor(world) if cut else Replicated(world),
        states=plain.states,
        coords=plain.coords,
    )


def _name(stem: str, coords: Mapping[str, int]) -> str:
    """A space's name: ``group0.pipeline1.tensor0``."""
    return ".".join([stem, *(f"{axis}{i}" for axis, i in sorted(coords.items()))])
