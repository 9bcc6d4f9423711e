"""Train, or resume, a tiny model with the real DeepSpeed: what does it compute from a checkpoint?

Run under torchrun with JSON files, each of which describes one run (the fields of `Run`); they are
done in turn, because starting DeepSpeed takes longer than training does. The global batch is the
same at every world size: step s draws `GLOBAL_BATCH` sequences from a generator seeded by s, and
each rank takes its equal slice. So two runs that hold the same state must report the same losses,
up to the order in which sums are taken. Experts, too, begin and count as one model's: their weights
are drawn by their number in the layer, and no token is dropped.

A fresh run trains to `stop`, saves a checkpoint and its live state before step `save_at`, and goes
on. A resumed run starts from other random weights, loads `load`, compares its live state with the
saved one bit for bit, and trains to `stop`. The live state is read from DeepSpeed's own flat
partitions, in the order in which the engine itself uses them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import groups as parallel
from torch import Tensor, nn
from torch.nn import functional

GLOBAL_BATCH = 12  # divisible by every world size used (1, 2, 3, 4, 6)
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
    experts : list of int
        How many experts each block has; none for a model without.
    degree : int
        Of expert parallelism.
    residual : bool
        Whether a block with experts also has a plain part.
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
    experts: list[int] = field(default_factory=list)
    degree: int = 1
    residual: bool = False
    zero: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)


class Expert(nn.Module):
    """What a block does to channels, with a buffer that is saved."""

    number: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.register_buffer("number", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.down(functional.gelu(self.up(x)))
        return mixed


class Block(nn.Module):
    """A residual block that mixes positions causally, then channels."""

    def __init__(self, experts: int = 0, degree: int = 1, residual: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Parameter(torch.randn(SEQUENCE, SEQUENCE) / SEQUENCE)
        self.moe: MoE | None = None
        if experts:
            self.moe = MoE(
                WIDTH,
                Expert(),
                num_experts=experts,
                ep_size=degree,
                use_residual=residual,
                drop_tokens=False,
                use_rts=False,
            )
        else:
            self.up = nn.Linear(WIDTH, HIDDEN)
            self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix.tril() @ self.norm(x)
        if self.moe is None:
            mixed: Tensor = x + self.down(functional.gelu(self.up(x)))
            return mixed
        routed: Tensor = x + self.moe(x)[0]
        return routed


class TinyModel(nn.Module):
    """A next-token model whose sizes divide by no world size; two parameters are tiny."""

    steps: Tensor
    mean: Tensor

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(SEQUENCE, WIDTH)
        experts = run.experts or [0] * BLOCKS
        self.blocks = nn.ModuleList([Block(n, run.degree, run.residual) for n in experts])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.token.weight, std=0.3)  # as a head, when tied: keeps the loss small
        self.gain = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.linspace(-1, 1, 3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(5))
        if run.tied:
            self.head.weight = self.token.weight
        if run.frozen:
            self.position.weight.requires_grad_(False)
            for name, p in self.named_parameters():
                still = "deepspeed_experts" in name and name.endswith("down.bias")
                p.requires_grad_(p.requires_grad and not still)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.token(ids) + self.position.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(x) * self.gain + self.shift.sum() * x.mean()
        self.steps += 1
        self.mean.mul_(0.5).add_(x.detach().flatten()[:5])
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def forget_groups() -> None:
    """Let DeepSpeed make process groups of experts anew: it keeps those of the run before."""
    for table in (
        parallel._EXPERT_PARALLEL_GROUP,
        parallel._EXPERT_PARALLEL_GROUP_RANKS,
        parallel._EXPERT_DATA_PARALLEL_GROUP,
        parallel._EXPERT_DATA_PARALLEL_GROUP_RANKS,
    ):
        table.clear()


def draw_experts(run: Run, model: nn.Module, rank: int, world: int) -> None:
    """Give this rank's experts weights that depend on their numbers alone."""
    block = rank % run.degree
    if run.top.get("use_data_before_expert_parallelism"):
        block = rank // (world // run.degree)
    for layer, moe in enumerate(m for m in model.modules() if isinstance(m, MoE)):
        for index, expert in enumerate(moe.deepspeed_moe.experts.deepspeed_experts):
            number = block * moe.num_local_experts + index
            generator = torch.Generator().manual_seed(100 * (2 if run.load else 1) + number + layer)
            expert.number.fill_(number + 10 * layer + (50 if run.load else 0))
            for p in expert.parameters():
                drawn = torch.rand(p.shape, generator=generator) - 0.5
                p.data.copy_(drawn * 2 / p.shape[-1] ** 0.5)


