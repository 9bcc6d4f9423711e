"""Where do the masters and the optimizer's state lie in the ranks' optimizer files?

Stages 1 and 2: a parameter group is laid end to end in ``param_shapes`` order, padded to a
multiple of 2 x P and cut in P equal parts; part r is in rank r's file. Stage 3: each parameter is
cut in ``ceil(n / P)`` elements a rank, and a rank's slices of a sub-group lie end to end
(``deepspeed/runtime/zero/stage_1_and_2.py`` and ``stage3.py`` of 0.19.8).

A group of experts is cut over the ranks that hold the same experts (``_deepspeed_experts``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.box import Shape
from reshard.builder import Builder
from reshard.dtypes import DType, dtype
from reshard.errors import CorruptError, InconsistentError, UnsupportedError
from reshard.formats._deepspeed_experts import Expert, Topology, data_first
from reshard.formats._deepspeed_load import Checkpoint, Loaded, config_of, optimizer_dict
from reshard.formats._deepspeed_settings import (
    add_scalars,
    owners_of_parts,
    scalars_text,
    settings_of,
    shared_groups,
)
from reshard.formats._deepspeed_tensor import TensorRules
from reshard.formats._torch import Values, placed
from reshard.layout import MASTER, Entry, FlatSpace
from reshard.manifest import ParamGroup
from reshard.partition import Contiguous, Partition, PerTensor
from reshard.plain import encode
from reshard.store import ShardStore
from reshard.stored import StoredTensor
from reshard.torchfile import read_tensor

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


def add_optimizer(builder: Builder, checkpoint: Checkpoint, rules: TensorRules) -> None:
    """Add the spaces of all parameter groups, and the groups' settings."""
    ranks = [[checkpoint.optims[mp, dp] for dp in range(checkpoint.world)] for mp in checkpoint.mps]
    groups, numbers = shared_groups([settings_of(builder, some) for some in ranks])
    builder.groups.extend(ParamGroup(dict(settings)) for settings in groups)
    for mp in checkpoint.mps:
        _add_model_rank(builder, checkpoint, rules, mp, ranks[mp], numbers[mp])


def _add_model_rank(
    builder: Builder,
    checkpoint: Checkpoint,
    rules: TensorRules,
    mp: int,
    ranks: Sequence[Loaded],
    numbers: Sequence[int],
) -> None:
    model = checkpoint.models[mp, 0]
    shapes = shapes_of(model)
    coords = {}
    if checkpoint.pipeline > 1:
        coords["pipeline"] = mp // checkpoint.tensor
    if checkpoint.tensor > 1:
        coords["tensor"] = mp % checkpoint.tensor
    owner = owners_of_parts(ranks[0], checkpoint.stage, len(shapes), len(numbers))
    for part, group_shapes in enumerate(shapes):
        number = numbers[owner[part]]
        shards = [_shard(builder, one, checkpoint.stage, part) for one in ranks]
        add_scalars(builder, number, _scalars(shards), shards[0].loaded)
        degree = checkpoint.world // _partition_count(ranks[0], checkpoint, part)
        topology = Topology(checkpoint.world, degree, data_first(config_of(model)))
        space = _Space(builder, checkpoint, rules, coords, part, number, group_shapes, topology)
        for block in range(degree):
            space.add(shards, block)


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
    topology: Topology

    def add(self, ranks: Sequence[Shard], block: int) -> None:
        """The space of one block of experts; of all parameters where they aren't dealt out."""
        start, step, degree = self.topology.start(block), self.topology.step, self.topology.degree
        shards = [ranks[start + step * shard] for shard in range(self.topology.shards)]
        at = {**self.coords, **({"expert": block} if degree > 1 else {})}
        entries: list[Entry] = []
        for name, shape in self.shapes.items():
            whole = self._expert(name, block) if degree > 1 else name
            entries += self.rules.entries(whole, shape, at.get("tensor", 0))
        states = _states(shards)
        space = FlatSpace(
            name=".".join([f"part{self.part}", *(f"{a}{i}" for a, i in sorted(at.items()))]),
            entries=tuple(entries),
            partition=self._partition(shards, entries),
            states=states,
            coords=at,
            group=self.group,
            shard_start=start if degree > 1 else 0,
            shard_step=step if degree > 1 else 1,
        )
        stores = {state: self._store(space, shards, state) for state in states}
        self.builder.add(space, stores)

    def _expert(self, name: str, block: int) -> str:
        """The name of an expert's parameter among all experts, from its name on its rank."""
        where = self.checkpoint.models[0, 0].path
        expert = Expert.parse(name)
        if expert is None:
            raise UnsupportedError(
                f"{name} is cut over a part of the ranks, as experts are, and is none",
                where=where,
            )
        count = self.checkpoint.experts_of(expert.layer)
        own, rest = divmod(count, self.topology.degree)
        if rest or expert.index >= own:
            raise InconsistentError(
                f"{expert.layer} has {count} experts, which doesn't fit expert {expert.index} of a "
                f"rank at an expert-parallel degree of {self.topology.degree}",
                where=where,
            )
        return str(expert.at(block * own + expert.index))

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


def _shard(builder: Builder, loaded: Loaded, stage: int, part: int) -> Shard:
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
    values = Values(builder, loaded.file)
    for state, value in _state(base, part, loaded).items():
        if isinstance(value, StoredTensor) and value.shape != ():
            tensors[str(state)] = value
        elif isinstance(value, StoredTensor):
            scalars[str(state)] = read_tensor(loaded.file, value)
        else:
            scalars[str(state)] = values.plain(value, "optimizer", str(part), str(state))
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
                f"its optimizer's scalars are {scalars_text(shard.scalars)}, but "
                f"{scalars_text(first.scalars)} in {first.loaded.path.name}",
                where=shard.loaded.path,
                hint="the files are of different steps or different runs",
            )
    return first.scalars
