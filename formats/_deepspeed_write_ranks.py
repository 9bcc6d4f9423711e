"""What does each rank of the model axis hold: its parameter groups, weights and buffers?

The model axis is pipeline x tensor. A rank's tensors are those at its coordinates, and those that
are bound to none; where nothing said how tensor-parallel parts fit together, the reader gave them
names with the rank in them, which is taken off again here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from reshard.dtypes import DType, dtype
from reshard.errors import InconsistentError, UnsupportedError
from reshard.formats._deepspeed_experts import Expert, degree_of
from reshard.formats._deepspeed_tensor import part_name
from reshard.formats._deepspeed_write_experts import Dealer
from reshard.formats._deepspeed_write_groups import unrotated
from reshard.formats._deepspeed_write_layers import layer_of
from reshard.formats._torch_sheet import Local, torch_name
from reshard.layout import BUFFER, MASTER, PARAM, Entry, FlatSpace
from reshard.manifest import Manifest, ParamGroup
from reshard.partition import Replicated

FLOAT32 = dtype("float32")
MASTERS = ("float32", "bfloat16", "float16")
"""Element types that masters can have."""


@dataclass(frozen=True, slots=True)
class Group:
    """A parameter group as one model-parallel rank has it.

    Parameters
    ----------
    index
        Its index among the target's groups.
    params
        Its parameters, in the user's order.
    states
        Element types of the master and of the optimizer's states.
    degree, block
        Of experts: into how many blocks they are dealt out, and which of them this is.
    """

    index: int
    params: tuple[Local, ...]
    states: Mapping[str, DType]
    degree: int = 1
    block: int = 0


@dataclass(frozen=True, slots=True)
class ModelRank:
    """What one rank of the model axis (pipeline x tensor) holds.

    Parameters
    ----------
    mp
        Its index.
    coords
        Where that is on the mesh.
    groups
        Parameter groups that have parameters.
    weights
        Trained and frozen parameters, in the order of the model where that is known; none in a
        pipeline, where they lie in the layers' files.
    frozen
        Names of those that are in no group.
    buffers
        Registered buffers, those of the stage in a pipeline.

    Experts are neither among the weights nor among the buffers.
    """

    mp: int
    coords: Mapping[str, int]
    groups: tuple[Group, ...]
    weights: tuple[Local, ...]
    frozen: frozenset[str]
    buffers: tuple[Local, ...]


@dataclass(frozen=True, slots=True)
class Axes:
    """Finds what of the source a model-parallel rank has.

    Parameters
    ----------
    source
        The checkpoint.
    pipeline, tensor
        Sizes of these axes.
    """

    source: Manifest
    pipeline: int
    tensor: int

    def coords(self, mp: int) -> dict[str, int]:
        """Where a model rank stands on the mesh."""
        found = {}
        if self.pipeline > 1:
            found["pipeline"] = mp // self.tensor
        if self.tensor > 1:
            found["tensor"] = mp % self.tensor
        return found

    def ungrouped(self, state: str, tensor: int) -> list[Local]:
        """All tensors of a state that a tensor-parallel rank has, on any pipeline stage."""
        spaces = (s for s in self.source.layout.spaces if state in s.states)
        return self.locals({"tensor": tensor}, spaces)

    def locals(self, coords: Mapping[str, int], spaces: Iterable[FlatSpace]) -> list[Local]:
        """The tensors of some spaces as a rank has them, each once."""
        found: dict[str, dict[Entry, None]] = {}
        tensor = coords.get("tensor", 0)
        for space in spaces:
            if not _at(space, coords) or space.coords.get("replicate", 0):
                continue
            state = next(iter(space.states))
            for entry in space.entries:
                if self.tensor == 1:
                    whole = Entry(entry.name, self.source.tensors[entry.name, state].shape)
                    found.setdefault(entry.name, {})[whole] = None
                elif (name := _local_name(entry.name, tensor, self.tensor)) is not None:
                    found.setdefault(name, {})[entry] = None
        return [_local(name, tuple(entries)) for name, entries in found.items()]


def _at(space: FlatSpace, coords: Mapping[str, int]) -> bool:
    """Whether a space stands there; one that isn't bound to a coordinate stands anywhere."""
    return all(space.coords.get(axis, index) == index for axis, index in coords.items())


def model_rank(axes: Axes, mp: int, rotated: int, groups: Sequence[Group] | None) -> ModelRank:
    """What a model rank holds.

    Parameters
    ----------
    axes
        The source.
    mp
        The rank.
    rotated
        To how many ranks the source's parameters were dealt out in turn; 0 if they weren't.
    groups
        The parameter groups, where they were found already (:func:`groups_with_experts`).
    """
    coords = axes.coords(mp)
    if groups is None:
        groups = [
            Group(index, _ordered(params, rotated), _states(axes.source, index, params))
            for index, params in _grouped(axes, coords)
        ]
    trained = {p.name: p for g in groups for p in g.params if Expert.parse(p.name) is None}
    buffers = _without_experts(axes.ungrouped(BUFFER, coords.get("tensor", 0)))
    if axes.pipeline > 1:
        mine = {layer_of(name) for name in trained}
        buffers = [b for b in buffers if layer_of(b.name) in mine]
        return ModelRank(mp, coords, tuple(groups), (), frozenset(), tuple(buffers))
    weights = {p.name: p for p in _without_experts(axes.ungrouped(PARAM, coords.get("tensor", 0)))}
    frozen = frozenset(weights) - frozenset(trained)
    weights |= {name: p for name, p in trained.items() if name not in weights}
    return ModelRank(mp, coords, tuple(groups), tuple(weights.values()), frozen, tuple(buffers))


