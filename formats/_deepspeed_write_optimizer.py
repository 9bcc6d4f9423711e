"""What does a rank's optimizer file hold?

The keys are those of ``state_dict`` in ``deepspeed/runtime/zero/stage_1_and_2.py``, ``stage3.py``
and ``bf16_optimizer.py`` (0.19.8); the last is stage 1 with bf16 weights and fp32 accumulation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from reshard.errors import UnsupportedError
from reshard.formats._deepspeed_write_groups import Flat, Rules
from reshard.formats._deepspeed_write_state import State
from reshard.formats._deepspeed_write_values import VERSION, fragment, scaling, stage_enum
from reshard.formats._torch_plain import Plain
from reshard.formats._torch_sheet import Sheet
from reshard.layout import MASTER
from reshard.stored import StoredTensor

ADAM = ("exp_avg", "exp_avg_sq")
"""States that go with a count of steps."""


def optimizer_file(
    state: State, rules: Rules, flats: Sequence[Flat], rank: int, sheet: Sheet
) -> dict[str, Any]:
    """The value of an optimizer file.

    Parameters
    ----------
    state
        What goes into the files.
    rules
        How groups are laid out.
    flats
        The flat groups of the model-parallel rank, those of experts that others hold among them.
    rank
        The data-parallel rank; at stage 3 all ranks' files are alike.
    sheet
        Gets the file's storages.
    """
    version = state.engine.get("version") or VERSION
    flats = [flat for flat in flats if flat.shard(rank) is not None]
    if state.stage == 3:
        optimizer = _stage3(state, flats, sheet)
    else:
        optimizer = _stage12(state, rules, flats, rank, sheet, version)
    return {
        "optimizer_state_dict": optimizer,
        "ds_config": Plain(sheet, state.source).mapping(state.config, "ds_config"),
        "ds_version": version,
    }


def _stage12(
    state: State, rules: Rules, flats: Sequence[Flat], rank: int, sheet: Sheet, version: str
) -> dict[str, Any]:
    numbered = dict(enumerate(flats))
    masters, paddings, slices = [], [], []
    for flat in flats:
        shard = flat.shard(rank)
        assert shard is not None
        padding = flat.padding(shard, tail_on_last=rules.tail_on_last)
        kept = flat.part if rules.tail_on_last else flat.part - padding
        masters.append(_master(flat, sheet, kept))
        paddings.append(padding)
        slices.append({name: fragment(*where) for name, where in flat.slices(shard).items()})
    found = {
        **_scaling(state),
        **_clip_grad(state),
        "base_optimizer_state": {
            "state": _states(state, numbered, sheet),
            "param_groups": _param_groups(state, flats, sheet),
        },
        "single_partition_of_fp32_groups": masters,
        "zero_stage": stage_enum(state.stage),
        "group_paddings": paddings,
        "param_alignment_paddings": [flat.alignment_paddings for flat in flats],
        "partition_count": [flat.space.shards for flat in flats],
        "ds_version": version,
        "param_slice_mappings": slices,
    }
    if state.bf16_optimizer:
        left = (*_scaling(state), "zero_stage", "param_alignment_paddings")
        return {k: v for k, v in found.items() if k not in left}
    return found


def _stage3(state: State, flats: Sequence[Flat], sheet: Sheet) -> dict[str, Any]:
    numbered = dict(enumerate(flats))
    return {
        "zero_stage": stage_enum(3),
        **_scaling(state),
        "partition_count": state.world,
        "optimizer_state_dict": {
            "state": _states(state, numbered, sheet),
            "param_groups": _param_groups(state, flats, sheet),
        },
        "fp32_flat_groups": [_master(flat, sheet, flat.part) for flat in flats],
    }


def _master(flat: Flat, sheet: Sheet, count: int) -> StoredTensor:
    return replace(sheet.slice(flat.space, MASTER, 0, count), requires_grad=True)


def _scaling(state: State) -> dict[str, Any]:
    return scaling(state.engine, state.config, state.dtype.name)


def _clip_grad(state: State) -> dict[str, Any]:
    """The norm to clip at, where it is known.

    That of the file replaces the configuration's when it is loaded, so that a guess would change
    the training; without it the resuming run's configuration counts.
    """
    found = state.engine.get("clip_grad", state.config.get("gradient_clipping"))
    return {"clip_grad": found} if isinstance(found, (int, float)) else {}


def _states(state: State, flats: Mapping[int, Flat], sheet: Sheet) -> dict[int, dict[str, Any]]:
    """The base optimizer's state of each flat group, which may have none yet."""
    found = {}
    for index, flat in flats.items():
        # made anew for each flat group: each needs a step of its own
        mine = Plain(sheet, state.source).mapping(_scalars(state, flat), f"group{flat.group}")
        for name in flat.space.states:
            if name != MASTER:
                mine[name] = sheet.slice(flat.space, name)
        if mine:
            found[index] = mine
    return found


def _scalars(state: State, flat: Flat) -> dict[str, Any]:
    group = state.groups[flat.group]
    numbers = (np.ndarray, np.generic)  # optimizers count in tensors
    scalars = {k: np.asarray(v) if isinstance(v, numbers) else v for k, v in group.scalars.items()}
    if "step" in scalars or not all(name in flat.space.states for name in ADAM):
        return scalars
    steps = group.settings.get("step") or state.source.objects.get("step")
    if not isinstance(steps, int):
        raise UnsupportedError(
            f"the optimizer of parameter group {flat.group} doesn't say how many steps it took",
            where=state.source.root,
        )
    return {"step": np.array(steps, np.float32), **scalars}


def _param_groups(state: State, flats: Sequence[Flat], sheet: Sheet) -> list[dict[str, Any]]:
    found = []
    for index, group in enumerate(state.groups):
        mine = [number for number, flat in enumerate(flats) if flat.group == index]
        if not mine and state.pipeline > 1:
            continue  # a group of other stages
        if not mine and state.stage != 3:
            raise UnsupportedError(
                f"parameter group {index} has no trained parameters, which DeepSpeed can't hold at "
                f"stage {state.stage}",
                where=state.source.root,
                hint="stage 3 can (--stage 3)",
            )
        if "lr" not in group.settings:
            raise UnsupportedError(
                f"parameter group {index} has no learning rate to go on with (elastic checkpoints "
                "hold no settings of the optimizer)",
                where=state.source.root,
                hint="say them in Python (replace the groups of the opened manifest), keep it in "
                "the native format (--format native), or export the weights "
                "(--format safetensors)",
            )
        plain = Plain(sheet, state.source).mapping(group.settings, f"param_groups/{index}")
        found.append({**plain, "params": mine})
    return found
