"""Which checkpoints are measured? Those of a GPT-2, made once and kept.

DeepSpeed's are files of ``torch.save`` with the same structure as those that DeepSpeed writes;
nothing is trained: masters and moments are noise, and the 16-bit weights are the masters, rounded.
The native ones are conversions of them.
"""

from __future__ import annotations

import enum
import shutil
import sys
import types
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, VOCABULARY, CONTEXT = 768, 50257, 1024
SMALL = 12
"""Layers of GPT-2 small: 124 million parameters."""
BYTES_A_PARAMETER = 14
"""fp32 master and two moments, and a 16-bit weight."""
RANKS = 4

Shapes = dict[str, tuple[int, ...]]


def layers_for(nbytes: int) -> int:
    """Layers of a model whose checkpoint has at least that many bytes."""
    layers = 1
    while BYTES_A_PARAMETER * sum(map(_numel, shapes(layers).values())) < nbytes:
        layers += 1
    return layers


def _numel(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape))


def shapes(layers: int) -> Shapes:
    """The tensors of a GPT-2 with tied embeddings."""
    h = HIDDEN
    found: Shapes = {"wte.weight": (VOCABULARY, h), "wpe.weight": (CONTEXT, h)}
    for i in range(layers):
        for name, shape in (
            ("ln_1.weight", (h,)),
            ("ln_1.bias", (h,)),
            ("attn.c_attn.weight", (h, 3 * h)),
            ("attn.c_attn.bias", (3 * h,)),
            ("attn.c_proj.weight", (h, h)),
            ("attn.c_proj.bias", (h,)),
            ("ln_2.weight", (h,)),
            ("ln_2.bias", (h,)),
            ("mlp.c_fc.weight", (h, 4 * h)),
            ("mlp.c_fc.bias", (4 * h,)),
            ("mlp.c_proj.weight", (4 * h, h)),
            ("mlp.c_proj.bias", (h,)),
        ):
            found[f"h.{i}.{name}"] = shape
    return {**found, "ln_f.weight": (h,), "ln_f.bias": (h,)}


def inputs(folder: Path, nbytes: int) -> dict[str, Path]:
    """Make what isn't there yet; returns names to checkpoints.

    Parameters
    ----------
    folder
        Where they are made.
    nbytes
        Least bytes of a native checkpoint. Those of DeepSpeed are of GPT-2 small.
    """
    from reshard import Options, Wanted, api

    found = {}
    for stage in (2, 3):
        path = found[f"stage{stage}"] = folder / f"stage{stage}"
        if not (path / "latest").exists():
            deepspeed(path, shapes(SMALL), stage)
    own = folder / "own"
    for ranks in (8, 32, 7):
        path = found[f"native{ranks}"] = folder / f"native{ranks}-{nbytes}"
        if not path.exists():
            if not own.exists():
                deepspeed(own, shapes(layers_for(nbytes)), 2)
            wanted = Wanted(format="native", world=ranks, stage=1, drop=("*",))
            api.convert(own, path, wanted, Options())
    shutil.rmtree(own, ignore_errors=True)
    path = found["dcp"] = folder / "dcp"
    if not path.exists():
        wanted = Wanted(format="dcp", world=RANKS, drop=("*",))
        api.convert(found["stage2"], path, wanted, Options())
    return found


# -- DeepSpeed ------------------------------------------------------------------------------------


def _pretend_deepspeed() -> Any:
    """Classes whose pickles name the modules of DeepSpeed, which needn't be installed."""

    class LossScaler:
        def __init__(self) -> None:
            self.cur_scale = 1.0
            self.dynamic = False

    class ZeroStageEnum(int, enum.Enum):
        gradients = 2
        weights = 3

    @dataclass
    class fragment_address:  # noqa: N801 - DeepSpeed's name
        numel: int
        start: int

    homes = {
        LossScaler: "deepspeed.runtime.fp16.loss_scaler",
        ZeroStageEnum: "deepspeed.runtime.zero.config",
        fragment_address: "deepspeed.utils.tensor_fragment",
    }
    for kind, home in homes.items():
        kind.__module__, kind.__qualname__ = home, kind.__name__
        parts = home.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            sys.modules.setdefault(name, types.ModuleType(name))
        setattr(sys.modules[home], kind.__name__, kind)
    return LossScaler, ZeroStageEnum, fragment_address


def _config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "bf16": {"enabled": True},
    }


