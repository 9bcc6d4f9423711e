"""Is each stage's memory what theory says, at rest and before the step?

A walk over every tensor that Python can reach, each storage once, gradients included; so a whole
gradient, a send buffer or a copy of the parameters that is kept would be seen.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from engine_models import over
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim import AdamW

from reshard.engine import Precision, ZeroEngine

WIDTH, LAYERS = 192, 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def bytes_alive() -> int:
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):  # isinstance would wake lazy modules
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def scratch(engine: ZeroEngine) -> int:
    """Blocks of a fixed size, whatever the model, in which sums are made."""
    transport: Any = engine._core.shard.inner
    sums = transport._sums
    return sum(t.numel() * t.element_size() for ts in sums._scratch.values() for t in ts)


def measure(stage: int, precision: Precision | None, A: int) -> dict[str, float]:
    dtype = precision.param if precision else torch.float32
    x = torch.randn(2, WIDTH, dtype=dtype)
    gc.collect()
    gc.freeze()  # what was there before isn't looked at
    base = bytes_alive()
    engine = ZeroEngine(Net(), lambda g: AdamW(g, lr=0.01), stage=stage, precision=precision)
    N = sum(p.numel() for p in engine.module.parameters())
    found: dict[str, float] = {}
    peaks: list[int] = []
    for _ in range(2):
        for _ in range(A):
            loss = engine(x)
            engine.backward(loss)
            del loss
        found["before"] = (bytes_alive() - base - scratch(engine)) / N
        info = engine.step()
        found["rest"] = (bytes_alive() - base - scratch(engine)) / N
        peaks.append(info.peak)
    explained = engine.explain()
    found["explained"] = sum(explained.at_rest.values()) / N
    found["explained before"] = sum(explained.before_step.values()) / N
    found["peak"] = max(peaks) * LAYERS / N
    return found


def all_cases(cases: list[tuple[int, Any, int]]) -> list[dict[str, float]]:
    return [measure(*case) for case in cases]


BF16 = Precision(param=torch.bfloat16)


@pytest.mark.parametrize("P", [2, 4])
def test_bytes_a_parameter(P: int) -> None:
    cases = [(s, p, A) for s in (0, 1, 2, 3) for p, A in ((BF16, 2), (None, 1))]
    for results in run_ranks(all_cases, P, cases):
        for (stage, precision, A), found in zip(cases, results, strict=True):
            parameter = 2 if precision else 4
            state = 12 if precision else 8  # in fp32 the master is the parameter itself
            if stage == 0:
                rest, gradient = parameter + state, 4.0
            elif stage < 3:
                rest, gradient = parameter + state / P, 4.0 if stage == 1 else 4 / P
            else:
                rest, gradient = 12 / P, 4 / P
            where = (stage, precision, A, P, found)
            assert found["rest"] == pytest.approx(rest, rel=0.01), where
            assert found["before"] == pytest.approx(rest + gradient, rel=0.01), where
            assert found["explained"] == pytest.approx(rest, rel=0.01), where
            assert found["explained before"] == pytest.approx(gradient, rel=0.01), where
            if stage == 3:  # the root has nothing; one unit runs, one is ahead
                assert found["peak"] <= 2.01, where


def peak_of_prefetch(prefetch: int) -> float:
    engine = ZeroEngine(Net(), lambda g: AdamW(g), stage=3, prefetch=prefetch)
    engine.backward(engine(torch.randn(2, WIDTH)))
    peak = engine.step().peak
    residency = engine._core.residency
    assert residency is not None and residency.live == 0
    return peak / residency.residents[1].elements


def test_prefetch_costs_a_unit_each() -> None:
    for peaks in run_ranks(over, 2, peak_of_prefetch, [0, 1, 3]):
        assert peaks == [1, 2, 4]


def kept_in_a_backward(stage: int) -> float:
    """The most gradient bytes that live at a time inside a backward, in N elements of 4 bytes."""
    engine = ZeroEngine(Net(), lambda g: AdamW(g), stage=stage)
    N = sum(p.numel() for p in engine.module.parameters())
    reducer = engine._core.reducer
    most = 0.0

    def look(*_: Any) -> None:
        nonlocal most
        buffers = {id(b): b for b in reducer._pool}
        buffers |= {id(i.buffer): i.buffer for i in reducer.intakes if i.buffer is not None}
        grads = [p.grad for p in engine.module.parameters() if p.grad is not None]
        most = max(most, sum(t.numel() for t in [*buffers.values(), *grads]) / N)

    layers: Any = engine.module.layers
    for layer in layers:
        layer.weight.register_post_accumulate_grad_hook(look)
    for _ in range(2):
        engine.backward(engine(torch.randn(2, WIDTH)))
        engine.step()
    return most


def test_send_buffers_are_few() -> None:
    for most in run_ranks(over, 2, kept_in_a_backward, [2, 3]):
        assert max(most) <= 3.5 / LAYERS
