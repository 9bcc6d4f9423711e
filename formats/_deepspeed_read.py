"""How are the files of a DeepSpeed checkpoint read into a manifest?

The optimizer's state and the model's are placed by modules of their own; what isn't tensors (the
engine's settings, the script's own values) is gathered here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.builder import Builder
from reshard.collector import collector_paused
from reshard.errors import ReshardError
from reshard.formats import _deepspeed_names as file_names
from reshard.formats._deepspeed_load import (
    Checkpoint,
    Loaded,
    config_of,
    load,
    optimizer_dict,
)
from reshard.formats._deepspeed_model import Model
from reshard.formats._deepspeed_optimizer import add_optimizer
from reshard.formats._deepspeed_tensor import TensorRules
from reshard.formats._torch import Values
from reshard.layout import CLIENT
from reshard.manifest import Manifest
from reshard.pickle_stubs import Record
from reshard.plain import encode

ENGINE_KEYS = frozenset(
    (
        "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes",
        "shared_params", "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd",
        "sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples",
        "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config",
        "ds_version", "num_experts", "ds_autoep_layers", "universal_checkpoint_info",
    )
)  # fmt: skip
"""Keys of a model file that DeepSpeed's engine writes; all others are the script's own."""


@collector_paused()
def read_checkpoint(root: Path, name: str) -> Manifest:
    """Read what all ranks' files say; no payload."""
    names = file_names.names(root)
    if names.universal:
        from reshard.formats._deepspeed_universal import open_universal

        return open_universal(names)
    checkpoint = load(names)
    builder = Builder(name, root, algorithm="crc32")
    info = checkpoint.first.data.get("universal_checkpoint_info")
    rules = TensorRules(info if isinstance(info, Mapping) else {}, checkpoint.tensor)
    if checkpoint.tensor > 1 and not rules.info:
        builder.note(
            "note",
            "says nothing of how tensor-parallel parts fit together, so each keeps a name "
            "of its own",
            "universal_checkpoint_info",
        )
    if checkpoint.stage:
        add_optimizer(builder, checkpoint, rules)
    else:
        from reshard.formats._deepspeed_plain import add_plain_optimizer

        add_plain_optimizer(builder, checkpoint, rules)
    Model(builder, checkpoint, rules).add()
    add_objects(builder, checkpoint)
    return builder.build(mesh_of(checkpoint, builder), checkpoint.stage)


def mesh_of(checkpoint: Checkpoint, builder: Builder) -> dict[str, int]:
    """The axes of the mesh."""
    mesh = {"shard": checkpoint.world}
    if checkpoint.pipeline > 1:
        mesh["pipeline"] = checkpoint.pipeline
    if checkpoint.tensor > 1:
        mesh["tensor"] = checkpoint.tensor
    experts = max((s.coords.get("expert", 0) for s in builder.spaces), default=0) + 1
    if experts > 1:
        mesh["expert"] = experts
    return mesh


def add_objects(builder: Builder, checkpoint: Checkpoint) -> None:
    """Add all state that isn't tensors."""
    first = checkpoint.first
    values = Values(builder, first.file)
    data = first.data
    client = {str(k): values.plain(v, str(k)) for k, v in data.items() if k not in ENGINE_KEYS}
    builder.objects["step"] = data.get("global_steps")
    builder.objects["scheduler"] = values.plain(data.get("lr_scheduler"), "lr_scheduler")
    builder.objects["client"] = client
    builder.objects["deepspeed"] = _engine_state(checkpoint, values)
    differing = _per_rank(builder, checkpoint, client)
    if differing:
        builder.objects["per_rank"] = {"client": differing}
    builder.add_placed("client", CLIENT, values.tensors)


def _engine_state(checkpoint: Checkpoint, values: Values) -> dict[str, Any]:
    data = checkpoint.first.data
    kept = ("global_samples", "skipped_steps", "data_sampler", "random_ltd", "buffer_names",
            "num_experts", "universal_checkpoint_info")  # fmt: skip
    state = {key: values.plain(data[key], key) for key in kept if data.get(key) is not None}
    state["tag"] = checkpoint.names.root.name
    state["version"] = data.get("ds_version")
    state["config"] = values.plain(config_of(checkpoint.first), "ds_config")
    state["dtype"] = _model_dtype(config_of(checkpoint.first))
    if checkpoint.names.layers:
        state["layers"] = sorted({layer for layer, _ in checkpoint.names.layers})
    if checkpoint.moe_layers:
        state["moe_layers"] = list(checkpoint.moe_layers)
    if checkpoint.optims:
        optim = checkpoint.optims[0, 0]
        state.update(_scaling(optimizer_dict(optim), optim))
        state["bf16_optimizer"] = "zero_stage" not in optimizer_dict(optim)
        state["round_robin"] = _round_robin(checkpoint, bf16=state["bf16_optimizer"])
    return state


def _round_robin(checkpoint: Checkpoint, *, bf16: bool) -> int:
    """To how many ranks parameters were dealt out in turn; 0 if they weren't."""
    zero = config_of(checkpoint.first).get("zero_optimization")
    asked = isinstance(zero, Mapping) and bool(zero.get("round_robin_gradients"))
    return checkpoint.world if asked and not bf16 and checkpoint.stage in (1, 2) else 0


def _model_dtype(config: Mapping[str, Any]) -> str:
    for key, name in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
        part = config.get(key)
        if isinstance(part, Mapping) and part.get("enabled"):
            return name
    return "float32"


def _scaling(optimizer: Mapping[str, Any], loaded: Loaded) -> dict[str, Any]:
    found = {
        key: optimizer[key]
        for key in ("dynamic_loss_scale", "overflow", "clip_grad")
        if isinstance(optimizer.get(key), (bool, int, float))
    }
    scaler = optimizer.get("loss_scaler")
    if isinstance(scaler, Record):
        values = Values(Builder("", loaded.path), loaded.file)
        found["loss_scaler"] = {
            "class": scaler.qualname.rpartition(".")[2],
            "state": values.plain(scaler.fields),
        }
    return found


def _per_rank(
    builder: Builder, checkpoint: Checkpoint, client: Mapping[str, Any]
) -> dict[str, list[Any]]:
    """The script's values that differ by rank (stage 3 has a model file a rank)."""
    ranks = [m for (mp, _), m in sorted(checkpoint.models.items()) if mp == 0]
    if len(ranks) < 2:
        return {}
    found: dict[str, list[Any]] = {}
    for loaded in ranks:
        values = Values(builder, loaded.file, prefix=f"rank{loaded.dp}/")
        for key in client:
            try:
                mine = values.plain(loaded.data.get(key), key)
            except ReshardError as error:
                raise type(error)(error.what, where=loaded.path, hint=error.hint) from error
            found.setdefault(key, []).append(mine)
        if loaded.dp:
            builder.add_placed(f"client.rank{loaded.dp}", CLIENT, values.tensors)
    return {k: v for k, v in found.items() if any(encode(x) != encode(v[0]) for x in v)}
