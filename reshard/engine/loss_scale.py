"""At which loss scale did another library stop?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def deepspeed_scale(engine: Any) -> dict[str, Any]:
    """The dynamic loss scale that DeepSpeed's state has, as the engine's counters; or nothing.

    DeepSpeed's ``DynamicLossScaler`` grows the scale when ``cur_iter - last_overflow_iter`` is a
    multiple of its window, and counts on from there: what is left over are the good steps.

    Parameters
    ----------
    engine
        ``objects["deepspeed"]`` of the manifest.
    """
    scaler = engine.get("loss_scaler") if isinstance(engine, Mapping) else None
    if not isinstance(scaler, Mapping):
        return {}
    state = scaler.get("state")
    if not isinstance(state, Mapping) or scaler.get("class") != "DynamicLossScaler":
        return {}
    value, window = state.get("cur_scale"), state.get("scale_window")
    since = (state.get("cur_iter", 0), state.get("last_overflow_iter", -1))
    if not isinstance(value, int | float) or not all(isinstance(n, int) for n in since):
        return {}
    steps = since[0] - since[1] - 1
    good = steps % window if isinstance(window, int) and window > 0 else steps
    return {"loss_scale": float(value), "good_steps": max(0, good)}