def parameter_groups(run: Run, model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, the rest doesn't: two groups with their own settings, as many of experts."""
    parameters = list(model.parameters())
    some: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1, "name": "decay"},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, "name": "plain"},
    ]
    return split_params_into_different_moe_groups_for_optimizer(some) if run.experts else some


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


def flat_groups(optimizer: Any) -> Iterator[tuple[list[Any], list[int], Tensor]]:
    """Yield (parameters, offset of each in the flat order, this rank's master partition).

    Stage 3 cuts every parameter over the ranks, so there the offsets are those inside a partition;
    stages 1 and 2 cut the whole flat group, so there they are those inside the whole.
    """
    if hasattr(optimizer, "fp16_groups"):  # stage 3
        world = dist.get_world_size()
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


def gather(local: Tensor, among: Any) -> list[Tensor]:
    """The partitions of the ranks of a process group (``None``: of all), in rank order."""
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(among))]
    dist.all_gather(parts, local.detach().contiguous(), group=among)
    return parts


def numbered(engine: Any) -> Callable[[str], str]:
    """What a tensor of this rank's experts is called among all experts."""
    first = {
        f"{name}.deepspeed_moe.experts.deepspeed_experts": moe.num_local_experts
        * parallel._get_expert_parallel_rank(moe.expert_group_name)
        for name, moe in engine.module.named_modules()
        if isinstance(moe, MoE)
    }

    def rename(name: str) -> str:
        for prefix, begin in first.items():
            if name.startswith(prefix):
                index, _, rest = name.removeprefix(f"{prefix}.").partition(".")
                return f"{prefix}.{begin + int(index)}.{rest}"
        return name

    return rename


def live_state(engine: Any) -> dict[str, Tensor]:
    """Masters, moments and steps that the engine would use next, whole, by parameter name."""
    optimizer = engine.optimizer
    rename = numbered(engine)
    names = {id(p): rename(name) for name, p in engine.module.named_parameters()}
    holders = getattr(optimizer, "real_dp_process_group", {})
    state: dict[str, Tensor] = {}
    for index, (group, offsets, flat) in enumerate(flat_groups(optimizer)):
        slots = optimizer.optimizer.state[flat]
        for kind, local in (("master", flat), *((m, slots[m]) for m in MOMENTS if m in slots)):
            parts = gather(local, holders[index] if holders else None)
            for p, offset in zip(group, offsets, strict=True):
                size = getattr(p, "ds_numel", p.numel())
                if hasattr(p, "ds_numel"):
                    piece = -(-size // len(parts))
                    whole = torch.cat([part[offset : offset + piece] for part in parts])[:size]
                else:
                    whole = torch.cat(parts)[offset : offset + size]
                state[f"{kind}.{names[id(p)]}"] = whole.clone()
        for p in group:
            if "step" in slots:
                state[f"step.{names[id(p)]}"] = torch.tensor(float(slots["step"]))
    state.update(weights_and_buffers(engine, rename))
    return with_all_experts(state)


def weights_and_buffers(engine: Any, rename: Callable[[str], str]) -> dict[str, Tensor]:
    """The weights of the forward pass (frozen ones too), buffers, and learning rates."""
    state: dict[str, Tensor] = {}
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p]):
            state[f"weight.{rename(name)}"] = p.detach().flatten().clone()
    for name, buffer in engine.module.named_buffers():
        state[f"buffer.{rename(name)}"] = buffer.clone()
    groups = engine.optimizer.optimizer.param_groups
    for key in ("lr", "weight_decay"):
        state[f"group.{key}"] = torch.tensor([g[key] for g in groups], dtype=torch.float64)
    if engine.lr_scheduler is not None:
        state["schedule"] = torch.tensor(engine.lr_scheduler.last_batch_iteration)
    return state


def with_all_experts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state with the experts of all ranks; of two ranks with the same ones they are equal."""
    mine = {key: value for key, value in state.items() if ".deepspeed_experts." in key}
    theirs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(theirs, mine)
    found = dict(state)
    for one in theirs:
        for key, value in one.items():
            if not torch.equal(found.setdefault(key, value), value):
                raise SystemExit(f"{key} differs between ranks that hold the same expert")
    return found


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
    forget_groups()
    model = TinyModel(run)
    draw_experts(run, model, rank, world)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=parameter_groups(run, model),
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
        result["different"] = differences(live_state(engine), expected)
    losses: dict[str, float] = {}
    for step in range(engine.global_steps, run.stop):
        if step == run.save_at:
            engine.save_checkpoint(str(Path(run.out) / "checkpoint"))
            state = live_state(engine)
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
