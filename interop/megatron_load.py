"""Does Megatron-Core itself load a folder that zreshard wrote, at another layout?

Run by a Python that has ``megatron-core`` and torch; it needs no accelerator::

    python interop/megatron_load.py CHECKPOINT TRUTH.npz

Two ranks ask Megatron-Core for every tensor of the checkpoint. Each takes half of the last dim that
can be halved, and layers one by one; together they take everything. TRUTH holds each key's bytes
under its name, a key of all layers being whole. The common state is loaded, too. Exits with 0 if
all of it is equal.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing

WORLD = 2


def only_a_cpu() -> None:
    """Megatron-Core asks torch for accelerators in some places."""
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.empty_cache = lambda: None
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


def wanted(key: str, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> dict[str, Any]:
    """What this rank asks for of a tensor."""
    from megatron.core.dist_checkpointing import ShardedTensor

    stacked = ".layers." in f".{key}" and ".layers.0." not in key and len(shape) > 1
    stacked = stacked and not any(part.isdecimal() for part in key.split("."))
    inner = shape[1:] if stacked else shape
    halved = [i for i, n in enumerate(inner) if n % WORLD == 0 and n]
    cut = halved[-1] if halved else None
    local = tuple(n // WORLD if i == cut else n for i, n in enumerate(inner))
    before = int(stacked)
    found = {}
    for layer in range(shape[0] if stacked else 1):
        offsets = [(0, layer, shape[0])] if stacked else []
        if cut is not None:
            offsets.append((cut + before, rank, WORLD))
        found[f"{key}@{layer}"] = ShardedTensor.from_rank_offsets(
            key,
            torch.zeros(local, dtype=dtype),
            *offsets,
            replica_id=0 if cut is not None else rank,
            prepend_axis_num=before,
        )
    return found


def bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The bytes of each element, in one more dim."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.reshape(*tensor.shape, tensor.element_size())


def compare(rank: int, folder: str, truth: str, store: str) -> None:
    """Load and compare one rank's part; raises if anything differs."""
    only_a_cpu()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    from megatron.core import dist_checkpointing

    described = dist_checkpointing.load_tensors_metadata(folder)
    expected = np.load(truth)
    assert set(described) == set(expected.files), set(described) ^ set(expected.files)
    asked: dict[str, Any] = {}
    for key, one in described.items():
        asked.update(wanted(key, tuple(one.global_shape), one.dtype, rank))
    parts = {name: (t.key, t.global_offset, t.prepend_axis_num) for name, t in asked.items()}
    loaded = dist_checkpointing.load(asked, folder)
    wrong = []
    for name, (key, offset, before) in parts.items():
        found = bits(loaded[name])
        whole = expected[key].reshape(*described[key].global_shape, found.shape[-1])
        box = whole[tuple(offset[:before])]
        for dim, begin in enumerate(offset[before:]):
            box = box.take(range(begin, begin + found.shape[dim]), axis=dim)
        if not np.array_equal(box, found):
            wrong.append(name)
    assert not wrong, f"rank {rank}: {len(wrong)} parts differ: {wrong[:5]}"
    common = dist_checkpointing.load_common_state_dict(folder)
    if rank == 0:
        print(f"{len(described)} keys, {len(parts)} parts a rank: equal")
        print(f"common state: {', '.join(sorted(common))}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Run both ranks."""
    folder, truth = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        arguments = (folder, os.path.abspath(truth), str(Path(scratch) / "store"))
        torch.multiprocessing.spawn(compare, arguments, nprocs=WORLD)
    return 0


if __name__ == "__main__":
    sys.exit(main())
