"""What of a checkpoint goes into DeepSpeed's files, and what of it can't?

A source may be of any format, so that everything but the tensors and the parameter groups may be
missing. This module decides the stage, the element types and the configuration, and refuses what
DeepSpeed couldn't resume from; what each model-parallel rank holds is found by
``_deepspeed_write_ranks``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reshard.dtypes import BY_NAME, FLOATS, DType, dtype
from reshard.errors import RequestError, UnsupportedError
from reshard.format import Request
from reshard.formats._deepspeed_experts import degree_of
from reshard.formats._deepspeed_tensor import Part, mapped_anew
from reshard.formats._deepspeed_write_experts import Dealer, expert_files, moe_layers
from reshard.formats._deepspeed_write_layers import Layer, layers_of
from reshard.formats._deepspeed_write_ranks import (
    Axes,
    ModelRank,
    cannot_write,
    experts_of,
    groups_with_experts,
    model_rank,
)
from reshard.formats._torch_sheet import Local
from reshard.layout import MASTER, PARAM, TensorKey
from reshard.manifest import Manifest, ParamGroup

BFLOAT16 = dtype("bfloat16")


@dataclass(frozen=True, slots=True)
class State:
    """All that goes into the files.

    Parameters
    ----------
    source
        The checkpoint.
    stage, world
        Of the target.
    dtype
        Element type of the model.
    groups
        The parameter groups.
    ranks
        The model-parallel ranks.
    tensor
        Size of the tensor axis; the model rank is pipeline index x tensor + tensor index.
    layers
        The files of a pipeline's layers.
    moe
        The MoE layers, in order, and how many experts each has.
    experts
        The files of all experts.
    engine
        DeepSpeed's own state, as far as the source has it.
    config
        DeepSpeed's configuration for the target.
    bf16_optimizer
        Whether the engine will be BF16_Optimizer.
    kinds
        Element types of weights, by the tensor's name.
    origin
        Target tensors that are made of other source tensors.
    """

    source: Manifest
    stage: int
    world: int
    dtype: DType
    groups: tuple[ParamGroup, ...]
    ranks: tuple[ModelRank, ...]
    tensor: int
    layers: tuple[Layer, ...]
    moe: Mapping[str, int]
    experts: tuple[Layer, ...]
    engine: Mapping[str, Any]
    config: Mapping[str, Any]
    bf16_optimizer: bool
    kinds: Mapping[str, DType]
    origin: Mapping[TensorKey, TensorKey] = field(default_factory=dict[TensorKey, TensorKey])

    @property
    def zero(self) -> Mapping[str, Any]:
        """The ``zero_optimization`` section."""
        return section(self.config, "zero_optimization")

    @property
    def pipeline(self) -> int:
        """Size of the pipeline axis."""
        return len(self.ranks) // self.tensor

    def kind(self, local: Local) -> DType:
        """The element type of a weight."""
        return self.kinds[local.entries[0].name]


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A section of a configuration, empty where there is none."""
    found = config.get(key)
    return found if isinstance(found, Mapping) else {}


def gather(source: Manifest, request: Request) -> State:
    """Find what goes into the files.

    Raises
    ------
    UnsupportedError
        If DeepSpeed couldn't resume from what the source holds.
    InconsistentError
        If tensors of one parameter group don't fit together.
    """
    stage, world = _target(source, request)
    engine = section(source.objects, "deepspeed")
    _check_source(source, engine, stage)
    axes = Axes(source, source.layout.mesh.get("pipeline", 1), source.layout.mesh.get("tensor", 1))
    rotated = _rotation(source, engine)
    moe = moe_layers(source)
    _check_experts(axes, request, stage, moe)
    groups, found = source.groups, None
    if moe:
        dealer = Dealer(moe, world, rotated, request.expert_parallel)
        found, settings = groups_with_experts(axes, dealer, rotated)
        groups = tuple(settings)
    ranks = tuple(model_rank(axes, mp, rotated, found) for mp in range(axes.pipeline * axes.tensor))
    layers = layers_of(source, axes.ungrouped, axes.tensor) if axes.pipeline > 1 else ()
    experts = expert_files(moe, *experts_of(axes, found or ()))
    weights = [w for rank in ranks for w in rank.weights]
    weights += [w for file in (*layers, *experts) for w in file.params.values()]
    zero = section(section(engine, "config"), "zero_optimization")
    if stage == 3 or zero.get("parameter_alignment"):
        _check_one_part(weights)
    model = _model_dtype(source, request, engine, weights)
    trained = {e.name: None for r in ranks for g in r.groups for p in g.params for e in p.entries}
    _check_frozen(experts, trained, stage)
    kinds: dict[str, DType] = {}
    origin: dict[TensorKey, TensorKey] = {}
    for entry in (e for weight in weights for e in weight.entries):
        own = source.tensors.get((entry.name, PARAM))
        kinds[entry.name] = request.casts.of(entry.name, model if own is None else own.dtype)
        if own is None and stage < 3:
            origin[entry.name, PARAM] = (entry.name, MASTER)
    for name in trained:
        if (name, MASTER) not in source.tensors:
            origin[name, MASTER] = (name, PARAM)
    config = _config(section(engine, "config"), stage, model, cast=request.casts.dtype is not None)
    return State(
        source=source,
        stage=stage,
        world=world,
        dtype=model,
        groups=groups,
        ranks=ranks,
        tensor=axes.tensor,
        layers=layers,
        moe=moe,
        experts=experts,
        engine=_remapped(engine, ranks, axes.tensor),
        config=config,
        bf16_optimizer=_is_bf16_optimizer(engine, config, stage, model),
        kinds=kinds,
        origin=origin,
    )


