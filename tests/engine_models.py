"""Models and the plain single-process training that the engine is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

STEPS = 3


class Block(nn.Module):
    """Odd sizes, a scalar, a zero-size, a frozen and an unused parameter."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.fixed = nn.Parameter(torch.randn(width), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(torch.tanh(self.up(self.norm(x)))) * self.gain
        return x + h * self.fixed + self.empty.sum()


class Odd(nn.Module):
    """Everything that makes a flat awkward: also tied weights, a buffer and a root of its own."""

    def __init__(self, width: int = 13, blocks: int = 3) -> None:
        super().__init__()
        self.embed: Any = nn.Embedding(17, width)
        self.blocks: Any = nn.ModuleList(Block(width, 7 + 2 * i) for i in range(blocks))
        self.tail = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, 17, bias=False)
        self.head.weight = self.embed.weight
        self.scale: Any
        self.register_buffer("scale", torch.tensor([1.5, 0.5]))
        self.never = nn.Parameter(torch.randn(3, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale[0]
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(
            self.head(self.tail(x)).flatten(0, 1), tokens.roll(1, 1).flatten()
        )


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    small = [p for p in model.parameters() if p.ndim < 2]
    large = [p for p in model.parameters() if p.ndim >= 2]
    return [{"params": large, "weight_decay": 0.1}, {"params": small, "lr": 0.03}]


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda groups: AdamW(groups, lr=0.01, foreach=False),
    "foreach": lambda groups: AdamW(groups, lr=0.01, foreach=True),
    "fused": lambda groups: AdamW(groups, lr=0.01, fused=True),
    "sgd": lambda groups: SGD(groups, lr=0.05, momentum=0.9),
}


def tokens(micro_batches: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 17, (2, 6), generator=generator) for _ in range(micro_batches)]


def pairwise(terms: Sequence[Tensor]) -> Tensor:
    """The order of the sums, written down once more and in another way than in the engine."""
    if len(terms) == 1:
        return terms[0]
    half = 1 << ((len(terms) - 1).bit_length() - 1)
    return pairwise(terms[:half]) + pairwise(terms[half:])


def reference(
    model: nn.Module,
    make: Callable[[Any], Optimizer],
    data: Sequence[Sequence[Any]],
    groups: Callable[[nn.Module], Any] = two_groups,
    run: Callable[[nn.Module, Any], Tensor] = lambda model, batch: model(batch),
) -> tuple[list[float], dict[str, Tensor]]:
    """Train in one process: ``data[step]`` holds the micro-batches of all ranks in their order."""
    optimizer = make(groups(model))
    losses: list[float] = []
    for batches in data:
        sums: dict[nn.Parameter, list[Tensor]] = {}
        for batch in batches:
            loss = run(model, batch)
            loss.backward()
            losses.append(loss.item())
            for p in model.parameters():
                if p.grad is not None:
                    sums.setdefault(p, []).append(p.grad)
                    p.grad = None
        for p, terms in sums.items():
            zeros = [torch.zeros_like(p)] * (len(batches) - len(terms))
            p.grad = pairwise([*terms, *zeros]).mul_(1 / len(batches))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {n: v.detach().clone() for n, v in model.state_dict().items()}


def engine_run(
    engine: Any,
    data: Sequence[Sequence[Any]],
    rank: int,
    P: int,
    run: Callable[[Any, Any], Tensor] = lambda model, batch: model(batch),
) -> list[float]:
    """Train with an engine on this rank's micro-batches."""
    losses: list[float] = []
    for batches in data:
        for batch in batches[rank::P]:
            loss = run(engine, batch)
            losses.append(loss.item())
            engine.backward(loss)
        engine.step()
    return losses


def spread(
    data: Sequence[Sequence[Any]], losses: Sequence[float], rank: int, P: int
) -> list[float]:
    """The losses of this rank among those of all."""
    found: list[float] = []
    at = 0
    for batches in data:
        found += losses[at : at + len(batches)][rank::P]
        at += len(batches)
    return found


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """The names whose tensors differ in a bit."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return [n for n in ours if not torch.equal(ours[n], theirs[n])]


def over(function: Callable[..., Any], stages: Sequence[int], *args: Any) -> list[Any]:
    """Call a rank's function for several stages: starting ranks takes longer than most tests."""
    return [function(stage, *args) for stage in stages]
