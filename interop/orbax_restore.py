"""Does Orbax itself restore a folder that zreshard wrote, whole and under two shardings?

Run by a Python that has ``orbax-checkpoint`` and ``jax``, on a CPU that stands for four devices::

    python interop/orbax_restore.py CHECKPOINT TRUTH.npz

TRUTH holds, for each leaf, its raw bytes under its keys as JSON: ``["params", "layer.weight"]``
(an index of a list is a number), and ``dtype`` and ``shape`` in the same JSON. Exits with 0 if
everything is equal.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

jax.config.update("jax_enable_x64", True)


def leaf(tree: Any, keys: list[str | int]) -> Any:
    """Follow keys down a tree."""
    for key in keys:
        tree = tree[key]
    return tree


def compare(tree: Any, truth: dict[str, bytes], what: str) -> int:
    """Compare each leaf's bits; returns how many differ."""
    wrong = 0
    for row, expected in truth.items():
        document = json.loads(row)
        found = np.asarray(leaf(tree, document["keys"]))
        same = (
            str(found.dtype) == document["dtype"]
            and list(found.shape) == document["shape"]
            and np.ascontiguousarray(found).tobytes() == expected
        )
        if not same:
            print(f"{what}: {row} differs: {found.dtype} {found.shape}")
            wrong += 1
    print(f"{what}: {len(truth) - wrong} of {len(truth)} leaves are equal")
    return wrong


def sharded(metadata: Any, mesh: Mesh, flip: bool) -> tuple[Any, int]:
    """Arguments that restore each array over the mesh, where its shape allows it."""
    count = 0

    def one(found: Any) -> Any:
        nonlocal count
        shape = getattr(found, "shape", None)
        if shape is None:
            return ocp.RestoreArgs()
        axes = ["b", "a"] if flip else ["a", "b"]
        spec = [a if n % 2 == 0 and n else None for a, n in zip(axes, shape, strict=False)]
        count += any(spec)
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return ocp.ArrayRestoreArgs(sharding=sharding)

    return jax.tree.map(one, metadata), count


def main(path: str, truth_path: str) -> int:
    """Restore and compare."""
    with np.load(truth_path) as stored:
        truth = {row: stored[row].tobytes() for row in stored.files}
    print(f"orbax {ocp.__version__}, jax {jax.__version__}")
    path = os.path.abspath(path)
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    wrong = compare(checkpointer.restore(path), truth, "as it is")
    metadata = checkpointer.metadata(path)
    metadata = getattr(metadata, "item_metadata", metadata)
    metadata = getattr(metadata, "tree", metadata)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
    for flip in (False, True):
        args, count = sharded(metadata, mesh, flip)
        restored = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=args))
        wrong += compare(restored, truth, f"over 2 x 2 devices ({count} arrays are cut)")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
