"""Where does the optimizer's state lie without ZeRO (stage 0)?

Whole tensors under ``optimizer`` in the model file: ``fp32_groups`` a list of tensors a group, and
the base optimizer's state by the parameters' running numbers, which count through ``param_shapes``
(``deepspeed/runtime/fp16/unfused_optimizer.py`` and ``fused_optimizer.py`` of 0.19.8). A model
with experts has optimizer files of its own, in which parameters are numbered only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.builder import Builder, Placed
from reshard.errors import InconsistentError
from reshard.formats._deepspeed_load import Checkpoint, Loaded
from reshard.formats._deepspeed_optimizer import shapes_of
from reshard.formats._deepspeed_tensor import TensorRules
from reshard.formats._torch import placed
from reshard.layout import MASTER
from reshard.manifest import ParamGroup
from reshard.stored import StoredTensor
from reshard.torchfile import read_tensor


def add_plain_optimizer(builder: Builder, checkpoint: Checkpoint, rules: TensorRules) -> None:
    """Add the optimizer's tensors and groups of every model file."""
    for path in sorted(checkpoint.names.root.glob("expp_rank_*_optim_states.pt")):
        builder.note(
            "left-out",
            "the optimizer's state in it is stored by numbers, and nothing says of which "
            "parameters",
            path.name,
        )
    for mp in checkpoint.mps:
        loaded = checkpoint.models[mp, 0]
        optimizer = loaded.data.get("optimizer")
        if loaded.data.get("param_shapes") is None:
            if isinstance(optimizer, Mapping):
                builder.note(
                    "left-out",
                    f"the optimizer's state in {loaded.path.name} is stored by numbers, and "
                    "nothing says of which parameters",
                    "optimizer",
                )
        elif isinstance(optimizer, Mapping):
            _add(builder, checkpoint, loaded, optimizer, rules, mp)


def _add(
    builder: Builder,
    checkpoint: Checkpoint,
    loaded: Loaded,
    optimizer: Mapping[str, Any],
    rules: TensorRules,
    mp: int,
) -> None:
    base = optimizer.get("optimizer_state_dict", optimizer)
    groups = base.get("param_groups", []) if isinstance(base, Mapping) else []
    states = base.get("state", {}) if isinstance(base, Mapping) else {}
    masters = optimizer.get("fp32_groups")
    names = [n for group in shapes_of(loaded) for n in group.items()]
    coords = {"tensor": mp % checkpoint.tensor} if checkpoint.tensor > 1 else {}
    number = 0
    for index, group in enumerate(groups):
        found: dict[str, list[Placed]] = {}
        scalars: dict[str, Any] = {}
        for at, identity in enumerate(group.get("params", ())):
            if number >= len(names):
                raise InconsistentError(
                    f"the optimizer has more parameters than param_shapes ({len(names)})",
                    where=loaded.path,
                )
            name, shape = names[number]
            number += 1
            values = dict(states.get(identity, {}))
            if isinstance(masters, (list, tuple)) and index < len(masters):
                values[MASTER] = masters[index][at]
            for state, value in values.items():
                if isinstance(value, StoredTensor) and value.shape == shape:
                    entry, *more = rules.entries(name, shape, coords.get("tensor", 0))
                    if more:
                        raise InconsistentError(f"{name} is cut in pieces", where=loaded.path)
                    found.setdefault(state, []).append(placed(builder, loaded.file, value, entry))
                elif isinstance(value, StoredTensor) and value.shape == ():
                    scalars.setdefault(state, read_tensor(loaded.file, value))
                elif isinstance(value, StoredTensor):
                    raise InconsistentError(
                        f"{state} of {name} is {list(value.shape)}, the parameter {list(shape)}",
                        where=loaded.path,
                    )
                else:
                    scalars.setdefault(state, value)
        if mp == 0:
            kept = {k: v for k, v in group.items() if k not in ("params", "step")}
            builder.groups.append(ParamGroup(kept, scalars))
        for state, rows in found.items():
            builder.add_placed(
                f"group{index}.{state}.mp{mp}", state, rows, coords=coords, group=index
            )
