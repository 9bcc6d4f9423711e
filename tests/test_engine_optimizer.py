"""Is the optimizer the user's own: groups, schedulers, states, and which ones are refused?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_models import Odd, engine_run, over, pairwise, reference, same, tokens, two_groups
from ranks import run_ranks
from torch import nn
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)  # fmt: skip
from torch.optim.lr_scheduler import LambdaLR

from reshard.engine import ZeroEngine
from reshard.errors import RequestError, UnsupportedError

KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **{k.__name__: (lambda g, k=k: k(g, lr=0.01))
       for k in (Adadelta, Adagrad, Adam, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop)},
    "AdamW, amsgrad": lambda g: AdamW(g, lr=0.01, amsgrad=True),
    "SGD, nesterov": lambda g: SGD(g, lr=0.01, momentum=0.9, nesterov=True),
}  # fmt: skip


def make(seed: int = 0) -> Odd:
    torch.manual_seed(seed)
    return Odd()


def every_kind(stage: int) -> dict[str, list[str]]:
    rank, P = dist.get_rank(), dist.get_world_size()
    data = [tokens(P, seed) for seed in range(3)]
    found: dict[str, list[str]] = {}
    for name, kind in KINDS.items():
        engine = ZeroEngine(make(), kind, groups=two_groups, stage=stage)
        engine_run(engine, data, rank, P)
        found[name] = same(engine.full_state_dict(), reference(make(), kind, data)[1])
    return found


def test_every_elementwise_optimizer() -> None:
    for results in run_ranks(over, 2, every_kind, [1, 3]):
        for found in results:
            assert found == {name: [] for name in KINDS}


class Whole(SGD):
    """Scales by the norm of the whole parameter, under a name that says nothing."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad * p.norm(), alpha=-group["lr"])


class Own(SGD):
    """Elementwise, and nobody knows it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=-group["lr"])


REFUSED: dict[str, Callable[[Any], Any]] = {
    "LBFGS": LBFGS,
    "Adafactor": Adafactor,
    "SparseAdam": SparseAdam,
    "Whole": lambda g: Whole(g, lr=0.1),
}
if hasattr(torch.optim, "Muon"):
    REFUSED["Muon"] = lambda g: torch.optim.Muon(g, lr=0.1)


@pytest.mark.parametrize("name", list(REFUSED))
def test_others_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        ZeroEngine(make(), REFUSED[name], stage=1)


def test_an_unknown_elementwise_one_is_taken() -> None:
    engine = ZeroEngine(make(), lambda g: Own(g, lr=0.1), stage=1)
    engine_run(engine, [tokens(1)], 0, 1)


@pytest.mark.parametrize(
    ("groups", "what"),
    [
        ([{"params": ["blocks.*"]}], "in no group"),
        ([{"params": ["nowhere.*"]}], "no parameter fits"),
        ([{"params": ["*"]}, {"params": ["never"]}], "in groups 0 and 1"),
        ([{"params": [nn.Parameter(torch.ones(2))]}], "no parameter of the model"),
    ],
)
def test_groups_that_make_no_sense(groups: Any, what: str) -> None:
    with pytest.raises(RequestError, match=what):
        ZeroEngine(make(), lambda g: SGD(g, lr=0.1), groups=groups, stage=1)


def test_what_is_no_optimizer() -> None:
    with pytest.raises(RequestError, match="lambda groups"):
        ZeroEngine(make(), lambda groups: None, stage=1)  # type: ignore[arg-type,return-value]
    other = nn.Parameter(torch.ones(3))
    with pytest.raises(RequestError, match="doesn't hold the parameters"):
        ZeroEngine(make(), lambda groups: SGD([other], lr=0.1), stage=1)


def scheduled(stage: int) -> list[str]:
    rank, P = dist.get_rank(), dist.get_world_size()
    data = [tokens(P, seed) for seed in range(4)]
    names = [
        {"params": ["*.bias", "*gain", "*empty", "*unused", "*.norm.weight"], "lr": 0.02},
        {"params": ["*embed.weight", "*up.weight", "*down.weight", "tail.0.weight", "never"]},
    ]

    def groups(model: nn.Module) -> Any:
        named = dict(model.named_parameters())
        small = [
            p
            for n, p in named.items()
            if n.endswith((".bias", "gain", "empty", "unused", ".norm.weight"))
        ]
        ids = set(map(id, small))
        return [{"params": small, "lr": 0.02},
                {"params": [p for p in named.values() if id(p) not in ids]}]  # fmt: skip

    def warm(step: int) -> float:
        return (step + 1) / 4

    engine = ZeroEngine(make(), lambda g: AdamW(g, lr=0.01), groups=names, stage=stage)
    scheduler = LambdaLR(engine.optimizer, warm)
    model = make()
    optimizer = AdamW(groups(model), lr=0.01)
    truth = LambdaLR(optimizer, warm)
    for batches in data:
        engine.backward(engine(batches[rank]))
        engine.step()
        scheduler.step()
        terms: dict[nn.Parameter, list[Any]] = {}
        for batch in batches:
            model(batch).backward()
            for p in model.parameters():
                if p.grad is not None:
                    terms.setdefault(p, []).append(p.grad)
                    p.grad = None
        for p, found in terms.items():
            p.grad = pairwise(found).mul_(1 / P)
        optimizer.step()
        optimizer.zero_grad()
        truth.step()
    assert [g["lr"] for g in engine.groups] == [g["lr"] for g in optimizer.param_groups]
    return same(engine.full_state_dict(), dict(model.state_dict()))


def test_groups_by_name_and_a_scheduler() -> None:
    for differing in run_ranks(over, 2, scheduled, [0, 2, 3]):
        assert differing == [[]] * 3


def states(stage: int) -> None:
    """A slice's states together are what plain torch has for the whole parameter."""
    rank, P = dist.get_rank(), dist.get_world_size()
    data = [tokens(P, seed) for seed in range(2)]
    engine = ZeroEngine(make(), lambda g: AdamW(g, lr=0.01), groups=two_groups, stage=stage)
    engine_run(engine, data, rank, P)
    plain = make()
    made: list[Any] = []
    reference(plain, lambda g: made.append(AdamW(g, lr=0.01)) or made[0], data)
    named = dict(plain.named_parameters())
    for flat in engine.flats:
        if not flat.trained:
            assert list(engine.states(flat)) == ["param"]
            continue
        assert set(engine.states(flat)) <= {"master", "exp_avg", "exp_avg_sq"}
        pieces = flat.pieces(engine.shard, engine.shards)
        for state in ("exp_avg", "exp_avg_sq"):
            parts = dict(engine.parts(flat, state))
            for piece in pieces:
                name = flat.entries[piece.entry].name
                theirs = made[0].state[named[name]]
                if not theirs:  # never had a gradient
                    assert piece.low not in parts and engine.scalars(name) is None
                    continue
                whole = theirs[state].reshape(-1)
                end = piece.start + piece.high - piece.low
                assert torch.equal(parts[piece.low], whole[piece.start : end])
                assert engine.scalars(name) == {"step": theirs["step"]}


def test_states_are_those_of_torch() -> None:
    run_ranks(over, 3, states, [0, 1, 2, 3])
