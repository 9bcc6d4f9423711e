"""Which keys does a distributed checkpoint have, and which tensor or value stands under each?

The keys are those of ``{"model": ..., "optim": ...}`` with what torch's ``get_state_dict`` gives,
and the training script's values at the top; a source that was read from DCP keeps its own. One
weight a name: the masters where there are any, else the parameters.

Source: torch 2.13, ``torch/distributed/checkpoint/state_dict.py`` and ``_traverse.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reshard.box import Box, Shape
from reshard.dtypes import DType, from_numpy
from reshard.errors import RequestError, UnsupportedError
from reshard.format import AS_WRITTEN, Loss, Request, optimizer_states, weights_state
from reshard.formats._dcp_metadata import Path_
from reshard.layout import BUFFER, CLIENT, MASTER, PARAM, TensorKey, key_text
from reshard.manifest import Manifest
from reshard.plain import LeftOut, NumpyArray, TensorRef

OBJECTS = "dcp" + AS_WRITTEN
"""The key of a manifest's objects under which stands what only this format needs."""

_HELD = ("client", "step", "scheduler", OBJECTS)


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor that is copied.

    Parameters
    ----------
    path
        Where it stands in the nested state dict.
    key
        Its name and state when it is read.
    source
        The tensor of the source that it is made of.
    shape, dtype
        Of the whole.
    layer
        Which layer it is of how many, where the layers are stored as one tensor with an axis for
        them in front (Megatron-Core).
    """

    path: Path_
    key: TensorKey
    source: TensorKey
    shape: Shape
    dtype: DType
    layer: tuple[int, int] | None = None

    def stored(self, box: Box) -> Box:
        """A box of it in the tensor that is stored."""
        if self.layer is None:
            return box
        at, _ = self.layer
        return Box((at, *box.start), (at + 1, *box.stop))

    @property
    def stored_shape(self) -> Shape:
        """The shape of the tensor that is stored."""
        return self.shape if self.layer is None else (self.layer[1], *self.shape)


@dataclass(slots=True)
class Contents:
    """All that is written.

    Parameters
    ----------
    items
        Tensors that are copied.
    arrays
        Small tensors whose elements are known, by path.
    values
        What isn't tensors, by path.
    losses
        What the checkpoint won't hold.
    """

    items: list[Item] = field(default_factory=list)
    arrays: dict[Path_, np.ndarray[Any, Any]] = field(default_factory=dict)
    values: dict[Path_, Any] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)


def contents(source: Manifest, request: Request) -> Contents:
    """Choose what is written of a source.

    Raises
    ------
    RequestError
        If the source lacks weights that are asked for, or two values would have one key.
    UnsupportedError
        If torch has no such element type.
    """
    chosen = _Choice(source, request)
    chosen.model()
    chosen.optimizer()
    chosen.script()
    chosen.rest()
    found = chosen.found
    seen: set[str] = set()
    for path in (*(i.path for i in found.items), *found.arrays, *found.values):
        key = key_of(path)
        if key in seen:
            raise RequestError(f"two values would have the key {key!r}", where=source.root)
        seen.add(key)
    for item in found.items:
        if item.dtype.torch is None:
            raise UnsupportedError(
                f"{key_text(item.source)} is {item.dtype}, which torch doesn't have",
                where=source.root,
            )
    return found


def key_of(path: Path_) -> str:
    """The flat key of a path."""
    return ".".join(map(str, path))


class _Choice:
    """Goes through a source once."""

    def __init__(self, source: Manifest, request: Request) -> None:
        self._source = source
        self._request = request
        self.found = Contents()
        own = source.objects.get(OBJECTS)
        self._own: Mapping[str, Any] = own if isinstance(own, Mapping) else {}
        self._used: set[TensorKey] = set()

    # -- the model --------------------------------------------------------------------------------

    def model(self) -> None:
        """One weight a name, tied names too, and buffers."""
        state = weights_state(self._source, self._request)
        if self._request.state is not None and state not in self._source.states:
            raise RequestError(
                f"there is no state {state!r} to write as the weights",
                where=self._source.root,
                hint=f"states: {', '.join(self._source.states)}",
            )
        prefix = self._own.get("model", "model.")
        above: Path_ = tuple(prefix.rstrip(".").split(".")) if prefix else ()
        weights: dict[str, TensorKey] = {}
        for name, own in self._source.tensors:
            if own in (PARAM, MASTER, BUFFER):
                best = next(
                    s for s in (state, MASTER, PARAM, BUFFER) if (name, s) in self._source.tensors
                )
                weights[name] = (name, best or PARAM)
        for alias, name in self._source.aliases.items():
            if alias not in weights and name in weights:
                weights[alias] = weights[name]
        for name, key in weights.items():
            tensor = self._source.tensors[key]
            cast = key[1] != BUFFER
            dtype = self._request.casts.of(name, tensor.dtype) if cast else tensor.dtype
            self._item((*above, name), (name, PARAM), key, dtype)

    def _item(
        self, path: Path_, key: TensorKey, source: TensorKey, dtype: DType | None = None
    ) -> None:
        tensor = self._source.tensors[source]
        self._used.add(source)
        self.found.items.append(Item(path, key, source, tensor.shape, dtype or tensor.dtype))

    # -- the optimizer ----------------------------------------------------------------------------

    def optimizer(self) -> None:
        """States by name, and the settings of the groups."""
        numbers = sorted({group.optimizer for group in self._source.groups}) or [0]
        of = {n: number for number in numbers for g in self._groups(number) for n in self._names(g)}
        for state in optimizer_states(self._source):
            for key in self._source.tensors:
                if key[1] == state:
                    optimizer = of.get(key[0], numbers[0])
                    self._item(self._path(optimizer, "state", key[0], state), key, key)
        for number in numbers:
            for index, group in enumerate(self._groups(number)):
                self._group(number, index, group)

    def _groups(self, optimizer: int) -> list[int]:
        groups = self._source.groups
        return [i for i, group in enumerate(groups) if group.optimizer == optimizer]

    def _names(self, group: int) -> list[str]:
        listed = self._own.get("params")
        if isinstance(listed, list) and len(listed) == len(self._source.groups):
            return list(listed[group])
        found = (space.in_groups().get(group, ()) for space in self._source.layout.spaces)
        return list(dict.fromkeys(entry.name for entries in found for entry in entries))

    def _path(self, optimizer: int, kind: str, first: str | int, *rest: str) -> Path_:
        prefixes = self._own.get("optimizers")
        if isinstance(prefixes, list) and optimizer < len(prefixes):
            prefix: Path_ = tuple(prefixes[optimizer])
        else:
            prefix = (f"optim{optimizer or ''}",)
        if self._own.get("flat"):
            return (*prefix, key_of((kind, first, *rest)))
        return (*prefix, kind, first, *rest)

    def _group(self, optimizer: int, index: int, number: int) -> None:
        group, names = self._source.groups[number], self._names(number)
        stateful = {n for n, s in self._source.tensors if s in optimizer_states(self._source)}
        for name in names:
            if name in stateful:
                for state, value in group.scalars.items():
                    self._value(self._path(optimizer, "state", name, state), _scalar(state, value))
        flat = bool(self._own.get("flat"))
        for first in names if flat else [index]:
            for setting, value in group.settings.items():
                self._value(self._path(optimizer, "param_groups", first, setting), value)
        if not flat:
            self._value(self._path(optimizer, "param_groups", index, "params"), names)
        elif not names:
            what = f"groups/{number}"
            self.found.losses.append(Loss(what, "a flattened optimizer has no empty groups"))

    # -- everything else --------------------------------------------------------------------------

    def script(self) -> None:
        """What the training script stored, at the top."""
        objects = self._source.objects
        client = objects.get("client")
        if isinstance(client, Mapping):
            for key, value in client.items():
                self._value((str(key),), value)
        for key in ("step", "scheduler"):
            if objects.get(key) is not None:
                self._value((key,), objects[key])

    def _value(self, path: Path_, value: Any) -> None:
        """A value, taken apart as torch does: dicts, and lists with tensors or dicts in them."""
        if isinstance(value, Mapping) and value:
            for key, one in value.items():
                self._value((*path, str(key)), one)
        elif isinstance(value, list) and any(map(_goes_on, value)):
            for i, one in enumerate(value):
                self._value((*path, i), one)
        elif isinstance(value, LeftOut):
            self.found.losses.append(
                Loss(f"{CLIENT}:{'/'.join(map(str, path))}", f"an object of {value.what}")
            )
        elif isinstance(value, TensorRef):
            self._item(path, (key_of(path), CLIENT), value.key)
        elif isinstance(value, np.ndarray) and not isinstance(value, NumpyArray):
            self.found.arrays[path] = value
        else:
            self.found.values[path] = value

    def rest(self) -> None:
        """List what isn't written."""
        self.found.losses += self._lost()

    def _lost(self) -> Iterator[Loss]:
        written = {item.key[0] for item in self.found.items if item.key[1] == PARAM}
        for key in self._source.tensors:
            if key in self._used:
                continue
            weight = key[1] == PARAM and key[0] in written
            yield Loss(
                key_text(key),
                "DCP holds one weight a name, and the masters are written"
                if weight
                else "another state is written as the weights, or nothing refers to it",
                harmless=weight,
            )
        for name in self._source.objects:
            if name not in _HELD and not name.endswith(AS_WRITTEN):
                yield Loss(name, "a distributed checkpoint has no place for it")
        for note in self._source.notes:
            if note.kind == "left-out":
                yield Loss(note.where, note.text)


def _goes_on(value: Any) -> bool:
    """Whether a list is taken apart because of this element."""
    if isinstance(value, list):
        return any(map(_goes_on, value))
    tensor = isinstance(value, np.ndarray) and not isinstance(value, NumpyArray)
    return tensor or isinstance(value, (Mapping, TensorRef))


def _scalar(state: str, value: Any) -> Any:
    """Torch's optimizers count steps in fp32 tensors."""
    if state == "step" and isinstance(value, (int, float, np.generic)):
        return np.array(float(value), np.float32)
    if isinstance(value, np.ndarray):
        from_numpy(value.dtype)
    return value
