"""Does an engine train a stage of a real pipeline as one process trains the whole model?

Two stages on two data ranks each, by the schedules of ``torch.distributed.pipelining``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_models import OPTIMIZERS, reference, same, two_groups
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional

import reshard
from reshard.engine import Precision, ZeroEngine
from reshard.engine.topology import Topology
from reshard.errors import InconsistentError, RequestError, UnsupportedError

WIDTH, STEPS, STAGES, A = 8, 3, 2, 4
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Net(nn.Module):
    """A model whose layers can be left out: the names of the others stay."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed: Any = nn.Embedding(17, WIDTH)
        self.layers = nn.ModuleDict(
            {str(k): nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH))
             for k in range(4)}
        )  # fmt: skip
        self.head: Any = nn.Linear(WIDTH, 17)
        self.factor: Any
        self.register_buffer("factor", torch.tensor([0.5, 2.0]))
        self.sharp: Any
        self.register_buffer("sharp", torch.tensor(1.5))

    def cut(self, stage: int) -> Net:
        kept = ("0", "1") if stage == 0 else ("2", "3")
        for key in [k for k in self.layers if k not in kept]:
            del self.layers[key]
        if stage == 0:
            self.head = self.sharp = None
        else:
            self.embed = None
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x) * self.factor[0]
        for layer in self.layers.values():
            x = x + layer(x)
        if self.head is None:
            return x
        return self.head(x * self.sharp)


def loss_of(output: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), tokens.roll(1, 1).flatten())


def data(P: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randint(0, 17, (2, 6), generator=generator) for _ in range(P * A)]
        for _ in range(STEPS)
    ]


def truth(P: int) -> dict[str, Tensor]:
    return reference(
        Net(), OPTIMIZERS["adamw"], data(P), run=lambda model, batch: loss_of(model(batch), batch)
    )[1]


class Part:
    """This rank's stage of the pipeline, and how it is trained."""

    def __init__(self, stage: int, schedule: str = "gpipe", **settings: Any) -> None:
        torch.set_num_threads(1)
        topology = Topology(dist.get_world_size(), dist.get_world_size(), pipeline=STAGES)
        self.groups = topology.make()
        self.rank, self.P = dist.get_rank(self.groups.data), dist.get_world_size(self.groups.data)
        self.number = topology.coordinate(dist.get_rank())["pipeline"]
        self.last = self.number == STAGES - 1
        self.engine = ZeroEngine(
            Net().cut(self.number), OPTIMIZERS["adamw"], groups=two_groups, stage=stage,
            mesh=self.groups, **settings,
        )  # fmt: skip
        place = PipelineStage(
            self.engine.pipelined(), self.number, STAGES, torch.device("cpu"),
            group=self.groups.pipeline,
        )  # fmt: skip
        self.schedule = SCHEDULES[schedule](place, A, loss_fn=loss_of)

    def step(self, batches: list[Tensor]) -> Any:
        mine = torch.cat(batches[self.rank :: self.P])
        if self.last:
            self.schedule.step(target=mine, losses=[])
        else:
            self.schedule.step(mine)
        return self.engine.step()

    def differing(self, expected: dict[str, Tensor]) -> list[str]:
        ours = self.engine.full_state_dict()
        names = [n for n in expected if n in ours]
        assert len(names) == len(ours)
        return same(ours, {n: expected[n] for n in names})


def train(cases: list[tuple[int, str]]) -> list[Any]:
    found = []
    for stage, schedule in cases:
        part = Part(stage, schedule)
        expected = truth(part.P)
        for batches in data(part.P):
            part.step(batches)
        found.append((stage, schedule, part.differing(expected)))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_a_pipeline_trains_as_one_process(world: int) -> None:
    cases = [(0, "gpipe"), *((stage, name) for stage in (1, 2, 3) for name in SCHEDULES)]
    for results in run_ranks(train, world, cases, limit=120):
        for stage, schedule, differing in results:
            assert not differing, (stage, schedule, differing)


def clipped(stage: int) -> float:
    """How far norms are from those of the whole model in one process."""
    part = Part(stage, clip_norm=0.1)
    model, worst = Net(), 0.0
    optimizer = OPTIMIZERS["adamw"](two_groups(model))
    for batches in data(part.P):
        info = part.step(batches)
        for batch in batches:
            (loss_of(model(batch), batch) / len(batches)).backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
        assert norm > 0.1 and info.norm is not None
        worst = max(worst, abs(info.norm - norm) / norm)
    return worst


