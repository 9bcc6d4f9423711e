"""What does a model file hold?

One a model-parallel rank at stages 1 and 2, one a data-parallel rank as well at stage 3. The keys
are those of ``_common_checkpoint_state`` in ``deepspeed/runtime/engine.py`` (0.19.8); the script's
own stand beside them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from reshard.dtypes import DType
from reshard.errors import InconsistentError
from reshard.format import Loss
from reshard.formats._deepspeed_experts import Expert
from reshard.formats._deepspeed_write_groups import Flat
from reshard.formats._deepspeed_write_ranks import ModelRank
from reshard.formats._deepspeed_write_state import State, section
from reshard.formats._deepspeed_write_values import VERSION
from reshard.formats._torch_plain import Plain
from reshard.formats._torch_sheet import Local, Sheet
from reshard.layout import BUFFER, PARAM, FlatSpace
from reshard.partition import PerTensor
from reshard.stored import Size, StoredTensor

OWN = ("data_sampler", "random_ltd")
"""Parts of DeepSpeed's state that are written as they are."""


def frozen_spaces(state: State, rank: ModelRank) -> list[tuple[FlatSpace, tuple[Local, ...]]]:
    """The flat spaces of frozen parameters at stage 3, one an element type."""
    kinds: dict[DType, list[Local]] = {}
    for local in rank.weights:
        if local.name in rank.frozen:
            kinds.setdefault(state.kind(local), []).append(local)
    found = []
    for kind, some in kinds.items():
        name = ".".join(["frozen", str(kind), *(f"{a}{i}" for a, i in rank.coords.items())])
        entries = tuple(e for local in some for e in local.entries)
        space = FlatSpace(name, entries, PerTensor(state.world), {PARAM: kind}, rank.coords)
        found.append((space, tuple(some)))
    return found


def model_file(
    state: State,
    rank: ModelRank,
    flats: Sequence[Flat],
    sheet: Sheet,
    *,
    first: bool = True,
    of: int = 0,
    lost: Callable[[Loss], None] = lambda _: None,
) -> dict[str, Any]:
    """The value of a model file.

    Parameters
    ----------
    state
        What goes into the files.
    rank
        The model-parallel rank.
    flats
        The flat groups of its first data-parallel rank.
    sheet
        Gets the file's storages.
    first
        Whether it is the file of data-parallel rank 0.
    of
        The source's rank whose values the script's own state has.
    lost
        Told of values that can't be carried.
    """
    plain = Plain(sheet, state.source, lost)
    objects, engine = state.source.objects, state.engine
    step = objects.get("step")
    frozen = [w for w in rank.weights if w.name in rank.frozen] if state.stage > 1 else None
    # the sizes of a model with experts are tuples: DeepSpeed copies what it saves there
    size: type[tuple[int, ...]] = tuple if state.moe else Size
    value: dict[str, Any] = {
        "module": None if state.layers else _module(state, rank, sheet),
        "buffer_names": [*(b.name for b in rank.buffers), *_buffers_of_experts(state, flats)],
        "optimizer": None,
        "param_shapes": [_shapes(flat.params, size) for flat in flats],
        "frozen_param_shapes": None if frozen is None else _shapes(frozen, size),
        "shared_params": _shared(state, rank) if first else {},
        "frozen_param_fragments": (
            None if frozen is None else _fragments(state, rank, frozen, sheet)
        ),
        "lr_scheduler": plain.value(objects.get("scheduler"), "lr_scheduler"),
        **{key: plain.value(engine.get(key), key) for key in OWN},
        "skipped_steps": engine.get("skipped_steps", 0),
        "global_steps": step if isinstance(step, int) else 0,
        "global_samples": engine.get("global_samples"),
        "dp_world_size": state.world,
        "mp_world_size": len(state.ranks),
        "checkpoint_parallel_dimensions": {
            "pp_degree": state.pipeline,
            "tp_degree": state.tensor,
        },
        "ds_config": plain.mapping(state.config, "ds_config"),
        "ds_version": engine.get("version") or VERSION,
        "universal_checkpoint_info": plain.value(
            engine.get("universal_checkpoint_info"), "universal_checkpoint_info"
        ),
    }
    if state.moe:
        value |= {"num_experts": list(state.moe.values()), "ds_autoep_layers": None}
    for key in ("global_samples", "universal_checkpoint_info"):
        if value[key] is None:
            del value[key]
    client = plain.mapping(client_of(state, of), "client:")
    return {**value, **{k: v for k, v in client.items() if k not in value}}


def client_of(state: State, rank: int) -> dict[str, Any]:
    """The script's own state of a rank of the source, as plain data."""
    client = dict(section(state.source.objects, "client"))
    if rank:
        differing = section(section(state.source.objects, "per_rank"), "client")
        client.update({key: values[rank] for key, values in differing.items()})
    return client


def _module(state: State, rank: ModelRank, sheet: Sheet) -> OrderedDict[str, StoredTensor]:
    """All names of the model's state dict; at stage 3 parameters are placeholders."""
    module: OrderedDict[str, StoredTensor] = OrderedDict()
    for local in rank.weights:
        kind = state.kind(local)
        empty = state.stage == 3
        module[local.name] = sheet.empty(kind) if empty else sheet.whole(PARAM, local, kind)
    for alias, name in state.source.aliases.items():
        if name not in module:
            raise InconsistentError(
                f"{alias} is tied to {name}, which isn't there", where=state.source.root
            )
        module[alias] = module[name]
    for local in rank.buffers:
        kind = state.source.tensors[local.entries[0].name, BUFFER].dtype
        module[local.name] = sheet.whole(BUFFER, local, kind)
    return module


def _shapes(params: Sequence[Local], size: type[tuple[int, ...]]) -> OrderedDict[str, Any]:
    return OrderedDict((p.name, size(p.shape)) for p in params)


def _buffers_of_experts(state: State, flats: Sequence[Flat]) -> list[str]:
    """Names of the buffers of rank 0's experts, which it numbers as all experts are."""
    own: dict[str, int] = {}
    for flat in flats:
        for local in flat.params:
            expert = Expert.parse(local.name)
            if expert is not None:
                own[expert.layer] = state.moe[expert.layer] * flat.space.shards // state.world
    found = []
    for name in (name for file in state.experts for name in file.buffers):
        expert = Expert.parse(name)
        assert expert is not None
        if expert.index < own.get(expert.layer, state.moe[expert.layer]):
            found.append(name)
    return found


def _shared(state: State, rank: ModelRank) -> dict[str, str]:
    names = {local.name for local in rank.weights}
    return {alias: name for alias, name in state.source.aliases.items() if name in names}


def _fragments(
    state: State, rank: ModelRank, frozen: Sequence[Local], sheet: Sheet
) -> OrderedDict[str, StoredTensor]:
    """Frozen parameters: whole at stage 2, a rank's part of each at stage 3."""
    if state.stage == 2:
        return OrderedDict((p.name, sheet.whole(PARAM, p, state.kind(p))) for p in frozen)
    parts: dict[str, StoredTensor] = {}
    for space, some in frozen_spaces(state, rank):
        for local, start in zip(some, space.ruler.base.tolist(), strict=True):
            count = -(-local.numel // state.world)
            parts[local.name] = sheet.slice(space, PARAM, start, count)
    return OrderedDict((p.name, parts[p.name]) for p in frozen)
