"""Who is compared? Each contender makes the training step of a model.

torch and DeepSpeed are used as their manuals say, without clipping, one micro-batch a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

Step = Callable[[Tensor], Tensor]
"""Trains on a micro-batch; returns the loss."""

RATE, DECAY = 1e-3, 0.01


def _adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=RATE, weight_decay=DECAY)


def _usual(model: Callable[[Tensor], Tensor], optimizer: Optimizer) -> Step:
    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def plain(model: Module) -> Step:
    """Plain torch, for one process."""
    return _usual(model, _adamw(model.parameters()))


def ddp(model: Module) -> Step:
    """Everything whole, as stage 0."""
    return _usual(DistributedDataParallel(model), _adamw(model.parameters()))


def zero_redundancy(model: Module) -> Step:
    """Stage 1 as torch has it."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), optimizer_class=AdamW, lr=RATE, weight_decay=DECAY
    )
    return _usual(wrapped, optimizer)


def fsdp2(model: Any) -> Step:
    """Stage 3 as torch has it: a block is a unit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _usual(model, _adamw(model.parameters()))


def deepspeed(stage: int, model: Module) -> Step:
    """DeepSpeed, with torch's AdamW. What it would set by itself is set here."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=_adamw(model.parameters()), config=config
    )

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def zero(stage: int, model: Module, prefetch: int = 1) -> Step:
    """The engine of this project."""
    from reshard.engine import ZeroEngine

    engine = ZeroEngine(model, _adamw, stage=stage, prefetch=prefetch)

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    step.engine = engine  # type: ignore[attr-defined]
    return step


def contender(name: str, model: Module) -> Step:
    """Make one by its name."""
    kind, _, rest = name.partition(" ")
    if kind == "deepspeed":
        return deepspeed(int(rest), model)
    if kind == "stage":
        stage, _, prefetch = rest.partition(" prefetch ")
        return zero(int(stage), model, int(prefetch or 1))
    makers = {"plain": plain, "ddp": ddp, "zero-redundancy": zero_redundancy, "fsdp2": fsdp2}
    return makers[kind](model)
