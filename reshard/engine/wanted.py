"""What of a checkpoint becomes what of an engine, and does it fit?

Every check is here, and all that is wrong is told at once: names, shapes, element types, states of
the optimizer, groups. Nothing is read yet but what the checkpoint says of itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from reshard.dtypes import FLOATS
from reshard.engine.kinds import Kind, kinds, like
from reshard.engine.manifest import ENGINE
from reshard.engine.values import as_tensor, dtype_of_torch
from reshard.errors import RequestError
from reshard.layout import BUFFER, CLIENT, MASTER, PARAM, TensorKey, key_text
from reshard.manifest import Manifest, Tensor

if TYPE_CHECKING:
    from reshard.engine.flat import Entry, Flat
    from reshard.engine.state import Stateful

NOT_OPTIMIZER = (PARAM, MASTER, BUFFER, CLIENT)
"""States that are no optimizer's."""

MACHINE = ("foreach", "fused", "capturable", "differentiable")
"""Settings that say how the optimizer computes on this machine, not what."""


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """A state of a flat and the tensors that it is made of.

    Parameters
    ----------
    flat, state
        Which, in the engine.
    dtype
        The engine's type.
    tensors
        For each entry the checkpoint's tensor; ``None`` where it has no such state.
    """

    flat: Flat
    state: str
    dtype: torch.dtype
    tensors: Sequence[Tensor | None]


@dataclass(slots=True, eq=False)
class Wanted:
    """All that is taken from a checkpoint.

    Parameters
    ----------
    device
        Where the slices lie.
    readings
        Slices.
    buffers
        Name to the checkpoint's tensor.
    scalars
        Parameter to the optimizer's values.
    groups
        Settings.
    taken, left
        What was taken and what wasn't, in words.
    problems
        What doesn't fit.
    strange
        What a stage of a pipeline doesn't have; another stage must.
    """

    device: torch.device
    readings: list[Reading] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)


