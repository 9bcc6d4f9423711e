"""Training that stops and goes on: the same data for any number of ranks, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine_models import OPTIMIZERS, Odd, two_groups
from torch import Tensor
from torch.optim.lr_scheduler import StepLR

from reshard.engine import Precision, ZeroEngine
from reshard.engine.data import Samples
from reshard.engine.load import Loaded
from reshard.engine.values import raw

M = 8
"""Micro-batches of a step, of all ranks together."""
SAMPLES = 50


@dataclass
class Run:
    """What a rank saw.

    Parameters
    ----------
    losses
        (step, micro-batch of all ranks) to loss.
    samples
        All samples that were read, in order.
    state
        The masters at the end; of rank 0 alone.
    """

    losses: dict[tuple[int, int], float] = field(default_factory=dict)
    samples: list[int] = field(default_factory=list)
    state: Mapping[str, Tensor] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    loaded: Loaded | None = None


class Trainer:
    """One rank's training."""

    def __init__(
        self,
        stage: int,
        *,
        optimizer: str = "adamw",
        precision: Precision | None = None,
        seed: int = 5,
        M: int = M,
    ) -> None:
        torch.set_num_threads(1)
        self.M = M
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.P = dist.get_world_size() if dist.is_initialized() else 1
        torch.manual_seed(seed)
        self.engine = ZeroEngine(
            Odd(), OPTIMIZERS[optimizer], groups=two_groups, stage=stage, precision=precision
        )
        self.scheduler = StepLR(self.engine.optimizer, 2, gamma=0.5)
        self.data = Samples(SAMPLES, 2, rank=self.rank, world=self.P, seed=3)
        self.run = Run()
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(0, 17, (SAMPLES, 6), generator=generator)

    def backward(self, step: int, j: int) -> None:
        """One micro-batch."""
        samples = self.data.take()
        loss = self.engine(self._tokens[torch.from_numpy(samples)])
        self.engine.backward(loss)
        self.run.losses[step, j * self.P + self.rank] = loss.item()
        self.run.samples += samples.tolist()

    def train(self, steps: int) -> Run:
        """Some steps of M micro-batches."""
        for _ in range(steps):
            step = self.engine.counters["step"]
            for j in range(self.M // self.P):
                self.backward(step, j)
            self.engine.step()
            self.scheduler.step()
            self.run.rates.append(float(self.scheduler.get_last_lr()[0]))
        return self.run

    def end(self) -> Run:
        """The run with its masters."""
        self.run.state = self.engine.full_state_dict(masters=True, rank0=True)
        return self.run

    def save(self, path: Path, **settings: Any) -> Any:
        """Save everything."""
        return self.engine.save(path, scheduler=self.scheduler, data=self.data, **settings)

    def load(self, path: Path, **settings: Any) -> Loaded:
        """Load everything."""
        settings = {"scheduler": self.scheduler, "data": self.data, **settings}
        self.run.loaded = self.engine.load(path, **settings)
        return self.run.loaded


def joined(runs: list[Run]) -> dict[tuple[int, int], float]:
    """The losses of all ranks."""
    found: dict[tuple[int, int], float] = {}
    for run in runs:
        assert not found.keys() & run.losses.keys()
        found |= run.losses
    return found


def differing(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that differ in a bit."""
    assert a.keys() == b.keys()
    return [n for n in a if raw(a[n]).tobytes() != raw(b[n]).tobytes()]
