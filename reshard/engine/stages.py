"""What do the stages of a pipeline save together?

One checkpoint of the whole model: each stage has spaces of its own, at its place on the mesh's
pipeline axis, and names tell the parameters apart, as in a model that was never cut. So it can be
loaded with any number of stages, or none. Without a pipeline there is one stage, the model.

The first rank of each stage says what its stage has; everybody hears it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard.digest import CRC64NVME
from reshard.engine.flat import Flat, lay
from reshard.engine.manifest import Said, agreed_states, flat_space
from reshard.engine.values import number, raw
from reshard.errors import InconsistentError
from reshard.layout import Layout
from reshard.plain import decode, encode

if TYPE_CHECKING:
    from reshard.engine.state import Stateful


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """What one stage of the pipeline has.

    Parameters
    ----------
    flats
        Its flats.
    groups
        Settings of its parameter groups, as plain data.
    aliases
        Its tied names.
    buffers
        Its buffers' names and digests.
    first
        The index of the space of its first flat.
    """

    flats: Sequence[Flat]
    groups: Sequence[Mapping[str, Any]]
    aliases: Mapping[str, str]
    buffers: Mapping[str, str]
    first: int


def leads(engine: Stateful) -> bool:
    """Whether this rank speaks for its stage."""
    return engine.shard == 0 and engine.replica == 0


def describe(engine: Stateful) -> dict[str, Any] | None:
    """What the first rank of a stage says of it; nothing where everybody knows."""
    if engine.pipeline[1] == 1 or not leads(engine):
        return None
    return {
        "flats": [
            [f.name, f.dtype, f.trained, [[e.name, list(e.shape), e.group] for e in f.entries]]
            for f in engine.flats
        ],
        "groups": encode([plain(group) for group in engine.groups]),
        "aliases": dict(engine.aliases),
        "buffers": {n: CRC64NVME.hex(CRC64NVME.of(raw(b))) for n, b in engine.buffers.items()},
    }


def plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a group as plain data."""
    return {key: number(value) for key, value in group.items()}


def stages(engine: Stateful, said: Sequence[Said]) -> list[Stage]:
    """All stages in order, as their first ranks described them.

    Raises
    ------
    InconsistentError
        If two stages have different things of one name.
    """
    if engine.pipeline[1] == 1:
        groups = [plain(group) for group in engine.groups]
        return [Stage(_laid(engine.flats), groups, engine.aliases, {}, 0)]
    found: list[Stage] = []
    first = 0
    for one in sorted((s for s in said if s.stage is not None), key=lambda s: s.pipeline):
        about = one.stage
        assert about is not None
        flats = [
            lay(name, [(n, tuple(shape), group) for n, shape, group in entries], dtype, trained)
            for name, dtype, trained, entries in about["flats"]
        ]
        groups = decode(about["groups"])
        found.append(Stage(_laid(flats), groups, about["aliases"], about["buffers"], first))
        first += len(found[-1].flats)
    _check_names(found)
    return found


def _laid(flats: Sequence[Flat]) -> list[Flat]:
    return [flat for flat in flats if flat.entries]


def _check_names(found: Sequence[Stage]) -> None:
    owner: dict[str, int] = {}
    for index, stage in enumerate(found):
        for name in [*(e.name for flat in stage.flats for e in flat.entries), *stage.aliases]:
            if name in owner:
                raise InconsistentError(
                    f"stages {owner[name]} and {index} of the pipeline both have a parameter of "
                    "this name, and a checkpoint holds it once",
                    where=name,
                    hint="keep the names of the whole model on every stage: cut it by removing "
                    "modules, or by a ModuleDict with the layers' numbers",
                )
            owner[name] = index
    digests: dict[str, str] = {}
    for index, stage in enumerate(found):
        for name, digest in stage.buffers.items():
            if digests.setdefault(name, digest) != digest:
                raise InconsistentError(
                    f"the buffer of stage {index} of the pipeline differs from that of an earlier "
                    "stage, and a checkpoint holds it once",
                    where=name,
                    hint="give buffers that differ different names",
                )


def layout(engine: Stateful, found: Sequence[Stage], said: Sequence[Said]) -> Layout:
    """The layout of all stages' flats."""
    many = len(found) > 1
    spaces = []
    for number_, stage in enumerate(found):
        states = agreed_states(stage.flats, [s for s in said if s.pipeline == number_])
        coords = {"pipeline": number_} if many else {}
        spaces += [
            flat_space(stage.first + i, flat, engine.shards, states[flat.name], coords)
            for i, flat in enumerate(stage.flats)
        ]
    mesh = {"shard": engine.shards}
    if many:
        mesh["pipeline"] = len(found)
    copies = engine.size // (engine.shards * len(found))
    if copies > 1:
        mesh["replicate"] = copies
    return Layout(tuple(spaces), mesh, engine.stage)


def settings(found: Sequence[Stage]) -> list[Mapping[str, Any]]:
    """Settings of the groups: those of the stages that have parameters of them.

    Raises
    ------
    InconsistentError
        If two stages' differ.
    """
    merged: list[Mapping[str, Any]] = []
    for group, default in enumerate(found[0].groups):
        those = [(i, s.groups[group]) for i, s in enumerate(found) if _has(s, group)]
        for index, one in those[1:]:
            if repr(one) != repr(those[0][1]):
                raise InconsistentError(
                    f"the settings of group {group} differ between stages {those[0][0]} and "
                    f"{index} of the pipeline: {dict(those[0][1])} and {dict(one)}",
                    hint="give every stage's optimizer and scheduler the same settings",
                )
        merged.append(those[0][1] if those else default)
    return merged


def _has(stage: Stage, group: int) -> bool:
    return any(e.group == group for flat in stage.flats if flat.trained for e in flat.entries)
