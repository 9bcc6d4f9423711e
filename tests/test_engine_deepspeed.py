"""Does a real engine take over what DeepSpeed saved: masters, moments, settings, loss scale?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed_truth
import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.optim import AdamW

import reshard
from reshard.engine import Precision, ZeroEngine

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Named(nn.Module):
    """What a checkpoint has, by any dotted names; the parameters' squares are the loss."""

    def __init__(self, manifest: Any) -> None:
        super().__init__()
        self.frozen: list[str] = []
        for (name, state), tensor in manifest.tensors.items():
            *path, last = name.split(".")
            owner: nn.Module = self
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            if state == "buffer":
                dtype = getattr(torch, tensor.dtype.name)
                owner.register_buffer(last, torch.zeros(tensor.shape, dtype=dtype))
            elif state in ("master", "param") and not hasattr(owner, last):
                trained = (name, "master") in manifest.tensors
                values = nn.Parameter(torch.randn(tensor.shape), requires_grad=trained)
                owner.register_parameter(last, values)
                if not trained:
                    self.frozen.append(name)

    def forward(self) -> Any:
        return sum(p.float().square().mean() for p in self.parameters())


def take_over(case: Path, folder: Path, stage: int, dtype: str) -> tuple[Any, ...]:
    manifest = reshard.open_manifest(case)
    model = Named(manifest)
    groups = [
        {"params": [e.name for s in manifest.layout.spaces for e in s.in_groups().get(g, ())]}
        for g in range(2)
    ]
    groups[0]["params"] += model.frozen
    engine = ZeroEngine(
        model,
        lambda groups: AdamW(groups, lr=0.5),
        groups=groups,
        stage=stage,
        precision=Precision(param=TYPES[dtype]),
    )
    loaded = engine.load(case)
    state = engine.full_state_dict(masters=True)
    counters = dict(engine.counters)
    rates = [(g["lr"], g["weight_decay"]) for g in engine.groups]
    engine.save(folder)
    engine.backward(engine.module())
    engine.step()  # it goes on
    return {n: v.float().numpy() for n, v in state.items()}, counters, rates, loaded.taken


@pytest.mark.parametrize(
    ("name", "stage"),
    [("z2_p4_fp16", 3), ("z3_p2_bf16_frozen", 2), ("z1_p2_fp32", 1), ("z3_p4_bf16", 3)],
)
def test_a_real_checkpoint_in_a_real_engine(
    fixtures_dir: Path, tmp_path: Path, name: str, stage: int
) -> None:
    case = fixtures_dir / "deepspeed" / name
    dtype = name.split("_")[2]
    (state, counters, rates, taken), second = run_ranks(
        take_over, 2, case / "ckpt", tmp_path / "ck", stage, dtype
    )
    assert counters == second[1]
    saved, compared = reshard.open(tmp_path / "ck"), 0
    for stem, key, expected in deepspeed_truth.truth(case):
        if key == "step":
            continue
        tensor = deepspeed_truth.key_of(stem, key, {})
        if tensor[1] == "param" or tensor not in saved.manifest.tensors:
            continue
        ours = saved[tensor].numpy()
        if tensor[1] == "buffer":
            assert ours.tobytes() == expected.tobytes(), key
            continue
        assert ours.tobytes() == expected.astype(np.float32).tobytes(), key
        if tensor[1] == "master":
            assert state[tensor[0]].tobytes() == ours.tobytes(), key
        compared += 1
    trained = [n for n, s in saved.manifest.tensors if s == "master"]
    assert compared == 3 * len(trained) > 0
    assert rates == [(0.01, 0.1), (0.01, 0.0)]
    assert counters["step"] == 3
    assert [g.scalars["step"] for g in saved.groups] == [3, 3]
    if dtype == "fp16":
        assert (counters["loss_scale"], counters["good_steps"]) == (256.0, 3)
        assert "loss scale: 256, DeepSpeed's" in taken