def _remapped(
    engine: Mapping[str, Any], ranks: Sequence[ModelRank], degree: int
) -> Mapping[str, Any]:
    """The engine's state, with an affine map of the target's tensor axis if it has one."""
    info = section(engine, "universal_checkpoint_info")
    known = section(section(info, "affine_map"), "params")
    if all(len(section(one, "ranks")) == degree for one in known.values()):
        return engine
    held: list[dict[str, Part]] = [{} for _ in range(degree)]
    for rank in ranks:
        locals_ = [*rank.weights, *(p for g in rank.groups for p in g.params)]
        held[rank.mp % degree] |= {one.name: (one.shape, one.entries) for one in locals_}
    return {**engine, "universal_checkpoint_info": mapped_anew(info, held)}


def _target(source: Manifest, request: Request) -> tuple[int, int]:
    """Stage and world size of the target."""
    stage = source.layout.stage if request.stage is None else request.stage
    if stage is None:
        stage = 1
    if stage not in (1, 2, 3):
        raise UnsupportedError(
            f"DeepSpeed checkpoints of ZeRO stage {stage} can't be written",
            hint="choose stage 1, 2 or 3 (--stage)",
        )
    return stage, request.world or source.layout.world


def _check_source(source: Manifest, engine: Mapping[str, Any], stage: int) -> None:
    mesh = source.layout.mesh
    if mesh.get("pipeline", 1) > 1 and stage != 1:
        raise UnsupportedError(
            f"DeepSpeed has no pipelines at ZeRO stage {stage}", hint="choose --stage 1"
        )
    if any(g.optimizer for g in source.groups):
        raise UnsupportedError("DeepSpeed has one optimizer, the checkpoint several")
    config = section(engine, "config")
    zero = section(config, "zero_optimization")
    if section(zero, "offload_optimizer").get("device") == "nvme":
        raise UnsupportedError(
            "the run keeps its optimizer's state on NVMe, outside of the checkpoint's files",
            hint="set offload_optimizer to cpu or none, save again and convert that",
        )
    for key, least in (("zero_hpz_partition_size", 1), ("mics_shard_size", 0)):
        size = zero.get(key)
        if stage == 3 and isinstance(size, int) and size > least:
            raise UnsupportedError(f"zero_optimization.{key} is {size}: another layout than ZeRO's")
    if not any(s.group is not None for s in source.layout.spaces):
        raise UnsupportedError(
            "the checkpoint has no optimizer state, from which alone DeepSpeed resumes",
            hint="load weights into the model in the training script instead",
        )


def _check_experts(axes: Axes, request: Request, stage: int, moe: Mapping[str, int]) -> None:
    """Refuse experts, and degrees of expert parallelism, that DeepSpeed couldn't load."""
    source = axes.source
    found = {d for g in source.groups if (d := degree_of(g.settings)) is not None}
    if not moe:
        if source.layout.mesh.get("expert", 1) > 1:
            raise cannot_write("experts that aren't those of deepspeed.moe")
        if request.expert_parallel is not None:
            raise RequestError(
                "a degree of expert parallelism was asked for, but there are no experts",
                where=source.root,
            )
        return
    if axes.pipeline * axes.tensor > 1:
        raise cannot_write("experts and tensor or pipeline parallelism")
    if stage == 3:
        raise UnsupportedError(
            "DeepSpeed has no experts (deepspeed.moe) at ZeRO stage 3",
            hint="choose stage 1 or 2 (--stage)",
        )
    if request.expert_parallel is not None and len(found) > 1:
        raise RequestError(
            f"the layers have several degrees of expert parallelism ({sorted(found)}), and one "
            "was asked for",
            where=source.root,
        )


