"""Which parameters does an optimizer's ``state_dict`` speak of, and where does its state lie?

torch numbers parameters through the groups, in their order. Names come, best first, from the keys
themselves (``get_optimizer_state_dict`` has names), from the groups' ``param_names`` (torch 2.6 and
later, if the optimizer was given named parameters), or from a list that the user puts beside the
file as ``<file>.names.json``: the names in the optimizer's order, or a list of them for each group.
Nothing is guessed from shapes; shapes that don't fit are an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.box import Shape
from reshard.builder import Builder, Placed
from reshard.dtypes import DType
from reshard.errors import CorruptError, InconsistentError, UnsupportedError
from reshard.formats._counts import may_be_count
from reshard.formats._torch import Values, placed
from reshard.layout import Entry, FlatSpace
from reshard.manifest import ParamGroup
from reshard.partition import Replicated
from reshard.plain import encode
from reshard.source import source_error
from reshard.store import EntryStore
from reshard.stored import StoredTensor, brief
from reshard.torchfile import TorchFile, read_tensor

NAMES_SUFFIX = ".names.json"
"""What is added to a file's name to find the list of its parameters' names."""

OWN_KEYS = ("params", "param_names")
"""Keys of a group that aren't settings."""


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter group whose parameters have names.

    Parameters
    ----------
    names
        In the group's order.
    states
        The state of each, by name of the state; empty for one that hasn't been stepped.
    settings
        As the file has them.
    """

    names: tuple[str, ...]
    states: tuple[Mapping[str, Any], ...]
    settings: Mapping[str, Any]


def names_file(path: Path) -> Path:
    """Where the names of a file's parameters are looked for."""
    return path.with_name(path.name + NAMES_SUFFIX)


def named_groups(optimizer: Mapping[str, Any], path: Path) -> list[Named] | None:
    """The groups with their parameters' names; ``None`` if nothing gives names.

    Raises
    ------
    CorruptError
        If a group or the list of names isn't what it should be.
    InconsistentError
        If there is state of a parameter that is in no group, or another number of names.
    """
    groups = [_group(group, path) for group in optimizer["param_groups"]]
    state = optimizer["state"]
    listed = {key for group in groups for key in group["params"]}
    if strays := [key for key in state if key not in listed]:
        raise InconsistentError(
            f"there is optimizer state of {brief(strays[0])}, which is in no parameter group",
            where=path,
        )
    names = _names(groups, path)
    if names is None:
        return None
    flat = [name for some in names for name in some]
    if twice := next((n for i, n in enumerate(flat) if n in flat[:i]), None):
        raise InconsistentError(f"two parameters are named {brief(twice)}", where=path)
    return [
        Named(
            tuple(some),
            tuple(_state_of(state, key, path) for key in group["params"]),
            {k: v for k, v in group.items() if k not in OWN_KEYS},
        )
        for some, group in zip(names, groups, strict=True)
    ]


def _group(group: object, path: Path) -> Mapping[str, Any]:
    if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
        raise CorruptError("a parameter group doesn't list its parameters", where=path)
    return group


def _state_of(state: Mapping[Any, Any], key: object, path: Path) -> Mapping[str, Any]:
    found = state.get(key, {})
    if not isinstance(found, Mapping):
        raise CorruptError(f"the state of {brief(key)} is {brief(found)}, not a dict", where=path)
    return found


def _names(groups: Sequence[Mapping[str, Any]], path: Path) -> list[list[str]] | None:
    keys = [list(group["params"]) for group in groups]
    if all(isinstance(key, str) for some in keys for key in some):
        return keys if any(keys) else None
    own = [group.get("param_names") for group in groups]
    beside = names_file(path)
    if all(isinstance(names, (list, tuple)) for names in own):
        found, where = [list(map(str, names or ())) for names in own], path
    elif beside.is_file():
        found, where = _listed(beside, [len(some) for some in keys]), beside
    else:
        return None
    counts, wanted = [len(some) for some in found], [len(some) for some in keys]
    if counts != wanted:
        raise InconsistentError(
            f"there are names for {counts} parameters, and the optimizer's groups have {wanted}",
            where=where,
        )
    return found