def _model_state(
    module: OrderedDict[str, Any], model: Shapes, stage: int, torch: Any
) -> dict[str, Any]:
    sizes = OrderedDict((n, torch.Size(s)) for n, s in model.items())
    return {
        "module": module,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [sizes],
        "frozen_param_shapes": OrderedDict(),
        "shared_params": {},
        "frozen_param_fragments": OrderedDict(),
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": 3,
        "global_samples": 24,
        "dp_world_size": RANKS,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": _config(stage),
        "ds_version": "0.19.8",
    }


def deepspeed(folder: Path, model: Shapes, stage: int) -> None:
    """Write a checkpoint as DeepSpeed does at stage 2 or 3, with ``RANKS`` ranks, bf16."""
    import torch

    kinds = _pretend_deepspeed()
    tag = folder / "global_step3"
    tag.mkdir(parents=True, exist_ok=True)
    flat = _flat(model, torch)
    numel = {name: _numel(shape) for name, shape in model.items()}
    if stage == 2:
        half = flat.to(torch.bfloat16)
        parts = half[: sum(numel.values())].split(list(numel.values()))
        module = OrderedDict((n, p.view(s)) for (n, s), p in zip(model.items(), parts, strict=True))
        torch.save(_model_state(module, model, 2, torch), tag / "mp_rank_00_model_states.pt")
        ranks = flat.chunk(RANKS)
    else:
        nothing = OrderedDict((n, torch.empty(0, dtype=torch.bfloat16)) for n in model)
        for rank in range(RANKS):
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            torch.save(_model_state(nothing, model, 3, torch), tag / name)
        ranks = _cut_each(flat, list(numel.values()), torch)
    for rank, part in enumerate(ranks):
        master = part.clone()
        state = _optimizer2 if stage == 2 else _optimizer3
        document = {
            "optimizer_state_dict": state(master, rank, numel, kinds, torch),
            "ds_config": _config(stage),
            "ds_version": "0.19.8",
        }
        torch.save(document, tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (folder / "latest").write_text(tag.name)


def _flat(model: Shapes, torch: Any) -> Any:
    """All masters, end to end, padded to a multiple of 2 x ranks."""
    total = sum(map(_numel, model.values()))
    flat = torch.zeros(total + -total % (2 * RANKS))
    flat[:total].normal_(generator=torch.Generator().manual_seed(0))
    return flat


def _cut_each(flat: Any, numel: list[int], torch: Any) -> list[Any]:
    """Stage 3: each parameter cut in ceil(n / ranks) elements a rank, padded with zeros."""
    ranks: list[list[Any]] = [[] for _ in range(RANKS)]
    for part in flat[: sum(numel)].split(numel):
        size = -(-len(part) // RANKS)
        padded = torch.nn.functional.pad(part, (0, size * RANKS - len(part)))
        for rank, piece in zip(ranks, padded.split(size), strict=True):
            rank.append(piece)
    return [torch.cat(pieces) for pieces in ranks]


def _adam(master: Any, torch: Any) -> dict[str, Any]:
    return {
        "step": torch.tensor(3.0),
        "exp_avg": master * 0.5,
        "exp_avg_sq": master.square(),
    }


def _groups() -> list[dict[str, Any]]:
    rules = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    return [{**rules, "params": [0]}]


def _optimizer2(
    master: Any, rank: int, numel: dict[str, int], kinds: Any, torch: Any
) -> dict[str, Any]:
    scaler, stage, address = kinds
    padding = len(master) * RANKS - sum(numel.values()) if rank == RANKS - 1 else 0
    slices, at, low = OrderedDict(), 0, rank * len(master)
    for name, count in numel.items():
        first, end = max(at, low), min(at + count, low + len(master))
        if end > first:
            slices[name] = address(end - first, first - low)
        at += count
    return {
        "loss_scaler": scaler(),
        "dynamic_loss_scale": False,
        "overflow": False,
        "clip_grad": 1.0,
        "base_optimizer_state": {"state": {0: _adam(master, torch)}, "param_groups": _groups()},
        "single_partition_of_fp32_groups": [master[: len(master) - padding]],
        "zero_stage": stage.gradients,
        "group_paddings": [padding],
        "param_alignment_paddings": [[0] * len(numel)],
        "partition_count": [RANKS],
        "ds_version": "0.19.8",
        "param_slice_mappings": [slices],
    }


def _optimizer3(
    master: Any, rank: int, numel: dict[str, int], kinds: Any, torch: Any
) -> dict[str, Any]:
    scaler, stage, _ = kinds
    return {
        "zero_stage": stage.weights,
        "loss_scaler": scaler(),
        "dynamic_loss_scale": False,
        "overflow": False,
        "partition_count": RANKS,
        "optimizer_state_dict": {"state": {0: _adam(master, torch)}, "param_groups": _groups()},
        "fp32_flat_groups": [master],
    }
