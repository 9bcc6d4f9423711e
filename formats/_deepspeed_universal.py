"""How is a universal checkpoint laid out, and what did its converter leave out?

``zero/<parameter>/{fp32,exp_avg,exp_avg_sq,…}.pt`` holds whole tensors, one a file: from stages 1
and 2 a dict with the tensor under ``param`` (tensor- and pipeline-parallel parts joined), from
stage 3 a bare flat tensor without its shape. The copied model files have the shapes, buffers and
frozen parameters; buffers and aliases also get an ``fp32.pt``, cast to float, which isn't used
here (``deepspeed/checkpoint/ds_to_universal.py`` of 0.19.8).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.box import Shape
from reshard.builder import Builder, Placed
from reshard.dtypes import dtype
from reshard.errors import CorruptError, IncompleteError, InconsistentError
from reshard.formats import _deepspeed_load as loading
from reshard.formats._deepspeed_load import Checkpoint
from reshard.formats._deepspeed_model import Model
from reshard.formats._deepspeed_names import Names
from reshard.formats._deepspeed_optimizer import shapes_of
from reshard.formats._deepspeed_tensor import TensorRules
from reshard.formats._torch import placed
from reshard.layout import MASTER, Entry
from reshard.manifest import Manifest, ParamGroup
from reshard.stored import StoredTensor
from reshard.torchfile import TorchFile, open_torch_file, read_tensor

STATES = {"fp32": MASTER}
"""What a file's stem calls a state; other stems are the optimizer's own names."""


def open_universal(names: Names) -> Manifest:
    """Read a universal checkpoint.

    Raises
    ------
    IncompleteError
        If a trained parameter has no file (a conversion that broke off leaves such folders).
    """
    from reshard.formats._deepspeed_read import add_objects

    checkpoint = _models(names)
    builder = Builder("deepspeed", names.root, algorithm="crc32")
    info = checkpoint.first.data.get("universal_checkpoint_info")
    rules = TensorRules(info if isinstance(info, Mapping) else {}, checkpoint.tensor)
    builder.groups.extend(_param_groups(names.root / "zero" / "optimizer_state.pt"))
    for group, shapes in enumerate(_groups(checkpoint, len(builder.groups))):
        _add_group(builder, names, checkpoint, group, shapes)
    Model(builder, checkpoint, rules).add()
    add_objects(builder, checkpoint)
    return builder.build({"shard": 1}, None)


def _models(names: Names) -> Checkpoint:
    """The copied model files, as a checkpoint without optimizer files."""
    if names.model3:
        models = loading.load_all((path, *key) for key, path in names.model3.items())
    else:
        models = loading.load_all((path, mp, 0) for mp, path in names.model.items())
    if not models:
        raise IncompleteError(
            "has no model file beside its 'zero' folder",
            where=names.root,
            hint="the conversion to a universal checkpoint broke off; convert the original "
            "checkpoint instead",
        )
    first = models[min(models)]
    dims = first.data.get("checkpoint_parallel_dimensions")
    tensor = dims.get("tp_degree", 1) if isinstance(dims, Mapping) else 1
    mps = max(mp for mp, _ in models) + 1
    world = max(dp for _, dp in models) + 1
    stage = 3 if names.model3 else 1
    return Checkpoint(names, stage, world, mps // tensor, tensor, models, {})


def _groups(checkpoint: Checkpoint, count: int) -> list[dict[str, Shape]]:
    """Names and shapes of the trained parameters of each group, over all pipeline stages."""
    found: list[dict[str, Shape]] = []
    for mp in checkpoint.mps:
        for index, shapes in enumerate(shapes_of(checkpoint.models[mp, 0])):
            while len(found) <= index:
                found.append({})
            for name, shape in shapes.items():
                found[index].setdefault(name, shape)
    if len(found) > count:  # sub-groups of stage 3
        return _joined(checkpoint, found, count)
    return found


def _joined(
    checkpoint: Checkpoint, parts: list[dict[str, Shape]], count: int
) -> list[dict[str, Shape]]:
    """Sub-groups joined to groups, where it is clear which belongs to which."""
    if count != 1:
        raise InconsistentError(
            f"has {len(parts)} sub-groups and {count} parameter groups, and doesn't say which "
            "belongs to which",
            where=checkpoint.names.root,
            hint="convert the original checkpoint instead",
        )
    return [{name: shape for part in parts for name, shape in part.items()}]


def _param_groups(path: Path) -> list[ParamGroup]:
    """Settings of the parameter groups; the step too, which stage 3 stores nowhere else."""
    if not path.is_file():
        raise IncompleteError("is missing", where=path)
    file = open_torch_file(path, known=loading.KNOWN)
    if not isinstance(file.value, Mapping):
        raise CorruptError("doesn't hold a dict", where=path)
    nested = (file.value.get(k) for k in ("optimizer_state_dict", "base_optimizer_state"))
    base: Mapping[str, Any] = next((b for b in nested if isinstance(b, Mapping)), {})
    groups = base.get("param_groups", file.value.get("param_groups"))
    states = base.get("state", {})
    if not isinstance(groups, (list, tuple)):
        raise CorruptError("holds no parameter groups", where=path)
    found = []
    for group in groups:
        settings = {k: v for k, v in group.items() if k not in ("params", "step")}
        state: Mapping[str, Any] = next(
            (states[p] for p in group.get("params", ()) if p in states), {}
        )
        step = state.get("step")
        if isinstance(step, StoredTensor):
            step = read_tensor(file, step)
        found.append(ParamGroup(settings, {} if step is None else {"step": step}))
    return found


def _add_group(
    builder: Builder,
    names: Names,
    checkpoint: Checkpoint,
    group: int,
    shapes: Mapping[str, Shape],
) -> None:
    rows: dict[str, list[Placed]] = {}
    for name, shape in shapes.items():
        folder = names.root / "zero" / name
        if "/" in name or name in ("..", ".") or not (folder / "fp32.pt").is_file():
            raise IncompleteError(
                f"has no fp32.pt for the parameter {name!r}",
                where=names.root / "zero",
                hint="the conversion to a universal checkpoint broke off; convert the original "
                "checkpoint instead",
            )
        for path in sorted(folder.glob("*.pt")):
            file = open_torch_file(path, known=loading.KNOWN)
            tensor = file.value.get("param") if isinstance(file.value, Mapping) else file.value
            if path.stem == "step":
                _step(builder, group, file, tensor, path)
            elif isinstance(tensor, StoredTensor):
                one = _placed(builder, checkpoint, file, tensor, name, shape)
                rows.setdefault(STATES.get(path.stem, path.stem), []).append(one)
            else:
                raise CorruptError("holds no tensor", where=path)
    for state, some in rows.items():
        builder.add_placed(f"group{group}.{state}", state, some, group=group)


def _placed(
    builder: Builder,
    checkpoint: Checkpoint,
    file: TorchFile,
    tensor: StoredTensor,
    name: str,
    local: Shape,
) -> Placed:
    shape = tensor.shape
    if checkpoint.stage == 3 and len(shape) == 1 and Entry(name, local).numel == shape[0]:
        shape = local
    elif checkpoint.tensor == 1 and shape != local:
        raise InconsistentError(
            f"{name} is {list(shape)}, but {list(local)} in param_shapes", where=file.path
        )
    one = placed(builder, file, tensor, Entry(name, tensor.shape))
    strides = one.strides if shape == tensor.shape else None
    if one.strides is not None and shape != tensor.shape:
        raise InconsistentError(f"{name} has strides {list(one.strides)}", where=file.path)
    return Placed(Entry(name, shape), dtype(tensor.dtype), one.file, one.offset, strides)


def _step(builder: Builder, group: int, file: TorchFile, value: Any, path: Path) -> None:
    step = read_tensor(file, value) if isinstance(value, StoredTensor) else value
    known = builder.groups[group]
    if "step" in known.scalars:
        if known.scalars["step"] != step:
            raise InconsistentError(
                f"is {step}, but {known.scalars['step']} for another parameter of the group",
                where=path,
            )
        return
    builder.groups[group] = ParamGroup(known.settings, {**known.scalars, "step": step})
