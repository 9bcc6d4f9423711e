"""How do the keys of an optimizer become parameter groups and their states?

A group's settings are its ``param_groups`` entry without ``params``, also where it has no
parameters. States that all of a group's parameters have alike share a space; 0-d states that are
equal for all of them (``step``) are values of the group. In a flattened dict the groups aren't
told: parameters with equal settings make one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reshard.errors import CorruptError, IncompleteError, UnsupportedError
from reshard.formats._counts import may_be_count
from reshard.formats._dcp_keys import Optimizer
from reshard.formats._dcp_metadata import Index, Stored
from reshard.formats._dcp_spaces import Spaces, full_chunks
from reshard.formats._dcp_values import Script, listed, put
from reshard.manifest import ParamGroup
from reshard.plain import encode

PARAMS = "params"


@dataclass(frozen=True, slots=True)
class Group:
    """A parameter group: its settings and the names of its parameters."""

    settings: Mapping[str, Any]
    names: tuple[str, ...]


class Optimizers:
    """Adds optimizers to a manifest.

    Parameters
    ----------
    spaces
        Where tensors go.
    script
        Reads values.
    index
        The metadata.
    order
        The names of the model's tensors, in its order.
    """

    def __init__(self, spaces: Spaces, script: Script, index: Index, order: Iterable[str]) -> None:
        self._spaces = spaces
        self._script = script
        self._index = index
        self._order = {name: i for i, name in enumerate(order)}

    def add(self, number: int, optimizer: Optimizer) -> tuple[Group, ...]:
        """Add the optimizer of that number; returns its groups."""
        if not optimizer.flat and not optimizer.settings:
            self._ungrouped(optimizer)
            return ()
        groups = tuple(self._groups(optimizer))
        seen: set[str] = set()
        for group in groups:
            twice = seen & set(group.names)
            if twice or len(set(group.names)) < len(group.names):
                raise CorruptError(
                    f"{min(twice or group.names)} is in two places of the parameter groups",
                    where=self._root,
                )
            seen.update(group.names)
            self._add(number, group, optimizer)
        if lost := [name for name in optimizer.state if name not in seen]:
            raise IncompleteError(
                f"has state of {lost[0]!r} (and {len(lost) - 1} more), which is in no parameter "
                "group",
                where=self._root,
            )
        return groups

    @property
    def _root(self) -> object:
        return self._spaces.builder.root

    # -- groups -----------------------------------------------------------------------------------

    def _groups(self, optimizer: Optimizer) -> Iterator[Group]:
        if optimizer.flat:
            yield from self._flat(optimizer)
            return
        for number, keys in sorted(optimizer.settings.items(), key=lambda item: int(item[0])):
            settings = self._settings(keys)
            names = settings.pop(PARAMS, None)
            if not isinstance(names, list) or not all(isinstance(n, (str, int)) for n in names):
                raise IncompleteError(
                    f"parameter group {number} doesn't say which parameters it has",
                    where=self._root,
                )
            if not all(isinstance(n, str) for n in names):
                raise UnsupportedError(
                    f"parameter group {number} has its parameters by number, as "
                    "optimizer.state_dict() gives them, and nothing says what they are called",
                    where=self._root,
                    hint="save what torch.distributed.checkpoint.state_dict."
                    "get_optimizer_state_dict gives: it has names",
                )
            yield Group(settings, tuple(names))

    def _flat(self, optimizer: Optimizer) -> Iterator[Group]:
        groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
        for name in sorted(optimizer.names, key=lambda n: self._order.get(n, len(self._order))):
            settings = self._settings(optimizer.settings.get(name, {}))
            kind = repr(encode(dict(sorted(settings.items()))))
            groups.setdefault(kind, (settings, []))[1].append(name)
        text = (
            "the optimizer's dict was flattened, which keeps no groups: parameters with equal "
            "settings were put in one"
        )
        self._spaces.builder.note("note", text, ".".join(map(str, optimizer.prefix)) or "optimizer")
        for settings, names in groups.values():
            yield Group(settings, tuple(names))

    def _settings(self, keys: Mapping[tuple[str | int, ...], str]) -> dict[str, Any]:
        root: dict[str | int, Any] = {}
        for path, key in keys.items():
            put(root, path, self._script.agreed(key))
        return {str(k): listed(v) for k, v in root.items()}

    # -- states -----------------------------------------------------------------------------------

    def _add(self, number: int, group: Group, optimizer: Optimizer) -> None:
        keys = {n: optimizer.state[n] for n in group.names if optimizer.state.get(n)}
        self._check_complete(keys)
        scalars, rest = self._scalars(keys)
        tensors = {
            name: {s: self._index.tensors[k] for s, k in states.items()}
            for name, states in rest.items()
        }
        tensors = {name: states for name, states in tensors.items() if states}
        alike = self._alike(list(tensors.values()))
        builder = self._spaces.builder
        index = len(builder.groups)
        builder.groups.append(ParamGroup(group.settings, scalars, number))
        if alike:
            rows = [(n, {s: states[s] for s in alike}) for n, states in tensors.items()]
            self._spaces.add(f"group{index}", rows, index)
        others: dict[str, list[tuple[str, Stored]]] = {}
        for name, states in tensors.items():
            for state, stored in states.items():
                if state not in alike:
                    others.setdefault(state, []).append((name, stored))
        for state, some in others.items():
            self._spaces.loose(f"{state}", some)

    def _ungrouped(self, optimizer: Optimizer) -> None:
        """States of tensors that are in no group."""
        found: dict[str, list[tuple[str, Stored]]] = {}
        for name, states in optimizer.state.items():
            for state, key in states.items():
                found.setdefault(state, []).append((name, self._index.tensors[key]))
        for state, some in found.items():
            self._spaces.loose(state, some)

    def _check_complete(self, keys: Mapping[str, Mapping[str, str]]) -> None:
        """A parameter has no fewer states than others of its group with as many dims."""
        most: dict[int, tuple[str, frozenset[str]]] = {}
        kinds = {name: (self._dims(states), frozenset(states)) for name, states in keys.items()}
        for name, (dims, states) in kinds.items():
            if dims not in most or len(states) > len(most[dims][1]):
                most[dims] = name, states
        for name, (dims, states) in kinds.items():
            other, expected = most[dims]
            if states < expected:
                raise IncompleteError(
                    f"the optimizer's state of {name} lacks {', '.join(sorted(expected - states))}"
                    f", which {other} has",
                    where=self._root,
                    hint="it was lost: save the checkpoint again",
                )

    def _dims(self, states: Mapping[str, str]) -> int:
        found = (self._index.tensors.get(key) for key in states.values())
        return max((len(s.shape) for s in found if s is not None), default=0)

    def _scalars(
        self, keys: Mapping[str, Mapping[str, str]]
    ) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
        """Values that are one for the group, and the keys that are left."""
        rest = {name: dict(states) for name, states in keys.items()}
        scalars: dict[str, Any] = {}
        dims = any(self._dims(states) for states in keys.values())
        for state in dict.fromkeys(s for states in keys.values() for s in states):
            of = {name: states[state] for name, states in keys.items() if state in states}
            if not all(self._is_scalar(key) for key in of.values()):
                if any(key in self._index.values for key in of.values()):
                    raise UnsupportedError(
                        f"the optimizer's state {state!r} is a tensor for some parameters and "
                        "something else for others",
                        where=self._root,
                    )
                continue
            tensors = all(key in self._index.tensors for key in of.values())
            if tensors and not may_be_count(state, dims=dims):
                continue
            values = {name: self._script.agreed(key) for name, key in of.items()}
            kinds = {repr(_exact(value)) for value in values.values()}
            if len(kinds) == 1 and len(of) == len(keys):
                scalars[state] = next(iter(values.values()))
            elif any(key in self._index.values for key in of.values()):
                raise UnsupportedError(
                    f"the optimizer's state {state!r} isn't a tensor, and differs by parameter",
                    where=self._root,
                )
            else:
                continue
            for name in of:
                del rest[name][state]
        return scalars, rest

    def _is_scalar(self, key: str) -> bool:
        return key in self._index.values or self._index.tensors[key].shape == ()

    def _alike(self, tensors: Sequence[Mapping[str, Stored]]) -> list[str]:
        """States that all have, of one element type, and cut as the first of them is."""
        if not tensors:
            return []
        common = [s for s in tensors[0] if all(s in states for states in tensors)]
        common = [s for s in common if len({states[s].dtype for states in tensors}) == 1]
        return [s for s in common if all(_same_cut(t[s], t[common[0]]) for t in tensors)]


def _same_cut(a: Stored, b: Stored) -> bool:
    boxes = [[c.box for c in full_chunks(s)] for s in (a, b)]
    return a.shape == b.shape and boxes[0] == boxes[1]


def _exact(value: Any) -> Any:
    """A value such that equal ones are the same to the bit."""
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.shape, value.tobytes()
    return encode(value)
