"""How does state that isn't tensors of the model come into DeepSpeed's pickles?

Plain data (:mod:`reshard.plain`) becomes what a training script and DeepSpeed's own engine pickle:
tensors, numpy's arrays, namespaces; the few classes that DeepSpeed expects (loss scalers, the
stage) are written by name. None is imported.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reshard.dtypes import BY_NAME
from reshard.errors import InconsistentError, UnsupportedError
from reshard.format import Loss
from reshard.formats._deepspeed_write_sheet import Local, Sheet
from reshard.layout import Entry
from reshard.manifest import Manifest
from reshard.pickle_stubs import StoredArray
from reshard.pickle_write import Call, Global, NewObj
from reshard.plain import LeftOut, NumpyArray, TensorRef
from reshard.stored import DTypeName

VERSION = "0.19.8"
"""The release whose files are written, where the source doesn't name one."""

_SCALERS = "deepspeed.runtime.fp16.loss_scaler"


@dataclass(slots=True)
class Plain:
    """Turns plain data into what is pickled into one file.

    Parameters
    ----------
    sheet
        The file's storages.
    source
        The checkpoint that the data is of.
    lost
        Told of every value that couldn't be carried.
    """

    sheet: Sheet
    source: Manifest
    lost: Callable[[Loss], None] = field(default=lambda _: None)

    def value(self, value: Any, path: str) -> Any:
        """One value; a value that was left out is ``None``, or no key of its dict.

        Parameters
        ----------
        value
            Plain data.
        path
            Where it stands, for what is said of a loss.
        """
        if isinstance(value, LeftOut):
            self.lost(Loss(path, f"an object of {value.what} can't be carried"))
            return None
        if isinstance(value, TensorRef):
            return self._tensor(value, path)
        if isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, (str, bytes)):
            return self._array(value, path)
        if isinstance(value, Mapping):
            return self.mapping(value, path)
        if isinstance(value, Namespace):
            attributes = self.mapping(vars(value), path)
            return NewObj(Global("argparse", "Namespace"), attributes or None)
        if isinstance(value, (list, tuple)):
            found = [self.value(v, f"{path}/{i}") for i, v in enumerate(value)]
            return tuple(found) if isinstance(value, tuple) else found
        if isinstance(value, (set, frozenset)):
            some = {self.value(v, path) for v in value}
            order = sorted(some, key=repr)
            known = isinstance(value, set)
            return some if known else Call(Global("builtins", "frozenset"), (order,))
        if isinstance(value, bytearray):
            return Call(Global("builtins", "bytearray"), (bytes(value),))
        return value

    def mapping(self, value: Mapping[Any, Any], path: str) -> dict[Any, Any]:
        """A dict."""
        found = {}
        for key, one in value.items():
            made = self.value(one, f"{path}{key}" if path.endswith(":") else f"{path}/{key}")
            if not isinstance(one, LeftOut):
                found[key] = made
        return found

    def _array(self, value: np.ndarray[Any, Any] | np.generic, path: str) -> Any:
        """A tensor, or what numpy itself pickles."""
        own = isinstance(value, (NumpyArray, np.generic))
        if value.dtype.kind not in "biufc" if own else value.dtype.name not in BY_NAME:
            self.lost(Loss(path, f"an array of {value.dtype} can't be carried"))
            return None
        if isinstance(value, np.generic):
            return value
        return StoredArray.of(value) if own else self.sheet.array(value)

    def _tensor(self, ref: TensorRef, path: str) -> Any:
        tensor = self.source.tensors.get(ref.key)
        if tensor is None:
            raise InconsistentError(
                f"{path} is a tensor {ref.name!r} that isn't there", where=self.source.root
            )
        local = Local(ref.name, tensor.shape, (Entry(ref.name, tensor.shape),))
        return self.sheet.whole(ref.state, local, tensor.dtype)


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
