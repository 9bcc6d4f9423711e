"""What are this process's random generators at, and how do they go on?

torch's generator of the CPU and of the device in use, Python's and numpy's. See
:mod:`reshard.engine.data` for the rule at another world size.
"""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np

from reshard.engine.data import seed_of
from reshard.engine.values import as_array, as_tensor
from reshard.errors import CorruptError
from reshard.plain import decode, encode


def capture() -> bytes:
    """The state of all generators."""
    import torch

    state: dict[str, Any] = {
        "torch": as_array(torch.get_rng_state()),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
    }
    if torch.cuda.is_available():
        state["cuda"] = as_array(torch.cuda.get_rng_state())
    return json.dumps(encode(state)).encode("ascii")


def parse(data: bytes) -> dict[str, Any]:
    """What :func:`capture` gave, checked so far that :func:`put` can't fail.

    Raises
    ------
    CorruptError
        If it isn't that.
    """
    try:
        state: dict[str, Any] = decode(json.loads(data))
        random.Random().setstate(state["python"])
        np.random.RandomState().set_state(state["numpy"])
        import torch

        torch.Generator().set_state(as_tensor(state["torch"]))
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CorruptError(f"the random generators' state can't be read: {error}") from error
    return state


def put(state: dict[str, Any]) -> None:
    """Let the generators go on at a state."""
    import torch

    torch.set_rng_state(as_tensor(state["torch"]))
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(as_tensor(state["cuda"]))


def begin(seed: int, step: int, rank: int) -> None:
    """Begin streams of a rank's own: a function of (seed, step, rank)."""
    import torch

    start = seed_of(seed, step, rank)
    torch.manual_seed(start)
    random.seed(start)
    np.random.seed(seed_of(start) & 0xFFFFFFFF)
