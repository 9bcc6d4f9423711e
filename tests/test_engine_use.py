"""Is a wrong use told in words, and a right one (clipping, no_sync, replicas) right?"""

from __future__ import annotations

import copy
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_models import Odd, engine_run, over, pairwise, reference, same, tokens, two_groups
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, AdamW

from reshard.engine import RanksDisagree, ZeroEngine
from reshard.errors import InconsistentError, RequestError, ReshardError

STAGES = [0, 1, 2, 3]


def make(seed: int = 0) -> Odd:
    torch.manual_seed(seed)
    return Odd()


def adamw(groups: Any) -> AdamW:
    return AdamW(groups, lr=0.01)


@pytest.mark.parametrize("stage", STAGES)
def test_calls_at_the_wrong_time(stage: int) -> None:
    model = make()
    engine = ZeroEngine(model, adamw, stage=stage)
    batch = tokens(1)[0]
    with pytest.raises(RequestError, match="no backward"):
        engine.step()
    with pytest.raises(RequestError, match="no graph"):
        engine.backward(torch.tensor(1.0))
    with torch.no_grad():
        loss = engine(batch)
    with pytest.raises(RequestError, match="gradients enabled"):
        engine.backward(loss)
    with pytest.raises(RequestError, match="one element"):
        engine.backward(torch.ones(3, requires_grad=True) * 2)
    with pytest.raises(RequestError, match=r"instead of loss.backward"):
        engine(batch).backward()
    with pytest.raises(RequestError, match="already belongs"):
        ZeroEngine(model, adamw, stage=stage)
    engine.backward(engine(batch))
    assert engine.unsafe() == "1 micro-batches have been taken since the last step()"
    engine.step()
    assert engine.unsafe() is None
    with pytest.raises(RequestError, match="no backward"):
        engine.step()


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.call: Any = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        self.call()
        return self.layers[1](x).sum()


def call_inside() -> None:
    model = Calls()
    engine = ZeroEngine(model, adamw, stage=3)
    for call in (engine.step, engine.full_state_dict, lambda: engine.gathered().__enter__()):
        model.call = call
        with pytest.raises(RequestError, match="while a forward is under way"):
            engine(torch.ones(2, 3))
    model.call = lambda: None
    engine.backward(engine(torch.ones(2, 3)))  # a failed forward leaves nothing behind
    engine.step()


def test_a_call_inside_a_forward_and_a_forward_that_fails() -> None:
    run_ranks(call_inside, 2)


def threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def dropped_and_closed(folder: Path) -> None:
    rank = dist.get_rank()

    def train() -> ZeroEngine:
        engine = ZeroEngine(make(), adamw, stage=2)
        engine.backward(engine(tokens(2)[rank]))
        engine.step()
        return engine

    engine = train()
    assert threads("reshard-sums") == 1
    del engine
    last = train()
    for _ in range(2):
        last = train()
    wait_for(lambda: threads("reshard-sums") == 1)
    kept = train() if rank else None  # one rank drops its engine later than the other
    if not rank:
        train()
    last.save(folder / "ck", blocking=False)
    last.close()
    assert (folder / "ck").is_dir()
    calls: list[Any] = [last.step, last.full_state_dict, lambda: last.save(folder / "no")]
    for call in calls:
        with pytest.raises(RequestError, match="closed"):
            call()
    del kept
    wait_for(lambda: threads("reshard-sums") == 0)
    assert threads("reshard-watch") == 1  # one a process, for the engines that follow
    train().close()


def wait_for(true: Any) -> None:
    limit = time.monotonic() + 30
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_an_engine_that_is_dropped_or_closed_leaves_no_thread(tmp_path: Path) -> None:
    run_ranks(dropped_and_closed, 2, tmp_path)


def test_a_failed_backward_ends_the_run() -> None:
    model = Calls()
    engine = ZeroEngine(model, adamw, stage=3)
    loss = engine(torch.ones(2, 3, requires_grad=True))

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    loss.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss)
    with pytest.raises(RequestError, match="backward failed with ZeroDivisionError"):
        engine.step()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [({"stage": 4}, "stage=4"), ({"stage": 3, "prefetch": -1}, "prefetch"),
     ({"stage": 1, "clip_norm": 0.0}, "clip_norm"), ({"stage": 1, "units": "many"}, "no rule"),
     ({"stage": 1, "units": ["blocks.9"]}, "blocks.9"),
     ({"stage": 1, "units": [nn.Conv2d]}, "Conv2d")],
)  # fmt: skip
def test_arguments_that_make_no_sense(arguments: dict[str, Any], what: str) -> None:
    with pytest.raises(RequestError, match=what):
        ZeroEngine(make(), adamw, **arguments)


