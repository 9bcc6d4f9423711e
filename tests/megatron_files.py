"""Real checkpoints of Megatron-Core: what was in them, and copies that are changed on purpose."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

GPT = (
    "gpt_tp1pp2dp2_fully_reshardable_v019",
    "gpt_tp2pp1dp2_fully_reshardable_v019",
    "gpt_tp2pp1dp2_fully_reshardable_singleton_v019",
    "gpt_tp2pp1dp2_fully_sharded_model_space_v012",
    "gpt_tp2pp1dp2_dp_zero_gather_scatter_v019",
    "gpt_tp2pp1dp2_dp_reshardable_v019",
)
RAW = ("raw_tp2dp2_v08_zarr_flat", "raw_tp2dp2_v012_flat", "raw_tp2dp2_v019")

VARIABLE = "ZRESHARD_MEGATRON_PYTHON"
"""Names a Python that has Megatron-Core."""

needed = pytest.mark.skipif(
    VARIABLE not in os.environ, reason=f"{VARIABLE} names no Python with it"
)

_INTEROP = Path(__file__).resolve().parent.parent / "interop"
_NAMES = {  # the module's name in a model without Transformer Engine, and the checkpoint's
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}


def run(script: str, *arguments: Path) -> None:
    """Run a script of ``interop/`` in the Python that has Megatron-Core; it must succeed."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [os.environ[VARIABLE], str(_INTEROP / script), *map(str, arguments)]
    subprocess.run(command, check=True, env=environment, timeout=300)


def ckpt(fixtures: Path, name: str) -> Path:
    """A checkpoint as Megatron-Core wrote it.

    (In one of them the path of the save was made anonymous, which its list of checksums shows.)
    """
    return fixtures / "megatron" / name / "ckpt"


def truth(folder: Path) -> Iterator[tuple[str, str, NDArray[Any]]]:
    """Name, state and bytes of every tensor that the live ranks had."""
    import torch
    from safetensors import safe_open

    with safe_open(folder / "truth.safetensors", "pt") as file:
        for key in file.keys():  # noqa: SIM118 - no mapping
            raw = file.get_tensor(key).contiguous().reshape(-1).view(torch.uint8).numpy()
            name, state = str(key), "param"
            if name.startswith("optimizer.state."):
                _, _, found, name = name.split(".", 3)
                state = "master" if found == "param" else found
            for module, stored in _NAMES.items():
                name = name.replace(module, stored)
            yield name, state, raw


def copy(source: Path, target: Path) -> Path:
    """A copy that can be changed."""
    shutil.copytree(source, target)
    for path in (target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return target
