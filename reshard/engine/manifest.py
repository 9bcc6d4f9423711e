"""What does a rank say of its slices?

Each flat is a space of the core, cut as the engine cuts it: chunk r of its arrays is rank r's
slice. Its states are the master and what the optimizer keeps for each element, or the parameters
themselves where they are frozen. Buffers, tensors of the script and random states are spaces of
their own that rank 0 writes.

A :class:`Said` is what each rank says before anything is written: small, plain, and compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.digest import CRC64NVME
from reshard.dtypes import DType, dtype
from reshard.engine.values import as_array, dtype_of, dtype_of_torch, raw
from reshard.errors import InconsistentError, UnsupportedError
from reshard.layout import BUFFER, CLIENT, MASTER, PARAM, Entry, FlatSpace
from reshard.partition import Replicated

if TYPE_CHECKING:
    from torch import Tensor

    from reshard.engine.flat import Flat
    from reshard.engine.state import Stateful

RNG = "rng"
"""``rng.0`` and so on are the ranks' random generators, as bytes among the script's tensors."""

ENGINE = "engine"
"""Key of the manifest's objects that holds what only the engine needs."""


def space_name(index: int, flat: Flat) -> str:
    """A flat's name as a space can have it: ``flat3.layers.0.float32``."""
    return f"flat{index}." + re.sub(r"[^A-Za-z0-9._-]+", "-", flat.name)[:100].strip(".-")


def flat_space(
    index: int,
    flat: Flat,
    shards: int,
    states: Mapping[str, DType],
    coords: Mapping[str, int],
) -> FlatSpace:
    """A flat as a space of the core."""
    groups = tuple(e.group for e in flat.entries)
    group: int | tuple[int, ...] | None = groups
    if not flat.trained:
        group = None
    elif len(set(groups)) == 1:
        group = groups[0]
    space = FlatSpace(
        name=space_name(index, flat),
        entries=tuple(Entry(e.name, tuple(e.shape)) for e in flat.entries),
        partition=flat.partition(shards),
        states=states,
        coords=coords,
        group=group,
    )
    assert not flat.numel or space.ruler.part == flat.part(shards), flat.name
    return space


@dataclass(frozen=True, slots=True)
class Said:
    """What a rank says of itself.

    Parameters
    ----------
    common
        Digest of what must be the same everywhere: the cut, the stage, the step.
    about
        Digest of what must be the same on all ranks of a stage of the pipeline: the flats.
    pipeline
        Which stage of the pipeline this is.
    stage
        What its first rank says of that stage; see :mod:`reshard.engine.stages`.
    states
        Flat's name to state to element type: what this rank holds of it.
    scalars
        Pairs of optimizer values and the parameters that have them.
    rng
        Bytes of its random state.
    client
        Digest of the script's own state; ``None`` if it gave none.
    """

    common: str
    about: str
    pipeline: int
    stage: Mapping[str, Any] | None
    states: Mapping[str, Mapping[str, str]]
    scalars: Sequence[tuple[Mapping[str, Any], Sequence[str]]]
    rng: int
    client: str | None


def say(engine: Stateful, rng: bytes, client: str | None, stage: Mapping[str, Any] | None) -> Said:
    """What this rank says of itself.

    Raises
    ------
    UnsupportedError
        If the optimizer keeps something that can't be cut with the parameters.
    """
    states: dict[str, dict[str, str]] = {}
    alike: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for flat in engine.flats:
        states[flat.name] = {s: dtype_of_torch(d).name for s, d in engine.states(flat).items()}
        for piece in flat.pieces(engine.shard, engine.shards) if flat.trained else ():
            name = flat.entries[piece.entry].name
            scalars = engine.scalars(name)
            if scalars is not None:
                plain = {k: scalar(v, name, k) for k, v in scalars.items()}
                alike.setdefault(repr(sorted(plain.items())), (plain, []))[1].append(name)
    flats = [(f.name, [(e.name, tuple(e.shape), e.group) for e in f.entries]) for f in engine.flats]
    common = (engine.shards, engine.stage, engine.counters.get("step"), len(engine.groups))
    return Said(
        _digest(common),
        _digest(flats),
        engine.pipeline[0],
        stage,
        states,
        [*alike.values()],
        len(rng),
        client,
    )


def _digest(what: Any) -> str:
    return CRC64NVME.hex(CRC64NVME.of(repr(what).encode()))


