"""What ranks do with torch's own DCP: train a little FSDP2 model, save it, load it again."""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from reshard.dcp import ZReader, ZWriter

State = dict[str, Any]


class Model(torch.nn.Module):
    """Sizes that no world size divides, fewer rows than ranks, a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(5, 7)
        self.outer = torch.nn.Linear(7, 3)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.outer(torch.relu(self.inner(x))) * self.scale
        return found


def fresh(seed: int) -> tuple[Model, torch.optim.Optimizer]:
    """A sharded model and its optimizer with two groups."""
    torch.manual_seed(seed)
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    wide = [p for p in model.parameters() if p.dim() > 1]
    thin = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": thin, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.01 + seed)


def step(model: Model, optimizer: torch.optim.Optimizer) -> None:
    """A step on the same batch on every rank."""
    model(torch.arange(10.0).reshape(2, 5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained() -> tuple[Model, torch.optim.Optimizer]:
    """A model after two steps."""
    model, optimizer = fresh(0)
    step(model, optimizer)
    step(model, optimizer)
    return model, optimizer


def whole(model: Model, optimizer: torch.optim.Optimizer) -> State:
    """Everything that a model and an optimizer hold, put together, by flat key."""
    weights, moments = get_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    found: State = {}
    for key, value in {**weights, **moments}.items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        found[key] = full.numpy().copy() if isinstance(full, torch.Tensor) else full
    return found


def save_trained(folder: str, flat: bool = False, ours: bool = False) -> State:
    """Save with torch, or with our writer; give what was saved, and what the next step makes."""
    model, optimizer = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, moments = get_state_dict(model, optimizer, options=options)
    state = {"model": weights, "optim": moments, "epoch": 4, "loader": {"seed": [1, 2]}}
    if ours:
        save(state, storage_writer=ZWriter(folder))
    else:
        save(state, checkpoint_id=folder)
    before = whole(model, optimizer)
    step(model, optimizer)
    return {"before": before, "after": whole(model, optimizer)}


def save_beside(folder: str, kind: str) -> State:
    """Save beside the next steps, by a thread or a process; give what was saved."""
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    # torch starts a process of its own, which a daemon may not
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    model, optimizer = trained()
    apart: Any = dist.new_group(backend="gloo")  # the steps have collectives of their own
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments, "epoch": 4}
    before = whole(model, optimizer)
    future: Any = async_save(
        state,
        storage_writer=ZWriter(folder),
        process_group=apart,
        async_checkpointer_type=AsyncCheckpointerType(kind),
    )
    for _ in range(3):
        step(model, optimizer)
    future.result(timeout=120)
    after = whole(model, optimizer)
    assert (after["inner.weight"] != before["inner.weight"]).any()
    return before


def load_saved(folder: str, flat: bool = False, ours: bool = False) -> State:
    """Load into a fresh model; give what it then is, and after another step.

    ``ours``: through our own reader, with how many bytes it read and how many the rank keeps.
    """
    model, optimizer = fresh(1)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, moments = get_state_dict(model, optimizer, options=options)
    state: State = {"model": weights, "optim": moments, "epoch": 0}
    found: State = {}
    if ours:
        reader = ZReader(folder)
        load(state, storage_reader=reader)
        found = {"unread": reader.unread, "read": reader.nbytes_read}
    else:
        load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
        options=options,
    )
    before = whole(model, optimizer)
    step(model, optimizer)
    return {**found, "before": before, "after": whole(model, optimizer), "epoch": state["epoch"]}


def save_without_collectives(folder: str) -> State:
    """Save with metadata of each rank; give the whole weights."""
    model, optimizer = trained()
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments, "cursor": 10 + dist.get_rank(), "same": 4}
    save(state, checkpoint_id=folder, use_collectives=False)
    full = {n: p.full_tensor() for n, p in model.named_parameters()}  # type: ignore[attr-defined]
    return {name: tensor.detach().numpy() for name, tensor in full.items()}


def load_large(folder: str, rows: int, columns: int) -> tuple[int, int, bool]:
    """Load one large sharded tensor: bytes read, bytes kept, and whether it is as it was."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    zeros = distribute_tensor(torch.zeros(rows, columns), mesh, [Shard(0)])
    reader = ZReader(folder)
    load({"model": {"weight": zeros}}, storage_reader=reader)
    local = zeros.to_local()
    expected = distribute_tensor(large(rows, columns), mesh, [Shard(0)]).to_local()
    return reader.nbytes_read, local.numel() * 4, torch.equal(local, expected)


def save_columns(folder: str, rows: int, columns: int) -> None:
    """Save a tensor cut by columns, one that every rank has, and a large one of the script's."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(large(rows, columns), mesh, [Shard(1)])
    state = {
        "model": {"weight": weight, "same": large(3, 5).t(), "none": torch.empty(0, 4)},
        "cache": large(300, 100),
        "rng": torch.arange(7, dtype=torch.uint8),
        "nested": {"list": [torch.ones(2), {"a": 1}]},
    }
    save(state, storage_writer=ZWriter(folder))


def save_large(folder: str, rows: int, columns: int) -> None:
    """Save such a tensor."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(large(rows, columns), mesh, [Shard(0)])
    save({"model": {"weight": weight}}, checkpoint_id=folder)


def large(rows: int, columns: int) -> torch.Tensor:
    """Numbers that are all different."""
    return torch.arange(float(rows * columns)).reshape(rows, columns)
