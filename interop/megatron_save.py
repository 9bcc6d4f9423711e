"""What does this version of Megatron-Core write? A small checkpoint of four ranks, and its truth.

Run by a Python that has ``megatron-core`` and torch; it needs no accelerator::

    python interop/megatron_save.py FOLDER

Two tensor ranks times two data ranks save with ``torch_dist``: weights cut by rows and by columns,
replicated ones, layers stacked on a first dim, a scalar, integers, and moments: where this version
can, as ranges of flattened tensors (up to 0.12 it can). ``FOLDER/ckpt`` is the checkpoint,
``FOLDER/truth.npz`` the bytes of each tensor as ``state:name``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from megatron_load import only_a_cpu

TENSOR, DATA = 2, 2
CUT = 10  # the first data rank's elements of a flattened tensor


def whole() -> dict[str, torch.Tensor]:
    """Every tensor, the same on all ranks."""
    torch.manual_seed(0)
    return {
        "param:col.weight": torch.randn(8, 6),
        "param:row.weight": torch.randn(6, 8).bfloat16(),
        "param:norm.weight": torch.randn(6),
        "param:layers.mlp.weight": torch.randn(4, 8, 6),
        "param:scalar": torch.tensor(2.5),
        "param:ints": torch.arange(10),
        "exp_avg:col.weight": torch.randn(8, 6),
        "exp_avg:row.weight": torch.randn(6, 8),
    }


def part(tensor: torch.Tensor, dim: int, tp: int) -> torch.Tensor:
    """A tensor rank's half."""
    return tensor.chunk(TENSOR, dim)[tp].contiguous()


def moment(key: str, local: torch.Tensor, dim: int, tp: int, dp: int) -> Any:
    """A moment of a weight cut along a dim: whole, or a range of it flattened a data rank."""
    from megatron.core.dist_checkpointing import ShardedTensor

    offsets = (dim, tp, TENSOR)
    if not hasattr(ShardedTensor, "from_rank_offsets_flat"):
        return ShardedTensor.from_rank_offsets(key, local, offsets, replica_id=dp)
    some = slice(0, CUT) if dp == 0 else slice(CUT, local.numel())
    flat = local.flatten()[some].contiguous()
    return ShardedTensor.from_rank_offsets_flat(
        key, flat, tuple(local.shape), offsets, flattened_range=some
    )


def state(tp: int, dp: int) -> dict[str, Any]:
    """What a rank saves."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    full, made = whole(), ShardedTensor.from_rank_offsets
    rank = dp * TENSOR + tp
    found: dict[str, Any] = {"iteration": 7, "args": {"lr": 0.5}}
    for name, dim in (("col.weight", 0), ("row.weight", 1)):
        weight, average = full[f"param:{name}"], full[f"exp_avg:{name}"]
        cut = dim, tp, TENSOR
        found[name] = made(name, part(weight, dim, tp), cut, replica_id=dp)
        key = f"optimizer.state.exp_avg.{name}"
        found[key] = moment(key, part(average, dim, tp), dim, tp, dp)
    for name in ("norm.weight", "scalar", "ints"):
        found[name] = made(name, full[f"param:{name}"], replica_id=rank)
    for layer, weight in enumerate(full["param:layers.mlp.weight"]):
        found[f"layer{layer}"] = made(
            "layers.mlp.weight",
            part(weight, 0, tp),
            (0, layer, 4),
            (1, tp, TENSOR),
            replica_id=dp,
            prepend_axis_num=1,
        )
    found["rng"] = ShardedObject("rng_state", {"seed": tp}, (TENSOR,), (tp,), replica_id=dp)
    return found


def as_it_was() -> None:
    """Let versions up to 0.12 find what they call of numpy 1 and torch 2.3."""
    import megatron.core
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
    from torch.distributed.checkpoint import filesystem

    version = tuple(map(int, megatron.core.__version__.split(".")[:2]))
    if version > (0, 12):
        return
    np.product = np.prod  # type: ignore[attr-defined]
    write, kind = filesystem._write_item, filesystem.SerializationFormat.TORCH_SAVE
    before = () if version > (0, 8) else (filesystem._StorageWriterTransforms(),)
    filesystem_async._write_item = lambda *given: write(*before, *given, kind)
    if version == (0, 8):  # torch's planner does this by itself now
        MCoreSavePlanner._add_non_coordinator_iobytes_request = lambda *_: None


def save(rank: int, folder: str, store: str) -> None:
    """Save one rank's part."""
    only_a_cpu()
    as_it_was()
    world = TENSOR * DATA
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    from megatron.core import dist_checkpointing

    dp, tp = divmod(rank, TENSOR)
    dist_checkpointing.save(state(tp, dp), folder, sharded_strategy=("torch_dist", 1))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Run all ranks and write the truth."""
    import megatron.core

    folder = Path(sys.argv[1])
    (folder / "ckpt").mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = (str(folder / "ckpt"), str(Path(scratch) / "store"))
        torch.multiprocessing.spawn(save, arguments, nprocs=TENSOR * DATA)
    truth = {k: t.contiguous().reshape(-1).view(torch.uint8).numpy() for k, t in whole().items()}
    np.savez(folder / "truth.npz", **truth)
    print(f"megatron-core {megatron.core.__version__}: {len(truth)} tensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
