"""Are the golden checkpoints of other frameworks than DeepSpeed still read bit for bit?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

import reshard
from reshard import Options, Wanted
from reshard.api import open_manifest
from reshard.checkpoint import Checkpoint
from reshard.layout import TensorKey

FAST = Options(sync=False)


def orbax(name: str) -> TensorKey:
    """Leaves below ``params`` are weights; a moment is that of its weight."""
    if name.startswith("opt.mu."):
        return name.replace("opt.mu.", "params."), "exp_avg"
    return name, "param" if name.startswith("params.") else "client"


def bytecheckpoint(name: str) -> TensorKey:
    """``optimizer.<name>.<state>`` or the name of a weight."""
    if not name.startswith("optimizer."):
        return name, "param"
    name, _, state = name.removeprefix("optimizer.").rpartition(".")
    return name, state


def torchsnapshot(name: str) -> TensorKey:
    """DDP's wrapper is part of the names."""
    return f"module.{name}", "param"


CASES: dict[str, Callable[[str], TensorKey]] = {
    "orbax_mp2_ocdbt": orbax,
    "orbax_zarr3_noocdbt": orbax,
    "bytecheckpoint_fsdp2_ws2": bytecheckpoint,
    "torchsnapshot_ddp_ws2": torchsnapshot,
}


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_the_truth(golden_dir: Path, tmp_path: Path, case: str) -> None:
    """As it is, and by way of native at another world size."""
    source = open_manifest(golden_dir / case / "ckpt")
    assert source.format == case.partition("_")[0]
    reshard.convert(source, tmp_path / "native", Wanted(world=3, format="native"), FAST)
    truth = load_file(golden_dir / case / "truth.safetensors")
    assert truth
    for checkpoint in (Checkpoint(source), reshard.open(tmp_path / "native")):
        for name, expected in truth.items():
            array = checkpoint[CASES[case](name)].numpy()
            assert (array.dtype, array.shape) == (expected.dtype, expected.shape), name
            assert array.tobytes() == expected.tobytes(), name
