"""Which element types; when is a step skipped?

Parameters may be narrower than their masters, which are fp32. Gradients travel in the parameters'
type and are summed in the type of the reduction. With fp16 the loss is scaled, so that small
gradients aren't lost; all ranks skip a step in which any rank's gradient overflowed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from reshard.errors import RequestError, UnsupportedError

_NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Precision:
    """Element types of a run.

    Parameters
    ----------
    param
        Type of floating-point parameters in forward and backward; ``None``: as they are.
    reduce
        Type in which gradients are summed; widened to that of the masters where it is narrower.
    loss_scale
        A fixed factor, ``"dynamic"``, or ``None``: dynamic for fp16 and none otherwise.
    first_scale, growth, interval, least
        Of a dynamic scale: where it begins, the factor it grows by after ``interval`` steps without
        an overflow (and shrinks by after one), and where it stops shrinking.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype = torch.float32
    loss_scale: float | Literal["dynamic"] | None = None
    first_scale: float = 2.0**16
    growth: float = 2.0
    interval: int = 2000
    least: float = 1.0

    def __post_init__(self) -> None:
        for name, dtype in (("param", self.param), ("reduce", self.reduce)):
            if dtype is not None and not dtype.is_floating_point:
                raise RequestError(f"Precision({name}={dtype}) is no floating-point type")
            if dtype is not None and dtype.itemsize == 1:
                raise UnsupportedError(
                    f"Precision({name}={dtype}): 8-bit floats can be neither multiplied nor summed "
                    "as they are, and their scales are the layers' own",
                    hint="give float16, bfloat16 or float32; layers may compute in 8 bits inside",
                )
        if isinstance(self.loss_scale, str) and self.loss_scale != "dynamic":
            raise RequestError(
                f"loss_scale={self.loss_scale!r}", hint='give a number, "dynamic" or None'
            )
        numbers: tuple[float, ...] = (self.first_scale, self.least, self.growth - 1, self.interval)
        if isinstance(self.loss_scale, int | float):
            numbers = (*numbers, self.loss_scale)
        if min(numbers) <= 0:
            raise RequestError(f"{self}: scales and the interval are positive, growth is above 1")

    def cast(self, dtype: torch.dtype) -> torch.dtype:
        """The type that a parameter of ``dtype`` gets."""
        return self.param if self.param is not None and dtype.is_floating_point else dtype

    def sum_type(self, dtype: torch.dtype) -> torch.dtype:
        """The type that gradients of parameters of ``dtype`` are summed in."""
        wide = torch.promote_types(dtype, self.reduce)
        return torch.float32 if wide in _NARROW else wide

    def scale(self, dtypes: set[torch.dtype]) -> LossScale:
        """The loss scale for trained parameters of these (cast) types."""
        wanted = self.loss_scale
        if wanted is None:
            wanted = "dynamic" if torch.float16 in dtypes else 1.0
        return LossScale(self, wanted)


class LossScale:
    """The factor of the loss, and when it changes."""

    def __init__(self, rule: Precision, wanted: float | Literal["dynamic"]) -> None:
        self.rule = rule
        self.dynamic = wanted == "dynamic"
        self.value = rule.first_scale if isinstance(wanted, str) else float(wanted)
        self.good = 0

    @property
    def checked(self) -> bool:
        """Whether gradients may overflow and steps be skipped."""
        return self.dynamic or self.value != 1.0

    def update(self, overflow: bool) -> None:
        """Tell of a step."""
        if not self.dynamic:
            return
        self.good = 0 if overflow else self.good + 1
        if overflow:
            self.value = max(self.rule.least, self.value / self.rule.growth)
        elif self.good >= self.rule.interval:
            self.value, self.good = self.value * self.rule.growth, 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"loss_scale": self.value, "good_steps": self.good}

    def restore(self, value: float, good: int) -> None:
        """Take what a checkpoint kept; a fixed scale stays as it was asked for."""
        if self.dynamic:
            self.value, self.good = value, good
