"""Real checkpoints of torch's DCP: what was in them, and copies that are changed on purpose."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.checkpoint import Checkpoint

GOOD = (
    "fsdp2_p2", "fsdp2_p3", "fsdp2_p4", "fsdp2_p4_tied", "fsdp2_p4_frozen", "fsdp2_p4_bf16",
    "fsdp2_p4_async", "fsdp2_p4_asyncproc", "fsdp2_p4_threads2", "fsdp2_p4_perfile",
    "fsdp2_p4_zstd", "fsdp2_p4_flatopt", "fsdp2tp_2x2", "fsdp1_p2_sharded_flat", "fsdp1_hsdp_2x2",
)  # fmt: skip


def truth(folder: Path) -> Iterator[tuple[str, str, NDArray[Any]]]:
    """Name, state and bytes of every tensor that the live ranks had."""
    import torch
    from safetensors import safe_open

    with safe_open(folder / "truth.safetensors", "pt") as file:
        for key in file.keys():  # noqa: SIM118 - no mapping
            tensor = file.get_tensor(key).contiguous()
            raw = tensor.reshape(-1).view(torch.uint8).numpy()
            top, _, rest = key.partition(".")
            if top == "model":
                yield rest, "param", raw
            elif top == "optim":
                name, _, state = rest.rpartition(".")
                yield name, state, raw
            else:
                yield key, "param", raw


def held(checkpoint: Checkpoint, name: str, state: str) -> bytes | None:
    """The bytes of a tensor, or of a value of its group; ``None`` if there is neither."""
    manifest = checkpoint.manifest
    if (name, state) in manifest.tensors:
        return checkpoint[name, state].numpy().tobytes()
    for space in manifest.layout.spaces:
        for group, entries in space.in_groups().items():
            scalars = manifest.groups[group].scalars
            if state in scalars and any(entry.name == name for entry in entries):
                return bytes(np.asarray(scalars[state]).tobytes())
    return None


def copy(source: Path, target: Path) -> Path:
    """A copy that can be changed."""
    shutil.copytree(source, target)
    target.chmod(0o755)
    for path in target.iterdir():
        path.chmod(0o644)
    return target


def change(folder: Path, how: Callable[[Any], object]) -> None:
    """Change the metadata, as torch's own objects."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    how(metadata)
    path.write_bytes(pickle.dumps(metadata))
