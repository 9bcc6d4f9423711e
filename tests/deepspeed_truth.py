"""The real DeepSpeed checkpoints and what their live ranks held when they were saved."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.api import open_manifest
from reshard.checkpoint import Checkpoint
from reshard.layout import TensorKey

STATE = {"lp": "param", "fp32": "master"}


def cases(fixtures: Path) -> list[str]:
    """Names of all checkpoints."""
    return sorted(p.name for p in (fixtures / "deepspeed").iterdir() if p.is_dir())


def truth(case: Path) -> Iterator[tuple[str, str, NDArray[Any]]]:
    """(file stem, key, array) of everything that was gathered from the live ranks."""
    from safetensors import safe_open

    for path in sorted(case.glob("truth*.safetensors")):
        with safe_open(path, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a mapping
                yield path.stem, key, as_numpy(tensors.get_tensor(key))


def as_numpy(tensor: Any) -> NDArray[Any]:
    """A torch tensor's very bits as an array."""
    import ml_dtypes
    import torch

    if tensor.dtype == torch.bfloat16:
        raw: NDArray[Any] = tensor.contiguous().view(torch.int16).numpy()
        return raw.view(ml_dtypes.bfloat16)
    found: NDArray[Any] = tensor.contiguous().numpy()
    return found


def key_of(stem: str, key: str, aliases: Mapping[str, str]) -> TensorKey:
    """The tensor that a key of the truth speaks of."""
    kind, name = key.split(".", 1)
    if stem.startswith("truth_rank"):  # experts have names of their own on every rank
        first = 2 * (int(stem.removeprefix("truth_rank")) % 2)
        name = re.sub(r"(deepspeed_experts)\.(\d+)", lambda m: f"{m[1]}.{int(m[2]) + first}", name)
    return aliases.get(name, name), STATE.get(kind, kind)


def part_of(stem: str, whole: NDArray[Any], like: NDArray[Any]) -> NDArray[Any]:
    """A tensor-parallel rank's part, where the truth has only that."""
    if whole.shape == like.shape or not stem.startswith("truth_tp"):
        return whole
    (dim,) = (d for d in range(like.ndim) if whole.shape[d] != like.shape[d])
    rank = int(stem.removeprefix("truth_tp"))
    part: NDArray[Any] = np.split(whole, whole.shape[dim] // like.shape[dim], dim)[rank]
    return part


def compare(checkpoint: Checkpoint, case: Path) -> tuple[int, list[str]]:
    """Compare a checkpoint with its truth, bit by bit.

    Returns
    -------
    equal, missing
        How many tensors are equal, and the keys that the checkpoint doesn't store.
    """
    equal, missing = 0, []
    manifest = checkpoint.manifest
    for stem, key, expected in truth(case):
        if key == "step":
            steps = {float(np.asarray(g.scalars["step"])) for g in manifest.groups}
            assert not manifest.groups or steps == set(expected.tolist()), (steps, expected)
            continue
        tensor = key_of(stem, key, manifest.aliases)
        if tensor not in manifest.tensors:
            missing.append(key)
            continue
        found = part_of(stem, checkpoint[tensor].numpy(), expected)
        assert found.dtype == expected.dtype, key
        assert found.shape == expected.shape, key
        assert found.tobytes() == expected.tobytes(), f"{key} differs"
        equal += 1
    return equal, missing


def open_case(case: Path) -> Checkpoint:
    """The checkpoint of a case."""
    return Checkpoint(open_manifest(case / "ckpt"))
