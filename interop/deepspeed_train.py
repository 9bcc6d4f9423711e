"""Train, or resume, a tiny model with the real DeepSpeed: what does it compute from a checkpoint?

Run under torchrun with JSON files, each of which describes one run (the fields of `Run`); they are
done in turn, because starting DeepSpeed takes longer than training does. The global batch is the
same at every world size: step s draws `GLOBAL_BATCH` sequences from a generator seeded by s, and
each rank takes its equal slice. So two runs that hold the same state must report the same losses,
up to the order in which sums are taken.

A fresh run trains to `stop`, saves a checkpoint and its live state before step `save_at`, and goes
on. A resumed run starts from other random weights, loads `load`, compares its live state with the
saved one bit for bit, and trains to `stop`. The live state is read from DeepSpeed's own flat
partitions, in the order in which the engine itself uses them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

GLOBAL_BATCH = 12  # divisible by every world size used (1, 2, 3, 4)
VOCABULARY, WIDTH, HIDDEN, SEQUENCE, BLOCKS = 53, 20, 37, 7, 2
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Run:
    """One training run.

    Attributes
    ----------
    out : str
        Folder for `result.json`, and for a fresh run `checkpoint/` and `state.pt`.
    stop : int
        The run ends before this step.
    save_at : int or None
        Save before this step (a fresh run).
    load : str or None
        Checkpoint folder to resume from.
    expect : str or None
        The `state.pt` that the live state must equal after the load.
    load_optimizer : bool
        False resumes the weights alone: the control that shows what a lost state does.
    zero, top : dict
        Merged into `zero_optimization` and into the whole DeepSpeed configuration.
    """

    out: str
    stage: int
    dtype: str
    stop: int
    save_at: int | None = None
    load: str | None = None
    expect: str | None = None
    load_optimizer: bool = True
    tied: bool = False
    frozen: bool = False
    schedule: bool = False
    zero: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)


class Block(nn.Module):
    """A residual block that mixes positions causally, then channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Parameter(torch.randn(SEQUENCE, SEQUENCE) / SEQUENCE)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix.tril() @ self.norm(x)
        mixed: Tensor = x + self.down(functional.gelu(self.up(x)))
        return mixed


class TinyModel(nn.Module):
    """A next-token model whose sizes divide by no world size; two parameters are tiny."""

    steps: Tensor
    mean: Tensor

    def __init__(self, tied: bool, frozen: bool) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.token.weight, std=0.3)  # as a head, when tied: keeps the loss small
        self.gain = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.linspace(-1, 1, 3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(5))
        if tied:
            self.head.weight = self.token.weight
        if frozen:
            self.position.weight.requires_grad_(False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.token(ids) + self.position.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(x) * self.gain + self.shift.sum() * x.mean()
        self.steps += 1
        self.mean.mul_(0.5).add_(x.detach().flatten()[:5])
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, the rest doesn't: two groups with their own settings."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1, "name": "decay"},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, "name": "plain"},
    ]


def configuration(run: Run, world: int) -> dict[str, Any]:
    """The DeepSpeed configuration of `run` at a world size."""
    adam = {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}
    warmup = {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 20}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": {"stage": run.stage, **run.zero},
    }
    if run.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if run.schedule:
        config["scheduler"] = {"type": "WarmupLR", "params": warmup}
    return {**config, **run.top}


