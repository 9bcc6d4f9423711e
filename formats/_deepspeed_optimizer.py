"""Where do the masters and the optimizer's state lie in the ranks' optimizer files?

Stages 1 and 2: a parameter group is laid end to end in ``param_shapes`` order, padded to a
multiple of 2 x P and cut in P equal parts; part r is in rank r's file. Stage 3: each parameter is
cut in ``ceil(n / P)`` elements a rank, and a rank's slices of a sub-group lie end to end
(``deepspeed/runtime/zero/stage_1_and_2.py`` and ``stage3.py`` of 0.19.8).

A group of experts is cut over the ranks that hold the same experts: r, r + ep, r + 2 ep, …
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reshard.box import Shape
from reshard.builder import Builder
from reshard.dtypes import DType, dtype
from reshard.errors import CorruptError, InconsistentError, UnsupportedError
from reshard.formats._deepspeed_load import Checkpoint, Loaded, optimizer_dict
from reshard.formats._deepspeed_tensor import TensorRules
from reshard.formats._torch import placed
from reshard.layout import MASTER, Entry, FlatSpace
from reshard.manifest import ParamGroup
from reshard.partition import Contiguous, Partition, PerTensor
from reshard.plain import encode
from reshard.store import ShardStore
from reshard.stored import StoredTensor
from reshard.torchfile import read_tensor

EXPERT = re.compile(r"(.*\bdeepspeed_experts\.)(\d+)(\..*)")
"""A parameter of an expert: prefix, the expert's index among a rank's own, and the rest."""

Shapes = Sequence[Mapping[str, Shape]]


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of one group or sub-group.

    Parameters
    ----------
    loaded
        The rank's file.
    tensors
        State to the flat tensor.
    scalars
        Optimizer state that is one value: ``step``.
    """

    loaded: Loaded
    tensors: Mapping[str, StoredTensor]
    scalars: Mapping[str, Any]


def shapes_of(loaded: Loaded) -> list[dict[str, Shape]]:
    """``param_shapes`` of a model file: a dict a group (stage 3: a sub-group)."""
    found = loaded.data.get("param_shapes")
    if isinstance(found, Mapping):
        found = [found]
    if not isinstance(found, (list, tuple)):
        raise CorruptError("holds no 'param_shapes'", where=loaded.path)
    shapes = []
    for group in found:
        if not isinstance(group, Mapping):
            raise CorruptError("'param_shapes' isn't a list of dicts", where=loaded.path)
        shapes.append({str(k): _shape(v, loaded, str(k)) for k, v in group.items()})
    return shapes


def _shape(value: Any, loaded: Loaded, name: str) -> Shape:
    if not isinstance(value, (tuple, list)) or not all(
        isinstance(n, int) and n >= 0 for n in value
    ):
        raise CorruptError(f"{name} has the shape {value!r:.80}", where=loaded.path)
    return tuple(value)


def expert_name(name: str, first: int) -> str:
    """The name of an expert's parameter among all experts, from its name on one rank."""
    found = EXPERT.fullmatch(name)
    return name if found is None else f"{found[1]}{int(found[2]) + first}{found[3]}"