def test_models_that_cannot_be_divided() -> None:
    with torch.device("meta"):
        meta = nn.Linear(3, 3)
    with pytest.raises(RequestError, match="meta device"):
        ZeroEngine(meta, adamw, stage=3)
    with pytest.raises(RequestError, match="no shape yet"):
        ZeroEngine(nn.LazyLinear(3), adamw, stage=3)
    with pytest.raises(RequestError, match="trained"):
        ZeroEngine(nn.Linear(3, 3).requires_grad_(False), adamw, stage=3)


def different(what: str) -> str:
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(3, 4 + (rank if what == "shape" else 0)), nn.Linear(3, 3))
    if what == "frozen" and rank:
        model[1].requires_grad_(False)
    stage = 2 + (rank if what == "stage" else 0)
    try:
        ZeroEngine(model, adamw, stage=stage)
    except InconsistentError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("what", ["shape", "frozen", "stage"])
def test_ranks_with_different_engines(what: str) -> None:
    for said in run_ranks(different, 2, what):
        assert "rank 1 has" in said, said


def more_on_one_rank(stage: int, more: int) -> tuple[str, float]:
    rank = dist.get_rank()
    engine = ZeroEngine(make(), adamw, stage=stage)
    start = time.monotonic()
    try:
        for _ in range(1 + (more if rank == 1 else 0)):
            engine.backward(engine(tokens(1)[0]))
        engine.step()
    except ReshardError as error:
        return type(error).__name__, time.monotonic() - start
    return "nothing", 0.0


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_with_different_counts_of_backwards(stage: int) -> None:
    for kind, seconds in run_ranks(more_on_one_rank, 2, stage, 1):
        assert kind in ("RanksDisagree", "RankFailed"), kind
        assert seconds < 60  # the watch's own tests bound it


def unsynced_counts_differ() -> str:
    engine = ZeroEngine(make(), adamw, stage=2)
    with engine.no_sync():
        for _ in range(dist.get_rank()):
            engine.backward(engine(tokens(1)[0]))
    engine.backward(engine(tokens(1)[0]))
    try:
        engine.step()
    except RanksDisagree as error:
        return str(error)
    return "nothing"


def test_different_counts_are_told_at_the_step() -> None:
    for said in run_ranks(unsynced_counts_differ, 3):
        assert "rank 2: 3 backward passes" in said


def clipped(stage: int, mesh_shape: tuple[int, ...] | None) -> tuple[float, float, float]:
    rank, P, A = dist.get_rank(), dist.get_world_size(), 2
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names) if mesh_shape else None
    engine = ZeroEngine(make(rank), adamw, stage=stage, clip_norm=0.3, mesh=mesh)
    data = [tokens(P * A, seed) for seed in range(3)]
    model = make()
    optimizer = adamw(model.parameters())
    worst = far = norm = 0.0
    for batches in data:
        for batch in batches[rank::P]:
            engine.backward(engine(batch))
        info = engine.step()
        terms: dict[nn.Parameter, list[Tensor]] = {}
        for batch in batches:
            model(batch).backward()
            for p in model.parameters():
                if p.grad is not None:
                    terms.setdefault(p, []).append(p.grad)
                    p.grad = None
        for p, found in terms.items():
            p.grad = pairwise(found).mul_(1 / len(batches))
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.3))
        optimizer.step()
        optimizer.zero_grad()
        assert info.norm is not None and norm > 0.3
        worst = max(worst, abs(info.norm - norm) / norm)
    ours = engine.full_state_dict()
    for name, value in model.state_dict().items():
        if value.numel():
            far = max(far, float((ours[name] - value).abs().max()))
    return worst, far, norm


@pytest.mark.parametrize(("P", "mesh"), [(1, None), (2, None), (3, None), (4, (2, 2))])
def test_clipping_is_that_of_torch(P: int, mesh: tuple[int, ...] | None) -> None:
    for results in run_ranks(over, P, clipped, STAGES, mesh):
        for worst, far, _ in results:
            assert worst < 1e-5 and far < 1e-5, results


