"""Which parameter groups are there, and which of them do the ranks of the model axis share?

All data-parallel ranks of a model rank have the same groups. Those of different model ranks (of a
pipeline's stages, of tensor-parallel parts) are one where they have the same settings and stand in
the same order; a stage may leave groups out that have no parameters there. Two groups of one rank
stay two, however alike they are: an optimizer is given back as many groups as it had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reshard.builder import Builder
from reshard.errors import InconsistentError
from reshard.formats._deepspeed_load import Loaded, optimizer_dict
from reshard.formats._torch import Values
from reshard.manifest import ParamGroup
from reshard.plain import encode

Settings = Mapping[str, Any]


def settings_of(builder: Builder, ranks: Sequence[Loaded]) -> list[Settings]:
    """The settings of a model rank's groups, without what names their parameters.

    Parameters
    ----------
    builder
        Told of what can't be carried.
    ranks
        The optimizer files of all its data-parallel ranks.

    Raises
    ------
    InconsistentError
        If they differ.
    """
    first = _plain(builder, ranks[0])
    expected = encode(first)
    for loaded in ranks[1:]:
        found = encode(_plain(Builder("", builder.root), loaded))
        if found != expected:
            raise InconsistentError(
                f"its parameter groups are {found!r:.300}, but {expected!r:.300} in "
                f"{ranks[0].path.name}",
                where=loaded.path,
                hint="the files are of different runs",
            )
    return first


def _plain(builder: Builder, loaded: Loaded) -> list[Settings]:
    optimizer = optimizer_dict(loaded)
    base = optimizer.get("optimizer_state_dict", optimizer.get("base_optimizer_state"))
    groups = base.get("param_groups") if isinstance(base, Mapping) else None
    if groups is None:  # elastic checkpoints don't have them
        masters = optimizer.get("single_partition_of_fp32_groups", ())
        return [{} for _ in masters]
    # a fused optimizer's group counts no steps: its "step" stays 0
    kept = [{k: v for k, v in g.items() if k not in ("params", "step")} for g in groups]
    values = Values(builder, loaded.file)
    return [values.plain(g, "param_groups", str(i)) for i, g in enumerate(kept)]


def shared_groups(ranks: Sequence[Sequence[Settings]]) -> tuple[list[Settings], list[list[int]]]:
    """The groups of all model ranks together, in an order that fits each of them.

    Parameters
    ----------
    ranks
        The settings of each model rank's groups.

    Returns
    -------
    groups, numbers
        The settings of all groups; for each model rank, which of them are its own.

    Examples
    --------
    >>> shared_groups([[{"lr": 1}, {"lr": 2}], [{"lr": 2}], [{"lr": 2}, {"lr": 2}]])
    ([{'lr': 1}, {'lr': 2}, {'lr': 2}], [[0, 1], [1], [1, 2]])
    """
    # a group is known by its number in the order in which groups were found
    settings: list[Settings] = []
    keys: list[Any] = []
    order: list[int] = []
    chosen: list[list[int]] = []
    for rank in ranks:
        mine: list[int] = []
        place = 0
        for one in rank:
            key = encode(dict(one))
            at = next((i for i in range(place, len(order)) if keys[order[i]] == key), None)
            if at is None:
                order.insert(place, len(settings))
                settings.append(one)
                keys.append(key)
                at = place
            mine.append(order[at])
            place = at + 1
        chosen.append(mine)
    number = {found: i for i, found in enumerate(order)}
    return [settings[f] for f in order], [[number[f] for f in mine] for mine in chosen]


def owners_of_parts(loaded: Loaded, stage: int, parts: int, groups: int) -> list[int]:
    """The parameter group of each flat group: stage 3 cuts groups in sub-groups.

    Raises
    ------
    InconsistentError
        If the files don't say the same.
    """
    if stage != 3:
        if parts != groups:
            raise InconsistentError(
                f"has {groups} parameter groups, but the model's file lists {parts}",
                where=loaded.path,
            )
        return list(range(parts))
    base = optimizer_dict(loaded).get("optimizer_state_dict")
    listed = base.get("param_groups", []) if isinstance(base, Mapping) else []
    owner = {p: i for i, g in enumerate(listed) for p in g.get("params", ())}
    if sorted(owner) != list(range(parts)):
        raise InconsistentError(
            f"its parameter groups list the sub-groups {sorted(owner)}, but the model's file "
            f"has {parts}",
            where=loaded.path,
        )
    return [owner[i] for i in range(parts)]


def add_scalars(builder: Builder, number: int, scalars: Mapping[str, Any], loaded: Loaded) -> None:
    """Add a group's ``step`` and the like, which must be the same in all its parts.

    Raises
    ------
    InconsistentError
        If they differ.
    """
    group = builder.groups[number]
    if not group.scalars:
        builder.groups[number] = ParamGroup(group.settings, dict(scalars), group.optimizer)
    elif scalars and encode(dict(group.scalars)) != encode(dict(scalars)):
        raise InconsistentError(
            f"its optimizer's scalars are {scalars_text(scalars)}, but "
            f"{scalars_text(group.scalars)} in another part of the same parameter group",
            where=loaded.path,
        )


def scalars_text(scalars: Mapping[str, Any]) -> str:
    """Scalars in a message."""
    return ", ".join(f"{k}={np.asarray(v).tolist()!r}" for k, v in scalars.items())