def scalar(value: Any, name: str, key: str) -> bool | int | float:
    """An optimizer's value for a whole parameter, as a number.

    Raises
    ------
    UnsupportedError
        If it is none.
    """
    if isinstance(value, (bool, int, float)):
        return value
    array = as_array(value) if hasattr(value, "numel") else np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        raise UnsupportedError(
            f"the optimizer keeps {key} of shape {list(array.shape)}, which is neither one value "
            "for each element nor one for all",
            where=name,
            hint="only elementwise optimizers can be sharded",
        )
    found: bool | int | float = array.reshape(()).item()
    return found


def agreed_states(flats: Sequence[Flat], said: Sequence[Said]) -> dict[str, dict[str, DType]]:
    """The states of each flat: of all ranks together, since some may own nothing of it.

    Raises
    ------
    InconsistentError
        If ranks disagree.
    """
    found: dict[str, dict[str, DType]] = {}
    for flat in flats:
        kinds: dict[str, DType] = {}
        for rank, one in enumerate(said):
            for state, name in one.states[flat.name].items():
                if kinds.setdefault(state, dtype(name)).name != name:
                    raise InconsistentError(
                        f"{state} is {name} on rank {rank} and {kinds[state]} before it",
                        where=flat.name,
                    )
        first = MASTER if flat.trained else PARAM
        assert first in kinds, (flat.name, kinds)
        found[flat.name] = {s: kinds[s] for s in sorted(kinds, key=lambda s: s != first)}
    _fill_up(flats, found)
    return found


def _fill_up(flats: Sequence[Flat], states: dict[str, dict[str, DType]]) -> None:
    """A flat none of whose parameters was stepped yet has what the others have, all zeros."""
    known: dict[str, DType] = {}
    for flat in flats:
        if flat.trained:
            known.update(states[flat.name])
    for flat in flats:
        if flat.trained:
            own = states[flat.name]
            states[flat.name] = {s: own.get(s, d) for s, d in known.items()}


def group_scalars(
    flats: Sequence[Flat], groups: int, said: Sequence[Said]
) -> tuple[list[dict[str, Any]], list[str]]:
    """What the optimizer keeps once a parameter, by group, and who was never stepped.

    Returns
    -------
    scalars, unstepped
        A dict a group: a value where all of its parameters have the same, else a dict by name.
        And the parameters without optimizer state, where others have some.

    Raises
    ------
    InconsistentError
        If two ranks with parts of one parameter disagree.
    """
    values: dict[str, Mapping[str, Any]] = {}
    for rank, one in enumerate(said):
        for scalars, names in one.scalars:
            for name in names:
                if values.setdefault(name, scalars) != scalars:
                    raise InconsistentError(
                        f"rank {rank} has {dict(scalars)} for it and another {dict(values[name])}",
                        where=name,
                    )
    found: list[dict[str, Any]] = [{} for _ in range(groups)]
    trained = [e for flat in flats if flat.trained for e in flat.entries if e.numel]
    for number in range(groups):
        mine = {e.name: values[e.name] for e in trained if e.group == number and e.name in values}
        for key in dict.fromkeys(k for v in mine.values() for k in v):
            column = {name: v[key] for name, v in mine.items() if key in v}
            same = len(set(column.values())) == 1 and len(column) == len(mine)
            found[number][key] = next(iter(column.values())) if same else column
    unstepped = [e.name for e in trained if e.name not in values] if values else []
    return found, unstepped


@dataclass(frozen=True, slots=True, eq=False)
class Extras:
    """What rank 0 writes beside the slices: (state, name) to bytes, by element type.

    Parameters
    ----------
    spaces
        One a state and element type.
    payload
        The bytes of each space.
    """

    spaces: tuple[FlatSpace, ...]
    payload: Mapping[str, bytes | memoryview]


def extras(
    buffers: Mapping[str, Tensor],
    client: Mapping[str, Tensor],
    rng: Sequence[bytes],
    shards: int,
) -> Extras:
    """Lay buffers, tensors of the script and random states out, each kind end to end."""
    rows: dict[tuple[str, DType], list[tuple[Entry, Any]]] = {}
    for state, tensors in ((BUFFER, buffers), (CLIENT, client)):
        for name, tensor in tensors.items():
            entry = Entry(name, tuple(tensor.shape))
            rows.setdefault((state, dtype_of(tensor)), []).append((entry, raw(tensor).tobytes()))
    for rank, data in enumerate(rng):
        entry = Entry(f"{RNG}.{rank}", (len(data),))
        rows.setdefault((CLIENT, dtype("uint8")), []).append((entry, data))
    spaces, payload = [], {}
    for (state, kind), some in rows.items():
        space = FlatSpace(
            f"{state}.{kind}", tuple(e for e, _ in some), Replicated(shards), {state: kind}
        )
        spaces.append(space)
        payload[space.name] = b"".join(data for _, data in some)
    return Extras(tuple(spaces), payload)