class Matching:
    """Joins a checkpoint with an engine.

    Parameters
    ----------
    source
        The checkpoint.
    engine
        The engine.
    """

    def __init__(self, source: Manifest, engine: Stateful) -> None:
        self._source, self._engine = source, engine
        self._tied = {name: alias for alias, name in engine.aliases.items()}
        self._used: set[str] = set()
        parts = [p for f in engine.flats for s in engine.states(f) for p in engine.parts(f, s)]
        device = parts[0][1].device if parts else torch.device("cpu")
        self._found = Wanted(device)
        self._states = dict.fromkeys(s for s in source.states if s not in NOT_OPTIMIZER)
        own = source.objects.get(ENGINE)
        self._own: Mapping[str, Any] = own if isinstance(own, Mapping) else {}
        self._unstepped: frozenset[str] = frozenset(self._own.get("unstepped") or ())

    def wanted(self, *, optimizer: bool) -> Wanted:
        """What is taken.

        Raises
        ------
        RequestError
            If anything doesn't fit: all of it.
        """
        found = self._found
        self._weights()
        if not optimizer:
            found.left.append("optimizer state and settings: they weren't asked for")
        elif not self._states and not self._source.groups:
            found.left.append("optimizer state: the checkpoint has none; the optimizer begins anew")
        else:
            self._optimizer()
        self._buffers()
        self._unexpected()
        if found.problems:
            lines = "\n".join(f"  {line}" for line in found.problems[:50])
            more = f"\n  and {len(found.problems) - 50} more" if len(found.problems) > 50 else ""
            raise RequestError(
                f"doesn't fit the engine ({len(found.problems)} problem(s)):\n{lines}{more}",
                where=self._source.root,
                hint="nothing was changed",
            )
        return found

    # -- tensors ----------------------------------------------------------------------------------

    def _tensor(self, name: str, states: Sequence[str]) -> Tensor | None:
        """A tensor of the checkpoint by a name that the engine knows."""
        names = (name, self._source.aliases.get(name, name), self._tied.get(name, name))
        for state in states:
            for one in dict.fromkeys(names):
                tensor = self._source.tensors.get((one, state))
                if tensor is not None:
                    self._used.add(one)
                    return tensor
        return None

    def _fits(
        self, entry_name: str, shape: tuple[int, ...], dtype: torch.dtype, found: Tensor
    ) -> bool:
        target = dtype_of_torch(dtype)
        if found.shape != tuple(shape):
            self._found.problems.append(
                f"{key_text(found.key)} is {list(found.shape)} in the checkpoint and "
                f"{list(shape)} in the engine"
            )
            return False
        floats = {target.name, found.dtype.name} <= FLOATS
        if target != found.dtype and not floats:
            self._found.problems.append(
                f"{key_text(found.key)} is {found.dtype} in the checkpoint and {target} in the "
                f"engine ({entry_name})"
            )
            return False
        return True

    def _flats(self, *, trained: bool) -> Iterator[Flat]:
        return (f for f in self._engine.flats if f.trained == trained and f.entries)

    def _weights(self) -> None:
        sources: dict[tuple[str, str, str], int] = {}
        for flat in self._engine.flats:
            if not flat.entries:
                continue
            state = MASTER if flat.trained else PARAM
            order = (MASTER, PARAM) if flat.trained else (PARAM, MASTER)
            dtype = self._dtype(flat, state)
            tensors = []
            for entry in flat.entries:
                tensor = self._tensor(entry.name, order)
                if tensor is None:
                    self._found.problems.append(f"{entry.name} isn't in the checkpoint")
                elif self._fits(entry.name, entry.shape, dtype, tensor):
                    kind = (state, tensor.state, _cast(tensor, dtype))
                    sources[kind] = sources.get(kind, 0) + 1
                tensors.append(tensor)
            self._found.readings.append(Reading(flat, state, dtype, tensors))
        for (state, source, cast), count in sources.items():
            what = "masters" if state == MASTER else "frozen parameters"
            self._found.taken.append(f"{count} {what} from {source}{cast}")

    def _dtype(self, flat: Flat, state: str) -> torch.dtype:
        return self._engine.states(flat)[state]

    def _buffers(self) -> None:
        for name, buffer in self._engine.buffers.items():
            tensor = self._tensor(name, (BUFFER, PARAM))
            if tensor is None:
                self._found.problems.append(f"the buffer {name} isn't in the checkpoint")
            elif self._fits(name, tuple(buffer.shape), buffer.dtype, tensor):
                self._found.buffers[name] = tensor
        if self._found.buffers:
            self._found.taken.append(f"{len(self._found.buffers)} buffers")

    def _unexpected(self) -> None:
        for name, state in self._source.tensors:
            if state == CLIENT or name in self._used:
                continue
            if name in self._engine.aliases:
                tied = self._engine.aliases[name]
                self._used.add(name)
                self._found.left.append(f"{name}: tied to {tied} here, which was taken")
                continue
            self._used.add(name)
            if self._engine.pipeline[1] > 1:
                self._found.strange.append(name)
            else:
                self._found.problems.append(f"{key_text((name, state))} isn't in the engine")

    # -- the optimizer ----------------------------------------------------------------------------

    def _optimizer(self) -> None:
        known = self._kinds()
        self._check_states(known)
        stepped: dict[str, Kind] = {}
        missing: list[str] = []
        for flat in self._flats(trained=True):
            readings: dict[str, list[Tensor | None]] = {
                state: [] for kind in known for state in kind.states
            }
            for entry in flat.entries:
                kind = known[entry.group]
                lacks = self._states_of(entry, kind, readings)
                missing += lacks
                if entry.numel and not lacks and self._was_stepped(entry.name):
                    stepped[entry.name] = kind
            for state, tensors in readings.items():
                if any(t is not None for t in tensors):
                    dtype = next(k.states[state] for k in known if state in k.states)
                    self._found.readings.append(Reading(flat, state, dtype, tensors))
        self._found.problems += missing
        self._scalars(stepped)
        self._groups()
        if self._states:
            text = ", ".join(self._states)
            self._found.taken.append(f"{text} of {len(stepped)} parameters")
        if self._unstepped:
            count = len(self._unstepped)
            self._found.left.append(f"optimizer state of {count} parameters: never stepped")

    def _was_stepped(self, name: str) -> bool:
        """Whether the checkpoint's optimizer had any state of a parameter."""
        if self._states:
            return name not in self._unstepped
        return bool(self._scalars_of(name))

    def _kinds(self) -> list[Kind]:
        flat = next(self._flats(trained=True), None)
        if flat is None:
            return []
        return kinds(self._engine.optimizer, self._dtype(flat, MASTER), self._found.device)

    def _check_states(self, known: Sequence[Kind]) -> None:
        keeps = {state for kind in known for state in kind.states}
        name = type(self._engine.optimizer).__name__
        wrote = str(self._own.get("optimizer", "the optimizer that was saved")).rpartition(".")[2]
        for state in self._states:
            if state not in keeps:
                self._found.problems.append(
                    f"{wrote} kept {state}, and {name} with these settings doesn't"
                )
        for state in sorted(keeps - set(self._states)) if self._states else ():
            self._found.problems.append(f"{name} keeps {state}, which the checkpoint doesn't have")

    def _states_of(
        self, entry: Entry, kind: Kind, readings: dict[str, list[Tensor | None]]
    ) -> list[str]:
        lacks = []
        for state, tensors in readings.items():
            found = None
            if state in kind.states and entry.name not in self._unstepped:
                found = self._tensor(entry.name, (state,))
                if found is not None and not self._fits(
                    entry.name, entry.shape, kind.states[state], found
                ):
                    found = None
                elif found is None and state in self._states and entry.numel:
                    lacks.append(f"{entry.name} has no {state} in the checkpoint")
            tensors.append(found)
        return lacks

    def _scalars_of(self, name: str) -> dict[str, Any]:
        """What the checkpoint says of one parameter."""
        found: dict[str, Any] = {}
        for one in dict.fromkeys((name, self._source.aliases.get(name, name))):
            group = self._membership().get(one)
            if group is None:
                continue
            for key, value in self._source.groups[group].scalars.items():
                if isinstance(value, Mapping):
                    if one in value:
                        found[key] = value[one]
                else:
                    found[key] = value
        return found

    def _scalars(self, stepped: Mapping[str, Kind]) -> None:
        dropped: set[str] = set()
        for name, kind in stepped.items():
            said = self._scalars_of(name)
            for key in kind.scalars.keys() - said.keys():
                self._found.problems.append(f"{name} has no {key} in the checkpoint")
            dropped |= said.keys() - kind.scalars.keys()
            self._found.scalars[name] = {
                key: like(example, said[key])
                for key, example in kind.scalars.items()
                if key in said
            }
        self._found.left += [f"{key}: this optimizer keeps none" for key in sorted(dropped)]

    def _membership(self) -> Mapping[str, int]:
        if not hasattr(self, "_member_of"):
            self._member_of = {
                entry.name: group
                for space in self._source.layout.spaces
                for group, entries in space.in_groups().items()
                for entry in entries
            }
        return self._member_of

    def _groups(self) -> None:
        """Settings: those of the group of the checkpoint that held a group's parameters."""
        member = self._membership()
        for number, current in enumerate(self._engine.groups):
            names = [
                entry.name
                for flat in self._flats(trained=True)
                for entry in flat.entries
                if entry.group == number
            ]
            resolved = [n if n in member else self._source.aliases.get(n, n) for n in names]
            held = {member[n] for n in resolved if n in member}
            if len(held) != 1:
                self._found.groups.append({})
                why = "its parameters were in none" if not held else f"they were in {sorted(held)}"
                self._found.left.append(f"settings of group {number}: {why}")
                continue
            self._found.groups.append(self._settings(held.pop(), number, current))
        self._found.taken.append(f"settings of {sum(map(bool, self._found.groups))} groups")

    def _settings(self, source: int, number: int, current: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in self._source.groups[source].settings.items():
            if key in MACHINE or key == "params":
                continue
            if key not in current and key != "initial_lr":
                self._found.left.append(f"{key} of group {number}: no setting of this optimizer")
                continue
            found[key] = as_tensor(value) if hasattr(value, "dtype") else value
        return found


def _cast(tensor: Tensor, dtype: torch.dtype) -> str:
    target = dtype_of_torch(dtype)
    if target == tensor.dtype:
        return ""
    word = "widened" if target.itemsize > tensor.dtype.itemsize else "rounded"
    return f", {word} from {tensor.dtype} to {target}"


__all__ = ["Matching", "Reading", "TensorKey", "Wanted"]