def flat_groups(optimizer: Any, world: int) -> Iterator[tuple[list[Any], list[int], Tensor]]:
    """Yield (parameters, offset of each in the flat order, this rank's master partition).

    Stage 3 cuts every parameter over the ranks, so there the offsets are those inside a partition;
    stages 1 and 2 cut the whole flat group, so there they are those inside the whole.
    """
    if hasattr(optimizer, "fp16_groups"):  # stage 3
        for group, flat in zip(
            optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True
        ):
            sizes = [-(-p.ds_numel // world) for p in group]
            yield group, [sum(sizes[:i]) for i in range(len(sizes))], flat
    elif hasattr(optimizer, "round_robin_bit16_groups"):  # stages 1 and 2
        yield from zip(
            optimizer.round_robin_bit16_groups,
            optimizer.round_robin_bit16_offsets,
            optimizer.single_partition_of_fp32_groups,
            strict=True,
        )
    else:  # stage 1, bf16 with gradients accumulated in fp32: a class of its own
        for group, flat in zip(
            optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, strict=True
        ):
            sizes = [p.numel() for p in group]
            yield group, [sum(sizes[:i]) for i in range(len(sizes))], flat


def gather(local: Tensor, world: int) -> list[Tensor]:
    """Every rank's partition, in rank order."""
    parts = [torch.empty_like(local) for _ in range(world)]
    dist.all_gather(parts, local.detach().contiguous())
    return parts


def live_state(engine: Any, world: int) -> dict[str, Tensor]:
    """Masters, moments and steps that the engine would use next, whole, by parameter name."""
    optimizer = engine.optimizer
    names = {id(p): name for name, p in engine.module.named_parameters()}
    state: dict[str, Tensor] = {}
    for group, offsets, flat in flat_groups(optimizer, world):
        slots = optimizer.optimizer.state[flat]
        for kind, local in (("master", flat), *((m, slots[m]) for m in MOMENTS if m in slots)):
            parts = gather(local, world)
            for p, offset in zip(group, offsets, strict=True):
                size = getattr(p, "ds_numel", p.numel())
                if hasattr(p, "ds_numel"):
                    piece = -(-size // world)
                    whole = torch.cat([part[offset : offset + piece] for part in parts])[:size]
                else:
                    whole = torch.cat(parts)[offset : offset + size]
                state[f"{kind}.{names[id(p)]}"] = whole.clone()
        for p in group:
            if "step" in slots:
                state[f"step.{names[id(p)]}"] = torch.tensor(float(slots["step"]))
    state.update(weights_and_buffers(engine))
    return state


def weights_and_buffers(engine: Any) -> dict[str, Tensor]:
    """The weights of the forward pass (frozen ones too), buffers, and learning rates."""
    state: dict[str, Tensor] = {}
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p]):
            state[f"weight.{name}"] = p.detach().flatten().clone()
    for name, buffer in engine.module.named_buffers():
        state[f"buffer.{name}"] = buffer.clone()
    groups = engine.optimizer.optimizer.param_groups
    for key in ("lr", "weight_decay"):
        state[f"group.{key}"] = torch.tensor([g[key] for g in groups], dtype=torch.float64)
    if engine.lr_scheduler is not None:
        state["schedule"] = torch.tensor(engine.lr_scheduler.last_batch_iteration)
    return state


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names that are missing on one side or whose bits differ."""
    different = sorted(found.keys() ^ expected.keys())
    for name in sorted(found.keys() & expected.keys()):
        a, b = found[name], expected[name]
        same = a.dtype == b.dtype and a.shape == b.shape
        if not same or not torch.equal(
            a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
        ):
            different.append(name)
    return different


def train_step(engine: Any, step: int, rank: int, world: int) -> float:
    """One step on this rank's slice of the global batch; returns the global mean loss."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, SEQUENCE + 1), generator=generator)
    share = GLOBAL_BATCH // world
    mine = ids[rank * share : (rank + 1) * share]
    loss = engine(mine[:, :-1], mine[:, 1:])
    engine.backward(loss)
    engine.step()
    total = loss.detach().double()
    dist.all_reduce(total)
    return float(total) / world


def execute(run: Run, rank: int, world: int) -> dict[str, Any]:
    """Do the run; what it returns goes to `result.json`."""
    torch.manual_seed(2 if run.load else 1)  # a resumed run must owe nothing to its start
    model = TinyModel(run.tied, run.frozen)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=parameter_groups(model),
        config=configuration(run, world),
    )
    result: dict[str, Any] = {"world": world, "optimizer": type(optimizer).__name__}
    if run.load:
        path, _ = engine.load_checkpoint(run.load, load_optimizer_states=run.load_optimizer)
        if path is None:
            raise SystemExit(f"DeepSpeed found no checkpoint in {run.load}")
    if run.expect:
        expected = torch.load(run.expect, weights_only=True)
        result["compared"] = len(expected)
        result["different"] = differences(live_state(engine, world), expected)
    losses: dict[str, float] = {}
    for step in range(engine.global_steps, run.stop):
        if step == run.save_at:
            engine.save_checkpoint(str(Path(run.out) / "checkpoint"))
            state = live_state(engine, world)
            if rank == 0:
                torch.save(state, Path(run.out) / "state.pt")
        losses[str(step)] = train_step(engine, step, rank, world)
    slots = engine.optimizer.optimizer.state.values()
    result["steps"] = sorted({float(slot["step"]) for slot in slots if "step" in slot})
    engine.destroy()
    return {**result, "losses": losses}


def main() -> None:
    """Do the runs, and leave without DeepSpeed's teardown, which sometimes aborts."""
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for path in sys.argv[1:]:
        run = Run(**json.loads(Path(path).read_text()))
        Path(run.out).mkdir(parents=True, exist_ok=True)
        result = execute(run, rank, world)
        if rank == 0:
            (Path(run.out) / "result.json").write_text(json.dumps(result, indent=1))
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