def _listed(path: Path, counts: Sequence[int]) -> list[list[str]]:
    """The user's list, cut into groups."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise source_error(error, path) from error
    except ValueError as error:
        raise CorruptError(f"isn't JSON: {error}", where=path) from error
    if isinstance(found, list) and all(isinstance(name, str) for name in found):
        if len(found) != sum(counts):
            raise InconsistentError(
                f"lists {len(found)} names, and the optimizer has {sum(counts)} parameters",
                where=path,
            )
        rest: Iterator[str] = iter(found)
        return [[next(rest) for _ in range(count)] for count in counts]
    if isinstance(found, list) and all(_is_names(some) for some in found):
        return found
    raise CorruptError(
        "should be a list of names, or a list of such lists, one a parameter group", where=path
    )


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


class Optimizer:
    """Adds an optimizer's groups and tensors to a builder.

    Parameters
    ----------
    builder, file
        Where to, and the file that the tensors lie in.
    shapes
        Of the model's tensors, by name; empty if the file has no model.
    """

    def __init__(self, builder: Builder, file: TorchFile, shapes: Mapping[str, Shape]) -> None:
        self._builder = builder
        self._file = file
        self._shapes = shapes
        self._values = Values(builder, file)

    def add(self, groups: Sequence[Named]) -> None:
        """Add all groups."""
        for index, group in enumerate(groups):
            scalars = self._scalars(group)
            settings = self._values.plain(dict(group.settings), "param_groups", str(index))
            self._builder.groups.append(ParamGroup(settings, scalars))
            self._tensors(index, group, scalars)

    def _scalars(self, group: Named) -> dict[str, Any]:
        """State that is one and the same value for all parameters of a group: steps, mostly."""
        found: dict[str, Any] = {}
        stepped = [state for state in group.states if state]
        pairs = zip(group.names, group.states, strict=True)
        dims = any(self._shape(name, states) for name, states in pairs if states)
        for state in dict.fromkeys(s for states in stepped for s in states):
            values = [states.get(state) for states in stepped]
            tensors = [v for v in values if isinstance(v, StoredTensor)]
            if any(v.shape for v in tensors) or (tensors and not may_be_count(state, dims=dims)):
                continue
            plain = [self._small(value) for value in values]
            if len({json.dumps(encode(value)) for value in plain}) == 1:
                found[state] = plain[0]
        return found

    def _small(self, value: Any) -> Any:
        return read_tensor(self._file, value) if isinstance(value, StoredTensor) else value

    def _tensors(self, index: int, group: Named, scalars: Mapping[str, Any]) -> None:
        """State a parameter, as one space for those that have the same states and types."""
        spaces: dict[tuple[tuple[str, DType], ...], list[dict[str, Placed]]] = {}
        single: dict[str, list[Placed]] = {}
        for name, states in zip(group.names, group.states, strict=True):
            rows: dict[str, Placed] = {}
            for state, value in states.items():
                if state in scalars:
                    continue
                if not isinstance(value, StoredTensor):
                    raise UnsupportedError(
                        f"{state} of {name} is {brief(value)}, and another value for other "
                        "parameters of its group",
                        where=self._file.path,
                    )
                one = placed(self._builder, self._file, value, Entry(name, value.shape))
                if value.shape == self._shape(name, states):
                    rows[state] = one
                else:
                    single.setdefault(state, []).append(one)
            if rows:
                kinds = tuple((state, one.dtype) for state, one in rows.items())
                spaces.setdefault(kinds, []).append(rows)
        for number, (kinds, several) in enumerate(spaces.items()):
            self._space(f"group{index}" + (f".{number}" if number else ""), index, kinds, several)
        for state, some in single.items():
            self._builder.add_placed(f"group{index}.{state}", state, some)

    def _shape(self, name: str, states: Mapping[str, Any]) -> Shape:
        """A parameter's shape: the model's, else that of its first state with dims."""
        own = self._shapes.get(name)
        if own is None and self._shapes:
            raise InconsistentError(
                f"the optimizer has state of {name}, which the model doesn't have",
                where=self._file.path,
                hint=f"names come from {names_file(self._file.path).name}, if it is there",
            )
        tensors = [v.shape for v in states.values() if isinstance(v, StoredTensor)]
        if own is None:
            return next((shape for shape in tensors if shape), ())
        if tensors and own not in tensors:
            raise InconsistentError(
                f"{name} is {list(own)} in the model, and its optimizer state is "
                f"{', '.join(str(list(shape)) for shape in tensors)}",
                where=self._file.path,
                hint="are the parameters' names in another order than the optimizer's?",
            )
        return own

    def _space(
        self,
        name: str,
        group: int,
        kinds: tuple[tuple[str, DType], ...],
        rows: Sequence[Mapping[str, Placed]],
    ) -> None:
        first = kinds[0][0]
        space = FlatSpace(
            name=name,
            entries=tuple(row[first].entry for row in rows),
            partition=Replicated(1),
            states=dict(kinds),
            group=group,
        )
        stores = {
            state: EntryStore.of((r[state].file, r[state].offset, r[state].strides) for r in rows)
            for state, _ in kinds
        }
        self._builder.add(space, stores)
