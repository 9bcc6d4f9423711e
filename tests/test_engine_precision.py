"""Is mixed precision what it says: narrow parameters, fp32 masters, sums in fp32, skipped steps?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_models import over, pairwise, same
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW

from reshard.engine import Precision, ZeroEngine
from reshard.errors import RequestError, UnsupportedError

WIDTH, STEPS, A = 8, 3, 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.fixed = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.mean: Any
        self.register_buffer("mean", torch.full((WIDTH,), 0.1))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.fixed
        return (x.float() - self.mean).square().mean()


def make(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def data(P: int, dtype: torch.dtype) -> list[list[Tensor]]:
    g = torch.Generator().manual_seed(5)
    return [[torch.randn(3, WIDTH, generator=g).to(dtype) for _ in range(P * A)]
            for _ in range(STEPS)]  # fmt: skip


def adamw(groups: Any) -> AdamW:
    return AdamW(groups, lr=0.01)


def truth(P: int, dtype: torch.dtype, scale: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = make()
    masters = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    mean = model.mean.clone()
    model.to(dtype)
    model.mean = mean
    optimizer = AdamW([nn.Parameter(m) for m in masters.values()], lr=0.01)
    leaves = optimizer.param_groups[0]["params"]
    named = [p for p in model.parameters() if p.requires_grad]
    for step in data(P, dtype):
        terms: list[list[Tensor]] = [[] for _ in named]
        for x in step:
            (model(x) * scale).backward()
            for found, p in zip(terms, named, strict=True):
                assert p.grad is not None
                found.append(p.grad.float())
                p.grad = None
        for found, leaf in zip(terms, leaves, strict=True):
            leaf.grad = pairwise(found).mul_(1 / (len(step) * scale))
        optimizer.step()
        with torch.no_grad():
            for p, leaf in zip(named, leaves, strict=True):
                p.copy_(leaf)
    names = list(masters)
    return (
        {n: v.detach().clone() for n, v in model.state_dict().items()},
        {n: leaf.detach().clone() for n, leaf in zip(names, leaves, strict=True)},
    )


CASES = [
    (torch.bfloat16, None, 1.0),
    (torch.float16, 1024.0, 1024.0),
    (torch.float16, None, 2.0**16),
]


def train(stages: list[int]) -> list[Any]:
    rank, P = dist.get_rank(), dist.get_world_size()
    found: list[Any] = []
    for dtype, wanted, scale in CASES:
        state, masters = truth(P, dtype, scale)
        for stage in stages:
            precision = Precision(param=dtype, loss_scale=wanted)
            engine = ZeroEngine(make(rank), adamw, stage=stage, precision=precision)
            for step in data(P, dtype):
                for x in step[rank::P]:
                    engine.backward(engine(x))
                info = engine.step()
                assert not info.skipped and info.loss_scale == scale
            ours = engine.full_state_dict()
            whole = engine.full_state_dict(masters=True)
            apart = [n for n in masters if not torch.equal(masters[n], whole[n])]
            types = ours["mean"].dtype, ours["count"].dtype, ours["fixed"].dtype
            found.append((str(dtype), stage, same(ours, state), apart, *types))
    return found


@pytest.mark.parametrize("P", [1, 2])
def test_mixed_precision_is_that_of_one_process(P: int) -> None:
    for results in run_ranks(train, P, [0, 1, 2, 3]):
        for dtype, stage, differing, masters, mean, count, fixed in results:
            assert not differing and not masters, (dtype, stage, P, differing, masters)
            assert (mean, count, str(fixed)) == (torch.float32, torch.int64, dtype)


def overflow(stage: int) -> list[Any]:
    """Only one rank overflows; all skip, and nothing has changed."""
    rank = dist.get_rank()
    rule = Precision(param=torch.float16, first_scale=256.0, interval=2)
    engine = ZeroEngine(make(), adamw, stage=stage, precision=rule)
    found: list[Any] = []
    for turn in range(5):
        before = engine.full_state_dict(masters=True)
        loss = engine(torch.randn(3, WIDTH).half())
        engine.backward(loss * 1e30 if turn == 1 and rank == 1 else loss)
        info = engine.step()
        changed = not all(torch.equal(before[n], v) for n, v in
                          engine.full_state_dict(masters=True).items())  # fmt: skip
        found.append((info.skipped, changed, info.loss_scale, info.step))
    return found


def test_an_overflow_is_skipped_by_all() -> None:
    expected = [(False, True, 256.0, 1), (True, False, 128.0, 2), (False, True, 128.0, 3),
                (False, True, 256.0, 4), (False, True, 256.0, 5)]  # fmt: skip
    for found in run_ranks(over, 2, overflow, [0, 1, 2, 3]):
        assert found == [expected] * 4


def small_gradients(narrow: bool) -> float:
    """Many ranks' tiny gradients beside a large one: a narrow sum would lose them."""
    rank = dist.get_rank()
    model = nn.Linear(4, 1, bias=False)
    precision = Precision(param=torch.bfloat16)
    engine = ZeroEngine(model, lambda g: torch.optim.SGD(g, lr=1.0), stage=2, precision=precision)
    before = engine.full_state_dict(masters=True)["weight"]
    x = torch.full((1, 4), 1.0 if rank == 0 else 2.0**-9).bfloat16()
    engine.backward(engine(x).sum())
    engine.step()
    return float((before - engine.full_state_dict(masters=True)["weight"])[0, 0])


def test_narrow_gradients_are_summed_wide() -> None:
    expected = (1 + 3 * 2.0**-9) / 4
    for found in run_ranks(small_gradients, 4, True):
        assert found == pytest.approx(expected, rel=1e-4)
        assert torch.tensor(1.0).bfloat16() + torch.tensor(2.0**-9).bfloat16() == 1  # why


def written_keeps_digits() -> None:
    engine = ZeroEngine(make(), adamw, stage=3, precision=Precision(param=torch.bfloat16))
    before = engine.full_state_dict(masters=True)
    with engine.gathered(write="all"), torch.no_grad():
        engine.module.get_parameter("layers.0.bias").fill_(0.5)
    after = engine.full_state_dict(masters=True)
    assert (after["layers.0.bias"] == 0.5).all()
    assert all(torch.equal(before[n], after[n]) for n in before if n != "layers.0.bias")


def test_a_write_leaves_the_digits_of_other_masters() -> None:
    run_ranks(written_keeps_digits, 2)


def test_a_mix_of_types() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4).double(), nn.Linear(4, 4))
    model[1].register_parameter("table", nn.Parameter(torch.arange(3), requires_grad=False))
    engine = ZeroEngine(model, adamw, stage=3)
    assert {f.dtype for f in engine.flats} == {"float64", "float32", "int64"}
    loss = functional.mse_loss(
        model[1](model[0](torch.ones(2, 4).double()).float()), torch.ones(2, 4)
    )
    engine.backward(loss)
    engine.step()
    assert engine.full_state_dict()["0.weight"].dtype == torch.float64


@pytest.mark.parametrize(
    "arguments",
    [{"param": torch.int8}, {"loss_scale": 0}, {"loss_scale": "fast"}, {"growth": 1.0},
     {"interval": 0}, {"reduce": torch.int32}],
)  # fmt: skip
def test_nonsense_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        Precision(**arguments)


@pytest.mark.parametrize("where", ["param", "reduce"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bits_are_refused_by_name(where: str, dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedError, match=rf"Precision\({where}={dtype}\)"):
        Precision(**{where: dtype})  # type: ignore[arg-type]
