"""An optimizer with a group of one 0-d parameter: its moments look like a count of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import reshard


def stepped() -> tuple[Any, dict[str, Any]]:
    """AdamW after a step over ``w`` and, in a group of its own, ``heat``; and the model's dict."""
    weight, heat = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.tensor(0.5))
    groups = [{"params": [("w", weight)]}, {"params": [("heat", heat)], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    (weight.sum() * heat).backward()
    optimizer.step()
    return optimizer, {"w": weight.data, "heat": heat.data}


def check(path: Path, optimizer: Any) -> None:
    """The moments of ``heat`` are tensors as it is one; its steps are one value."""
    found = reshard.open(path)
    for moment in ("exp_avg", "exp_avg_sq"):
        read = found["heat", moment].numpy()
        assert read.tobytes() == optimizer.state_dict()["state"][1][moment].numpy().tobytes()
    assert [set(g.scalars) for g in found.groups] == [{"step"}, {"step"}]