def replicated(stage: int) -> list[str]:
    rank, P = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    engine = ZeroEngine(make(rank), adamw, groups=two_groups, stage=stage, mesh=mesh)
    data = [tokens(2 * P, seed) for seed in range(2)]
    engine_run(engine, data, rank, P)
    assert (engine.shards, engine.replica) == ((2, rank // 2) if stage else (1, rank))
    return same(engine.full_state_dict(), reference(make(), adamw, data)[1])


def test_copies_of_groups_are_one_process_too() -> None:
    for differing in run_ranks(over, 4, replicated, STAGES):
        assert differing == [[]] * 4


def unsynced(stage: int) -> float:
    rank, P = dist.get_rank(), dist.get_world_size()
    engine = ZeroEngine(make(), adamw, groups=two_groups, stage=stage)
    data = [tokens(3 * P, seed) for seed in range(2)]
    for turn, batches in enumerate(data):
        own = batches[rank::P]
        with engine.no_sync():
            for batch in own[:-1] if turn else own:  # once without any backward outside
                engine.backward(engine(batch))
        if turn:
            engine.backward(engine(own[-1]))
        engine.step()
        assert all(p.grad is None for p in engine.module.parameters())
    truth = reference(make(), adamw, data)[1]
    ours = engine.full_state_dict()
    return max(float((ours[n] - v).abs().max()) for n, v in truth.items() if v.numel())


def test_no_sync_loses_nothing() -> None:
    for far in run_ranks(over, 2, unsynced, STAGES):
        assert max(far) < 2e-5


class Surprising(nn.Module):
    """A parameter and a unit that have their first gradient late, or only on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.more = nn.Parameter(torch.ones(3))
        self.turn = 0

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            if k != 1 or self.turn > 1:
                x = torch.tanh(layer(x))
        return (x * self.more if self.turn > 1 else x).square().sum()


def surprised(stage: int) -> list[str]:
    rank, P = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = Surprising()
    plain = copy.deepcopy(model)
    engine = ZeroEngine(model, adamw, stage=stage)
    data = [[torch.randn(2, 3) for _ in range(P)] for _ in range(5)]
    for turn, batches in enumerate(data):
        model.turn = turn
        engine.backward(engine(batches[rank]))
        engine.step()
    plain.turn = -1

    def run(model: Any, batch: Tensor) -> Tensor:
        model.turn = next(t for t, b in enumerate(data) if any(x is batch for x in b))
        return model(batch)

    def one_group(model: nn.Module) -> Any:
        return model.parameters()

    truth = reference(plain, adamw, data, groups=one_group, run=run)[1]
    return same(engine.full_state_dict(), truth)


def test_a_late_gradient_is_not_lost() -> None:
    for differing in run_ranks(over, 2, surprised, STAGES):
        assert differing == [[]] * 4


def plain_torch_loads(stage: int) -> None:
    rank = dist.get_rank()
    engine = ZeroEngine(make(), adamw, stage=stage)
    engine.backward(engine(tokens(2)[rank]))
    engine.step()
    state = engine.full_state_dict(rank0=True)
    assert bool(state) == (rank == 0)
    state = engine.full_state_dict()
    plain = make(9)
    plain.load_state_dict(state, strict=True)
    assert torch.equal(plain(tokens(1)[0]), engine(tokens(1)[0]))
    text = str(engine.explain())
    assert f"stage {stage} over 2 ranks" in text and "blocks.1" in text


def test_plain_torch_loads_the_whole_state() -> None:
    run_ranks(over, 2, plain_torch_loads, STAGES)


def test_units_by_rule() -> None:
    def labels(**how: Any) -> list[str]:
        engine = ZeroEngine(make(), lambda g: SGD(g, lr=0.1), stage=3, **how)
        return [r.unit.label for r in engine._core.residents]

    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    assert labels() == ["root", *blocks, "tail.0"]
    assert labels(units="root") == ["root"]
    assert labels(units=["blocks", "tail"]) == ["root", "blocks", "tail"]
    assert labels(units=[nn.LayerNorm]) == ["root", *(f"{b}.norm" for b in blocks)]
    assert labels(units=lambda name, _: name in ("blocks.0", "blocks.0.up")) == [
        "root", "blocks.0", "blocks.0.up"]  # fmt: skip