def groups_with_experts(
    axes: Axes, dealer: Dealer, rotated: int
) -> tuple[list[Group], list[ParamGroup]]:
    """The parameter groups of a model with experts, and their settings in the target."""
    found: list[Group] = []
    settings: list[ParamGroup] = []
    source = axes.source
    grouped = dict(_grouped(axes, {}))
    every = [(index, grouped.get(index, [])) for index in range(len(source.groups))]

    def degree(one: tuple[int, list[Local]]) -> int | None:
        index, params = one
        return degree_of(source.groups[index].settings) if params else None

    for old, run in groupby(every, degree):
        some = list(run)
        if old is None:
            for index, params in some:
                if params:
                    found.append(_plain_group(source, index, params, len(settings), rotated))
                settings.append(source.groups[index])
            continue
        for dealt in dealer.deal([(source.groups[index], params) for index, params in some]):
            states = _states(source, some[0][0], [p for block in dealt.blocks for p in block])
            found += [
                Group(len(settings), params, states, dealt.degree, block)
                for block, params in enumerate(dealt.blocks)
            ]
            settings.append(dealt.group)
    return found, settings


def _plain_group(
    source: Manifest, index: int, params: Sequence[Local], number: int, rotated: int
) -> Group:
    """A group without experts of a model that has some."""
    if len(_without_experts(params)) < len(params):
        raise UnsupportedError(
            f"parameter group {index} has experts and isn't marked as a group of experts (moe, and "
            "a name ep_size_N)",
            where=source.root,
        )
    return Group(number, _ordered(params, rotated), _states(source, index, params))


def experts_of(axes: Axes, groups: Iterable[Group]) -> tuple[list[Local], list[Local]]:
    """Weights and buffers of all experts, by their names among all of them.

    Parameters
    ----------
    axes
        The source.
    groups
        Parameter groups, which may train weights that the source has as masters alone.
    """
    params, buffers = (
        {p.name: p for p in axes.ungrouped(state, 0) if Expert.parse(p.name) is not None}
        for state in (PARAM, BUFFER)
    )
    for local in (p for group in groups for p in group.params):
        name = local.entries[0].name
        if Expert.parse(name) is not None:
            params.setdefault(name, Local(name, local.shape, local.entries))
    return list(params.values()), list(buffers.values())


def _without_experts(some: Iterable[Local]) -> list[Local]:
    return [local for local in some if Expert.parse(local.name) is None]


def _ordered(params: Sequence[Local], rotated: int) -> tuple[Local, ...]:
    """Parameters in the user's order."""
    return unrotated(params, rotated) if rotated else tuple(params)


def _grouped(axes: Axes, coords: Mapping[str, int]) -> list[tuple[int, list[Local]]]:
    """The parameters of each group that has some, as they lie in the source."""
    spaces: dict[int, list[FlatSpace]] = {}
    for space in axes.source.layout.spaces:
        if not _at(space, coords):
            continue
        for group, entries in space.in_groups().items():
            # which entries there are is asked, not where they lie
            mine = replace(space, entries=entries, group=group, partition=Replicated(1))
            spaces.setdefault(group, []).append(mine)
    return [(index, axes.locals(coords, spaces[index])) for index in sorted(spaces)]


def _local_name(name: str, mp: int, degree: int) -> str | None:
    """What the rank calls a tensor; ``None`` for another rank's."""
    for rank in range(degree):
        suffix = part_name("", rank)
        if name.endswith(suffix):
            return name.removesuffix(suffix) if rank == mp else None
    return name


def _local(name: str, entries: tuple[Entry, ...]) -> Local:
    shapes = [e.local_shape for e in entries]
    if len(shapes) == 1:
        return Local(name, shapes[0], entries)
    if len({s[1:] for s in shapes}) != 1 or not all(shapes):
        raise UnsupportedError(f"{name} is made of parts that don't lie end to end on dim 0")
    return Local(name, (sum(s[0] for s in shapes), *shapes[0][1:]), entries)


def _states(source: Manifest, group: int, params: Sequence[Local]) -> dict[str, DType]:
    """The states of a group: of all its parameters the same."""
    names = [e.name for p in params for e in p.entries]
    known = [s for s in source.states if s not in (PARAM, BUFFER, MASTER)]
    found: dict[str, DType] = {}
    for state in (MASTER, *known):
        kinds = {_dtype(source, name, state) for name in names}
        if kinds == {None}:
            continue
        if len(kinds) > 1:
            texts = sorted("none" if k is None else str(k) for k in kinds)
            raise UnsupportedError(
                f"{state} of parameter group {group} is {' for some parameters and '.join(texts)} "
                "for others, but DeepSpeed keeps a group in one flat tensor",
                where=source.root,
            )
        kind = kinds.pop()
        assert kind is not None
        torch_name(kind)
        found[state] = kind
    if found[MASTER].name not in MASTERS:
        raise UnsupportedError(f"DeepSpeed has no {found[MASTER]} masters", where=source.root)
    return found


def _dtype(source: Manifest, name: str, state: str) -> DType | None:
    tensor = source.tensors.get((name, state))
    if tensor is not None:
        return tensor.dtype
    if state != MASTER:
        return None
    weight = source.tensors.get((name, PARAM))
    if weight is None:
        raise InconsistentError(f"{name} is in a parameter group and has no weights")
    return FLOAT32 if weight.dtype.name in MASTERS else weight.dtype


def cannot_write(what: str) -> UnsupportedError:
    """The error for checkpoints of a kind that is read, but not written."""
    return UnsupportedError(
        f"DeepSpeed checkpoints with {what} can't be written",
        hint="keep it in the native format (--format native), or export the weights "
        "(--format safetensors)",
    )