def add_optimizer(builder: Builder, checkpoint: Checkpoint, rules: TensorRules) -> None:
    """Add the spaces of all parameter groups, and the groups' settings."""
    for mp in checkpoint.mps:
        model = checkpoint.models[mp, 0]
        shapes = shapes_of(model)
        coords = {}
        if checkpoint.pipeline > 1:
            coords["pipeline"] = mp // checkpoint.tensor
        if checkpoint.tensor > 1:
            coords["tensor"] = mp % checkpoint.tensor
        ranks = [checkpoint.optims[mp, dp] for dp in range(checkpoint.world)]
        settings = _settings(ranks)
        numbers = [_group(builder, s, checkpoint) for s in settings]
        owner = _owner_of_parts(ranks[0], checkpoint.stage, len(shapes), len(settings))
        experts = 1
        for part, group_shapes in enumerate(shapes):
            group = owner[part]
            shards = [_shard(one, checkpoint.stage, part) for one in ranks]
            scalars = _scalars(shards)
            number = numbers[group]
            _check_step(builder, number, scalars, shards[0].loaded)
            parts = _partition_count(ranks[0], checkpoint, part)
            experts = max(experts, checkpoint.world // parts)
            builder_space = _Space(
                builder, checkpoint, rules, dict(coords), part, number, group_shapes
            )
            if parts == checkpoint.world:
                builder_space.add(shards, {}, 0, 1)
                continue
            step = checkpoint.world // parts
            local = _experts_of(group_shapes)
            for expert in range(step):
                builder_space.add(shards[expert::step], {"expert": expert}, expert, step, local)


@dataclass(frozen=True, slots=True)
class _Space:
    """Makes the flat spaces of one group (or sub-group) at one coordinate."""

    builder: Builder
    checkpoint: Checkpoint
    rules: TensorRules
    coords: dict[str, int]
    part: int
    group: int
    shapes: Mapping[str, Shape]

    def add(
        self,
        shards: Sequence[Shard],
        coords: Mapping[str, int],
        start: int,
        step: int,
        experts: int = 0,
    ) -> None:
        entries: list[Entry] = []
        tensor = self.coords.get("tensor", 0)
        for name, shape in self.shapes.items():
            whole = expert_name(name, start * experts) if "expert" in coords else name
            entries += self.rules.entries(whole, shape, tensor)
        states = _states(shards)
        at = {**self.coords, **coords}
        name = ".".join([f"part{self.part}", *(f"{a}{i}" for a, i in sorted(at.items()))])
        space = FlatSpace(
            name=name,
            entries=tuple(entries),
            partition=self._partition(shards, entries),
            states=states,
            coords=at,
            group=self.group,
            shard_start=start,
            shard_step=step,
        )
        stores = {state: self._store(space, shards, state) for state in states}
        self.builder.add(space, stores)

    def _partition(self, shards: Sequence[Shard], entries: Sequence[Entry]) -> Partition:
        if self.checkpoint.stage == 3:
            return PerTensor(len(shards))
        align = _alignment(shards[0].loaded, self.part, [e.numel for e in entries])
        return Contiguous(len(shards), align=align, multiple=2)

    def _store(self, space: FlatSpace, shards: Sequence[Shard], state: str) -> ShardStore:
        files, offsets = [], []
        part = space.ruler.part if space.numel else 0
        used = _used(space, self.checkpoint.stage)
        for index, shard in enumerate(shards):
            tensor = shard.tensors[state]
            real = used[index]
            if tensor.numel not in (part, real) or not tensor.contiguous:
                raise InconsistentError(
                    f"{state} of group {self.part} has {tensor.numel} elements on rank "
                    f"{shard.loaded.dp}; its parameters make {part}"
                    + (f" ({real} without padding)" if real != part else ""),
                    where=shard.loaded.path,
                    hint="the file is of another world size or another run",
                )
            one = placed(self.builder, shard.loaded.file, tensor, Entry(state, (tensor.numel,)))
            files.append(one.file)
            offsets.append(one.offset)
        return ShardStore.per_shard(space.ruler.part, files, offsets)


def _used(space: FlatSpace, stage: int) -> list[int]:
    """Elements of each shard up to its last one that isn't padding of the space's tail."""
    part = space.ruler.part
    if stage == 3:
        return [part] * space.shards
    phase, numel = space.ruler.phase, space.ruler.numel
    end = int(phase[-1] + numel[-1]) if len(numel) else 0
    return [min(part, max(0, end - i * part)) for i in range(space.shards)]


def _states(shards: Sequence[Shard]) -> dict[str, DType]:
    """The states of a group, which all ranks must have."""
    first = shards[0]
    states = {s: dtype(t.dtype) for s, t in first.tensors.items()}
    for shard in shards:
        theirs = {s: dtype(t.dtype) for s, t in shard.tensors.items()}
        if theirs != states:
            raise InconsistentError(
                f"holds {_text(theirs)}, but {first.loaded.path.name} holds {_text(states)}",
                where=shard.loaded.path,
                hint="the files are of different runs",
            )
    return states


def _text(states: Mapping[str, DType]) -> str:
    return ", ".join(f"{s} ({d})" for s, d in states.items())


def _partition_count(loaded: Loaded, checkpoint: Checkpoint, part: int) -> int:
    """Over how many ranks a group is cut."""
    said = optimizer_dict(loaded).get("partition_count", checkpoint.world)
    count = said[part] if isinstance(said, (list, tuple)) and part < len(said) else said
    if not isinstance(count, int) or count < 1:
        raise CorruptError(f"partition_count is {said!r:.80}", where=loaded.path)
    if checkpoint.world % count or (count != checkpoint.world and checkpoint.stage == 3):
        raise InconsistentError(
            f"group {part} is cut over {count} ranks, but {checkpoint.world} wrote the checkpoint",
            where=loaded.path,
            hint="the file is of another world size",
        )
    return count


def _experts_of(shapes: Mapping[str, Shape]) -> int:
    """How many experts a rank holds."""
    found = [EXPERT.fullmatch(name) for name in shapes]
    return max((int(f[2]) for f in found if f is not None), default=-1) + 1


def _alignment(loaded: Loaded, part: int, numel: Sequence[int]) -> int:
    """To how many elements parameters are aligned, from the paddings that the file lists."""
    said = optimizer_dict(loaded).get("param_alignment_paddings")
    if not isinstance(said, (list, tuple)) or part >= len(said) or not any(said[part]):
        return 1
    paddings = list(said[part])[:-1]  # the last parameter is followed by the group's padding
    for align in (2, 4, 8, 16, 32, 64):
        if len(paddings) + 1 == len(numel) and all(
            p == -n % align for p, n in zip(paddings, numel, strict=False)
        ):
            return align
    raise UnsupportedError(
        f"group {part} is padded after its parameters by no rule that is known: {paddings!r:.100}",
        where=loaded.path,
    )


def _shard(loaded: Loaded, stage: int, part: int) -> Shard:
    optimizer = optimizer_dict(loaded)
    if stage == 3:
        masters, base = optimizer.get("fp32_flat_groups"), optimizer.get("optimizer_state_dict")
    else:
        masters = optimizer.get("single_partition_of_fp32_groups")
        base = optimizer.get("base_optimizer_state")
    if not isinstance(masters, (list, tuple)) or part >= len(masters):
        raise InconsistentError(
            f"has {len(masters) if isinstance(masters, (list, tuple)) else 'no'} flat groups, "
            f"but the model has a group {part}",
            where=loaded.path,
            hint="the file is of another run",
        )
    tensors = {MASTER: masters[part]}
    if not isinstance(masters[part], StoredTensor):
        raise CorruptError(f"master {part} isn't a tensor", where=loaded.path)
    scalars: dict[str, Any] = {}
    for state, value in _state(base, part, loaded).items():
        if isinstance(value, StoredTensor) and value.shape != ():
            tensors[str(state)] = value
        elif isinstance(value, StoredTensor):
            scalars[str(state)] = read_tensor(loaded.file, value)
        else:
            scalars[str(state)] = value
    return Shard(loaded, tensors, scalars)


def _state(base: Any, part: int, loaded: Loaded) -> Mapping[str, Any]:
    """The base optimizer's state of one flat group (a list in elastic checkpoints)."""
    if isinstance(base, (list, tuple)):
        found = base[part] if part < len(base) else {}
    elif isinstance(base, Mapping):
        states = base.get("state")
        found = states.get(part, {}) if isinstance(states, Mapping) else {}
    else:
        raise CorruptError("holds no state of the base optimizer", where=loaded.path)
    if not isinstance(found, Mapping):
        raise CorruptError(f"the optimizer's state {part} isn't a dict", where=loaded.path)
    return found


def _scalars(shards: Sequence[Shard]) -> Mapping[str, Any]:
    first = shards[0]
    for shard in shards:
        if encode(dict(shard.scalars)) != encode(dict(first.scalars)):
            raise InconsistentError(
                f"its optimizer's scalars are {_plain(shard.scalars)}, but "
                f"{_plain(first.scalars)} in {first.loaded.path.name}",
                where=shard.loaded.path,
                hint="the files are of different steps or different runs",
            )
    return first.scalars


def _plain(scalars: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={np.asarray(v).item()!r}" for k, v in scalars.items())


def _settings(ranks: Sequence[Loaded]) -> list[Mapping[str, Any]]:
    """The settings of the parameter groups, without what names their parameters."""
    found = [_param_groups(loaded) for loaded in ranks]
    for loaded, groups in zip(ranks, found, strict=True):
        if groups != found[0]:
            raise InconsistentError(
                f"its parameter groups are {groups!r:.300}, but {found[0]!r:.300} in "
                f"{ranks[0].path.name}",
                where=loaded.path,
                hint="the files are of different runs",
            )
    return found[0]


def _param_groups(loaded: Loaded) -> list[Mapping[str, Any]]:
    optimizer = optimizer_dict(loaded)
    base = optimizer.get("optimizer_state_dict", optimizer.get("base_optimizer_state"))
    groups = base.get("param_groups") if isinstance(base, Mapping) else None
    if groups is None:  # elastic checkpoints don't have them
        masters = optimizer.get("single_partition_of_fp32_groups", ())
        groups = [{} for _ in masters]
    # a fused optimizer's group counts no steps: its "step" stays 0
    return [{k: v for k, v in g.items() if k not in ("params", "step")} for g in groups]


def _owner_of_parts(loaded: Loaded, stage: int, parts: int, groups: int) -> list[int]:
    """The parameter group of each flat group: stage 3 cuts groups in sub-groups."""
    if stage != 3:
        if parts != groups:
            raise InconsistentError(
                f"has {groups} parameter groups, but the model's file lists {parts}",
                where=loaded.path,
            )
        return list(range(parts))
    base = optimizer_dict(loaded).get("optimizer_state_dict")
    listed = base.get("param_groups", []) if isinstance(base, Mapping) else []
    owner = {p: i for i, g in enumerate(listed) for p in g.get("params", ())}
    if sorted(owner) != list(range(parts)):
        raise InconsistentError(
            f"its parameter groups list the sub-groups {sorted(owner)}, but the model's file "
            f"has {parts}",
            where=loaded.path,
        )
    return [owner[i] for i in range(parts)]


def _group(builder: Builder, settings: Mapping[str, Any], checkpoint: Checkpoint) -> int:
    """The number of a parameter group: pipeline stages share groups of the same settings."""
    for number, group in enumerate(builder.groups):
        if checkpoint.pipeline * checkpoint.tensor > 1 and dict(group.settings) == dict(settings):
            return number
    builder.groups.append(ParamGroup(dict(settings)))
    return len(builder.groups) - 1


def _check_step(builder: Builder, number: int, scalars: Mapping[str, Any], loaded: Loaded) -> None:
    group = builder.groups[number]
    if not group.scalars:
        builder.groups[number] = ParamGroup(group.settings, dict(scalars), group.optimizer)
    elif scalars and encode(dict(group.scalars)) != encode(dict(scalars)):
        raise InconsistentError(
            f"its optimizer's scalars are {_plain(scalars)}, but {_plain(group.scalars)} in "
            "another part of the same parameter group",
            where=loaded.path,
        )
