"""What does DeepSpeed's engine pickle of its own state?

The few classes that it expects (loss scalers, the stage, addresses of fragments) are written by
name. None is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.errors import UnsupportedError
from reshard.pickle_write import Call, Global, NewObj
from reshard.stored import DTypeName

VERSION = "0.19.8"
"""The release whose files are written, where the source doesn't name one."""

_SCALERS = "deepspeed.runtime.fp16.loss_scaler"


def stage_enum(stage: int) -> Call:
    """The stage as DeepSpeed pickles it."""
    return Call(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (stage,))


def fragment(start: int, count: int) -> NewObj:
    """Where a parameter lies in a rank's slice (``deepspeed/utils/tensor_fragment.py``)."""
    state = {"numel": count, "start": start}
    return NewObj(Global("deepspeed.utils.tensor_fragment", "fragment_address"), state)


def scaling(engine: Mapping[str, Any], config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The loss scaler and the flags beside it, as optimizer files hold them.

    Parameters
    ----------
    engine
        What the source says of DeepSpeed's own state.
    config
        DeepSpeed's configuration.
    dtype
        Element type of the model; only ``"float16"`` has a scale that matters.
    """
    scaler = engine.get("loss_scaler")
    if not isinstance(scaler, Mapping):
        scaler = _initial_scaler(config, dtype)
    state = {k: _dtype(v) if k == "dtype" else v for k, v in scaler["state"].items()}
    return {
        "loss_scaler": NewObj(Global(_SCALERS, _scaler_class(scaler["class"])), state),
        "dynamic_loss_scale": engine.get("dynamic_loss_scale", bool(state.get("dynamic"))),
        "overflow": engine.get("overflow", False),
    }


def _scaler_class(name: object) -> str:
    if name not in ("LossScaler", "DynamicLossScaler"):
        raise UnsupportedError(f"DeepSpeed has no loss scaler {name!r}")
    return str(name)


def _dtype(value: Any) -> Any:
    return DTypeName(value.removeprefix("torch.")) if isinstance(value, str) else value


def _initial_scaler(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The scaler that a run begins with (``loss_scaler.py``, ``CreateLossScaler``)."""
    fp16 = config.get("fp16")
    half: Mapping[str, Any] = fp16 if isinstance(fp16, Mapping) else {}
    scale = float(half.get("loss_scale", 0)) if dtype == "float16" else 1.0
    if scale:
        return {"class": "LossScaler", "state": {"cur_scale": scale, "dynamic": False}}
    hysteresis = half.get("hysteresis", 2)
    state = {
        "cur_scale": float(2 ** half.get("initial_scale_power", 16)),
        "dynamic": True,
        "cur_iter": 0,
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "scale_window": half.get("loss_scale_window", 1000),
        "min_scale": half.get("min_loss_scale", 1),
        "delayed_shift": hysteresis,
        "cur_hysteresis": hysteresis,
        "consecutive_hysteresis": half.get("consecutive_hysteresis", False),
        "raise_error_at_min_scale": True,
        "dtype": "float16",
    }
    return {"class": "DynamicLossScaler", "state": state}