def _check_frozen(experts: Iterable[Layer], trained: Container[str], stage: int) -> None:
    """DeepSpeed saves and loads frozen parameters by themselves at stage 2: rank 0's."""
    names = (name for file in experts for name in file.params)
    frozen = next((name for name in names if name not in trained), None)
    if frozen is not None and stage == 2:
        raise UnsupportedError(
            f"{frozen} doesn't train, and at ZeRO stage 2 DeepSpeed gives every rank the frozen "
            "experts of rank 0 when it loads a checkpoint",
            hint="choose --stage 1",
        )


# -- the order of parameters --------------------------------------------------------------------


def _rotation(source: Manifest, engine: Mapping[str, Any]) -> int:
    """To how many ranks the source's parameters were dealt out in turn; 0 if they weren't."""
    known = engine.get("round_robin")
    if isinstance(known, int):
        return known
    zero = section(section(engine, "config"), "zero_optimization")
    if not zero.get("round_robin_gradients") or engine.get("bf16_optimizer"):
        return 0
    if source.format == "deepspeed" and source.layout.stage is not None:
        return source.layout.world if source.layout.stage in (1, 2) else 0
    raise UnsupportedError(
        "the order of parameters depends on the world size (round_robin_gradients), and the "
        "checkpoint doesn't say which one it had",
        where=source.root,
        hint="convert from the original DeepSpeed checkpoint",
    )


def _check_one_part(weights: Iterable[Local]) -> None:
    """A tensor that is cut, or aligned, as one can't be made of several boxes."""
    for local in weights:
        if len(local.entries) > 1:
            raise UnsupportedError(
                f"{local.name} is made of {len(local.entries)} parts on a tensor-parallel rank, "
                "which can be written at stages 1 and 2 without alignment alone",
                hint="choose stage 1 or 2 (--stage)",
            )


# -- element types ------------------------------------------------------------------------------


def _model_dtype(
    source: Manifest,
    request: Request,
    engine: Mapping[str, Any],
    weights: Iterable[Local],
) -> DType:
    """The element type of the model's weights."""
    if request.casts.dtype is not None:
        return request.casts.dtype
    said = engine.get("dtype")
    if isinstance(said, str) and said in BY_NAME:
        return BY_NAME[said]
    entries = (e for w in weights for e in w.entries)
    found = (source.tensors.get((e.name, PARAM)) for e in entries)
    floats = (t.dtype for t in found if t is not None and t.dtype.name in FLOATS)
    return next(floats, BFLOAT16)


# -- configuration ------------------------------------------------------------------------------


def _config(source: Mapping[str, Any], stage: int, model: DType, *, cast: bool) -> dict[str, Any]:
    """The configuration with the target's stage, and its element type if that changes."""
    zero = {**section(source, "zero_optimization"), "stage": stage}
    config: dict[str, Any] = {**source, "zero_optimization": zero}
    if source and not cast:
        return config
    old = [k for k in ("bf16", "bfloat16", "fp16") if k in config]
    for key in old:
        config[key] = {**section(config, key), "enabled": False}
    mine = {"bfloat16": "bf16", "float16": "fp16"}.get(model.name)
    if mine is not None:
        mine = "bfloat16" if mine == "bf16" and "bfloat16" in config else mine
        config[mine] = {**section(config, mine), "enabled": True}
    return config


def _is_bf16_optimizer(
    engine: Mapping[str, Any], config: Mapping[str, Any], stage: int, model: DType
) -> bool:
    """Which class resumes (``engine.py``, ``_do_optimizer_sanity_check``)."""
    if stage != 1 or model != BFLOAT16:
        return False
    offload = section(section(config, "zero_optimization"), "offload_optimizer")
    if offload.get("device") not in (None, "none"):
        return False
    kind = section(config, "data_types").get("grad_accum_dtype")
    return bool(engine.get("bf16_optimizer")) or kind in (
        "fp32", "float32", "float", "torch.float32",
    )  # fmt: skip
