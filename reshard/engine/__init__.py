"""A ZeRO training engine, stages 1 to 3, on torch.distributed.

The words, here and in all messages: a **unit** is the parameters that travel together; a **flat**
is a unit's parameters of one element type, laid end to end; a **slice** is a rank's run of a flat,
a **piece** the part of a slice that belongs to one parameter; the **master** is what the optimizer
steps. A unit is **gathered** while its flat is whole on every rank, else **released**. Between two
steps is a **safe point**.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.lazy import lazily

if TYPE_CHECKING:
    from reshard.engine.data import Position, Samples
    from reshard.engine.engine import ZeroEngine
    from reshard.engine.failures import RankFailed, RanksDisagree
    from reshard.engine.holding import ParameterWrittenError
    from reshard.engine.keep import latest
    from reshard.engine.load import Loaded
    from reshard.engine.precision import Precision
    from reshard.engine.snapshot import Running
    from reshard.engine.state import NotAtSafePoint
    from reshard.engine.stepping import StepInfo

__all__ = [
    "Loaded",
    "NotAtSafePoint",
    "ParameterWrittenError",
    "Position",
    "Precision",
    "RankFailed",
    "RanksDisagree",
    "Running",
    "Samples",
    "StepInfo",
    "ZeroEngine",
    "latest",
]

_HOME = {
    "Loaded": "load",
    "NotAtSafePoint": "state",
    "ParameterWrittenError": "holding",
    "Position": "data",
    "Precision": "precision",
    "RankFailed": "failures",
    "RanksDisagree": "failures",
    "Running": "snapshot",
    "Samples": "data",
    "StepInfo": "stepping",
    "ZeroEngine": "engine",
    "latest": "keep",
}


__getattr__ = lazily(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(__all__)
