"""What is in a checkpoint, in a few numbers and lists?

A :class:`Description` is made of a manifest alone: no payload is read, however large it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from reshard.digest import CRC64NVME
from reshard.layout import BUFFER, CLIENT, PARAM, FlatSpace, TensorKey
from reshard.manifest import Manifest, Tensor
from reshard.plain import encode
from reshard.side import Side, side


@dataclass(frozen=True, slots=True)
class StateLine:
    """One state: its tensors, their element types and bytes."""

    state: str
    tensors: int
    dtypes: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class GroupLine:
    """One parameter group.

    Parameters
    ----------
    optimizer
        Which optimizer it is of, where there are several.
    tensors, numel
        Parameters that are in it, and their elements.
    settings, scalars
        As in :class:`~reshard.manifest.ParamGroup`, as JSON has them.
    """

    optimizer: int
    tensors: int
    numel: int
    settings: dict[str, Any]
    scalars: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TensorLine:
    """One tensor.

    Parameters
    ----------
    group
        The parameter group that it is in.
    stored
        How many entries hold it: boxes and replicas.
    digest
        Its recorded CRC-64/NVME in hexadecimal digits.
    """

    name: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    group: int | None
    stored: int
    digest: str | None


@dataclass(frozen=True, slots=True)
class Description:
    """What is in a checkpoint.

    Parameters
    ----------
    checkpoint
        Where it is, its format, mesh, stage, files and bytes.
    step
        The optimizer's steps, where it says them and all its parts agree.
    states, groups, tensors
        In the order in which they are stored; of the tensors those that were asked for.
    aliases
        Tied name to stored name.
    frozen
        Names of parameters without optimizer state, where others have some.
    objects
        Names of the state that isn't tensors.
    left_out, notes
        What can't be carried, and what else the reader wants to say.
    checksums, digests
        How many checksums of byte ranges and digests of tensors are recorded.
    """

    checkpoint: Side
    step: int | float | None
    states: tuple[StateLine, ...]
    groups: tuple[GroupLine, ...]
    tensors: tuple[TensorLine, ...]
    aliases: dict[str, str]
    frozen: tuple[str, ...]
    objects: tuple[str, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    checksums: int
    digests: int

    def to_json(self) -> dict[str, Any]:
        """The description as JSON has it."""
        return {
            **_plain(self),
            "checkpoint": _plain(self.checkpoint),
            "states": [_plain(line) for line in self.states],
            "groups": [_plain(line) for line in self.groups],
            "tensors": [_plain(line) for line in self.tensors],
        }


def _plain(record: Any) -> dict[str, Any]:
    """The fields of a record, as they are."""
    return {f.name: getattr(record, f.name) for f in fields(record)}


def describe(manifest: Manifest, listed: Iterable[TensorKey] | None = None) -> Description:
    """Say what is in a checkpoint.

    Parameters
    ----------
    manifest
        The checkpoint, opened.
    listed
        The tensors that are described one by one; by default all.
    """
    tensors = manifest.tensors
    spaces = manifest.layout.spaces
    regions = manifest.regions
    return Description(
        checkpoint=side(manifest),
        step=_step(manifest),
        states=_states(manifest),
        groups=_groups(manifest),
        tensors=tuple(
            _tensor(manifest, spaces, tensors[key])
            for key in (tensors if listed is None else listed)
        ),
        aliases=dict(manifest.aliases),
        frozen=_frozen(manifest),
        objects=tuple(name for name, value in manifest.objects.items() if value not in (None, {})),
        left_out=tuple(f"{n.where}: {n.text}" for n in manifest.notes if n.kind == "left-out"),
        notes=tuple(f"{n.where}: {n.text}" for n in manifest.notes if n.kind != "left-out"),
        checksums=len(regions) if regions.values is not None else 0,
        digests=len(manifest.digests),
    )


def numbers(value: Any) -> Any:
    """Plain data in which each 0-d array of real numbers is the number in it."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.item() if value.ndim == 0 and value.dtype.kind in "biuf" else value
    if isinstance(value, Mapping):
        return {k: numbers(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(map(numbers, value))
    return [numbers(v) for v in value] if isinstance(value, list) else value


def simple(value: Any) -> Any:
    """Plain data as a person or a script would like it in JSON.

    Tuples are lists and numbers that JSON hasn't are texts (``"nan"``, ``"inf"``); what is left
    of the other kinds stands as in :mod:`reshard.plain`.
    """
    if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
        return {k: simple(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [simple(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(float(value))
    if isinstance(value, complex):
        return [simple(value.real), simple(value.imag)]
    found = numbers(value)
    return encode(found) if found is value else simple(found)


def _step(manifest: Manifest) -> int | float | None:
    found = [numbers(g.scalars.get("step")) for g in manifest.groups]
    steps = {s for s in found if isinstance(s, (int, float)) and math.isfinite(s)}
    if len(steps) == 1:
        (step,) = steps
        return int(step) if step == int(step) else step
    said = manifest.objects.get("step")
    return said if isinstance(said, int) and not steps else None


def _states(manifest: Manifest) -> tuple[StateLine, ...]:
    counts = Counter(state for _, state in manifest.tensors)
    dtypes: dict[str, dict[str, None]] = {state: {} for state in counts}
    for space in manifest.layout.spaces:
        for state, dtype in space.states.items():
            if space.entries:
                dtypes[state][dtype.name] = None
    return tuple(
        StateLine(state, count, tuple(dtypes[state]), manifest.nbytes[state])
        for state, count in counts.items()
    )


def _groups(manifest: Manifest) -> tuple[GroupLine, ...]:
    held: list[dict[str, int]] = [{} for _ in manifest.groups]
    for space in manifest.layout.spaces:
        for group, entries in space.in_groups().items():
            if group < len(held):
                held[group].update({e.name: math.prod(e.shape) for e in entries})
    return tuple(
        GroupLine(
            optimizer=group.optimizer,
            tensors=len(names),
            numel=sum(names.values()),
            settings=simple(dict(group.settings)),
            scalars=simple(dict(group.scalars)),
        )
        for group, names in zip(manifest.groups, held, strict=True)
    )


def _tensor(manifest: Manifest, spaces: tuple[FlatSpace, ...], tensor: Tensor) -> TensorLine:
    digest = manifest.digests.get(tensor.key)
    space, entry = tensor.places[0]
    group = spaces[space].group
    return TensorLine(
        name=tensor.name,
        state=tensor.state,
        dtype=tensor.dtype.name,
        shape=tensor.shape,
        nbytes=tensor.nbytes,
        group=group[entry] if isinstance(group, tuple) else group,
        stored=len(tensor.places),
        digest=None if digest is None else CRC64NVME.hex(digest),
    )


def _frozen(manifest: Manifest) -> tuple[str, ...]:
    trained = {n for n, s in manifest.tensors if s not in (PARAM, BUFFER, CLIENT)}
    if not trained:
        return ()
    return tuple(n for n, s in manifest.tensors if s == PARAM and n not in trained)