def test_the_norm_is_that_of_all_stages() -> None:
    for stage in (1, 3):
        assert max(run_ranks(clipped, 4, stage)) < 1e-5


def overflowed() -> list[tuple[bool, float]]:
    """Only the last stage's gradients overflow, in the second step."""
    part = Part(2, precision=Precision(loss_scale="dynamic", first_scale=4.0))
    said = []
    for turn, batches in enumerate(data(part.P)):
        if turn == 1 and part.last and part.rank == 0:
            module: Any = part.engine.module
            module.head.bias.register_hook(lambda g: g * float("inf"))
        info = part.step(batches)
        said.append((info.skipped, info.loss_scale))
    return said


def test_a_step_is_skipped_on_all_stages() -> None:
    for said in run_ranks(overflowed, 4):
        assert said == [(False, 4.0), (True, 2.0), (True, 1.0)]


def save(folder: Path) -> None:
    part = Part(3)
    for batches in data(part.P)[:2]:
        part.step(batches)
    part.engine.save(folder / "ck", client={"epoch": 1}, blocking=False).wait()


def go_on(folder: Path, stage: int) -> list[str]:
    """Load into a pipeline of as many or fewer data ranks and take the last step."""
    part = Part(stage)
    loaded = part.engine.load(folder / "ck")
    assert loaded.step == 2 and loaded.client == {"epoch": 1} and not loaded.left, loaded
    if part.P == 2:
        part.step(data(part.P)[2])
        return part.differing(truth(part.P))
    return []


def go_on_alone(folder: Path) -> list[str]:
    """Load into an engine without a pipeline."""
    engine = ZeroEngine(Net(), OPTIMIZERS["adamw"], groups=two_groups, stage=2)
    engine.load(folder / "ck")
    rank, P = dist.get_rank(), dist.get_world_size()
    for batch in data(2)[2][rank::P]:
        engine.backward(loss_of(engine(batch), batch))
    engine.step()
    return same(engine.full_state_dict(), truth(2))


def test_one_checkpoint_for_any_pipeline_or_none(tmp_path: Path) -> None:
    run_ranks(save, 4, tmp_path)
    found = reshard.open(tmp_path / "ck")
    assert found.manifest.layout.mesh == {"shard": 2, "pipeline": 2}
    assert reshard.verify(tmp_path / "ck").problems == ()
    assert set(Net().state_dict()) == {name for name, _ in found.manifest.tensors} - {
        f"rng.{rank}" for rank in range(4)
    }
    for world, stage in ((4, 2), (2, 1)):
        assert not any(run_ranks(go_on, world, tmp_path, stage)), (world, stage)
    assert not any(run_ranks(go_on_alone, 4, tmp_path))
    reshard.convert(tmp_path / "ck", tmp_path / "three", reshard.Wanted(world=3))
    a, b = reshard.open(tmp_path / "three"), reshard.open(tmp_path / "ck")
    for name in Net().state_dict():
        assert (a[name].numpy() == b[name].numpy()).all(), name


def strange(folder: Path) -> list[str]:
    said = []
    part = Part(2)
    try:
        part.engine.load(folder / "ck")
    except RequestError as error:
        said.append(str(error))
    other = ZeroEngine(
        nn.Sequential(nn.Linear(3, 3)), OPTIMIZERS["adamw"], stage=1, mesh=part.groups
    )
    try:
        other.save(folder / "same names")
    except InconsistentError as error:
        said.append(str(error))
    try:
        Part(1, clip_norm=1.0 + part.number)
    except InconsistentError as error:
        said.append(str(error))
    return said


def more(folder: Path) -> None:
    model = Net()
    model.extra = nn.Parameter(torch.ones(3))
    ZeroEngine(model, OPTIMIZERS["adamw"], groups=two_groups, stage=2).save(folder / "ck")


def test_what_doesnt_fit_is_told(tmp_path: Path) -> None:
    run_ranks(more, 1, tmp_path)
    for said in run_ranks(strange, 4, tmp_path):
        assert "no stage of the pipeline has extra" in said[0]
        assert "stages 0 and 1 of the pipeline both have a parameter" in said[1]
        assert "clip_norm=1.0" in said[2] and "clip_norm=2.0" in said[2]


def tensor_parallel() -> None:
    groups = Topology(2, 2, tensor=2).make()
    with pytest.raises(UnsupportedError, match="2 tensor ranks"):
        ZeroEngine(nn.Linear(3, 3), OPTIMIZERS["adamw"], stage=1, mesh=groups)


def test_tensor_parallel_groups_are_refused() -> None:
    run_ranks(tensor_parallel, 2)
