"""How is a ``torch.save`` file written that plain torch loads?

The model alone is a state dict: ``load_state_dict`` takes what ``torch.load`` gives. With the
optimizer (``--optimizer``, or any conversion that isn't told to drop it) it is a dict of two,
``model`` and ``optimizer``, as scripts save them; the optimizer's parameters are numbered through
the groups and named in ``param_names``, and each has its ``step``. All tensors are whole.

The executor fills the storages; at last the pickle, headers and checksums are written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.dtypes import DType
from reshard.errors import RequestError
from reshard.format import AS_WRITTEN, Draft, Loss, Request, optimizer_states
from reshard.formats._safetensors_choose import buffers_of, natural_order, weights_of
from reshard.formats._torch_dict import LIST_KEYS, MODEL, OBJECTS
from reshard.formats._torch_plain import Plain
from reshard.formats._torch_sheet import Blueprint, Local, Sheet, Whole, torch_name
from reshard.layout import CLIENT, MASTER, PARAM, Entry, FlatSpace, Layout, key_text
from reshard.manifest import Manifest, Tensor
from reshard.partition import Replicated
from reshard.ruler import ints
from reshard.store import EntryStore, File, Regions, Store
from reshard.stored import StoredTensor, brief

if TYPE_CHECKING:
    from reshard.execute import Result


def draft(source: Manifest, request: Request, target: Path) -> Draft:
    """Lay out a file; see :class:`~reshard.format.Format`.

    Raises
    ------
    RequestError
        If there are no weights, or two tensors would have one name.
    UnsupportedError
        If torch has no such element type.
    """
    single = target.suffix != ""
    writing = _Writing(source, request)
    value = writing.value()
    blueprint = Blueprint.of(value, writing.sheet)
    path = "" if single else MODEL
    manifest = writing.manifest(target, path, blueprint)
    return Draft(
        manifest=manifest,
        finish=_Finish(path, blueprint, manifest),
        origin=writing.origin,
        casts=frozenset(writing.casts),
        losses=tuple(writing.losses()),
        single_file=single,
    )


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor that lies in the file.

    Parameters
    ----------
    name, state
        Its key in the target.
    source
        What it is made of.
    dtype
        The element type that it gets.
    tensor
        Where it lies.
    """

    name: str
    state: str
    source: Tensor
    dtype: DType
    tensor: StoredTensor


class _Writing:
    """What a file will hold."""

    def __init__(self, source: Manifest, request: Request) -> None:
        self.sheet = Sheet()
        self.origin: dict[tuple[str, str], tuple[str, str]] = {}
        self.casts: set[tuple[str, str]] = set()
        self._source = source
        self._request = request
        self._lost: list[Loss] = []
        self._pieces: dict[tuple[str, str], _Piece] = {}
        self._own = _section(source, OBJECTS)
        self._as_written = _section(source, OBJECTS + AS_WRITTEN)
        self._plain = Plain(self.sheet, source, self._lost.append)
        self._numbered = self._own.get("optimizer")
        self._optimizer = request.optimizer and bool(source.groups or self._numbered)

    # -- what is pickled ----------------------------------------------------------------------

    def value(self) -> object:
        """The value of the file."""
        model = self._model()
        if not self._optimizer:
            return model
        others = self._plain.mapping(_section(self._source, "client"), "client")
        for name in ("step", "scheduler"):
            if self._source.objects.get(name) is not None:
                others[name] = self._plain.value(self._source.objects[name], name)
        key = str(self._as_written.get("optimizer") or "optimizer")
        optimizer = self._optimizer_value()
        return {
            str(self._as_written.get("model") or "model"): model,
            key: [optimizer] if key in LIST_KEYS else optimizer,
            **others,
        }

    def _model(self) -> OrderedDict[str, Any]:
        weights = [(i.key, i.source, i.dtype) for i in weights_of(self._source, self._request)]
        # a state dict doesn't say which of its tensors are buffers
        weights += [((i.key[0], PARAM), i.source, i.dtype) for i in buffers_of(self._source)]
        if not weights:
            raise RequestError("there are no weights to write", where=self._source.root)
        found: dict[str, Any] = {}
        for (name, state), source, dtype in weights:
            if name in found:
                raise RequestError(
                    f"a parameter and a buffer are both called {brief(name)}",
                    where=self._source.root,
                )
            found[name] = self._tensor(name, state, source, dtype)
        values = self._own.get("values")
        if isinstance(values, Mapping):
            found |= self._plain.mapping(values, "torch")
        ordered = OrderedDict(sorted(found.items(), key=lambda item: natural_order(item[0])))
        for alias, name in self._source.aliases.items():  # after the names that they stand for
            if name in ordered:
                ordered.setdefault(alias, ordered[name])
        return ordered

    def _tensor(self, name: str, state: str, source: Tensor, dtype: DType) -> StoredTensor:
        torch_name(dtype)
        entry = Entry(name, source.shape)
        tensor = self.sheet.whole(state, Local(name, source.shape, (entry,)), dtype)
        self._pieces[name, state] = _Piece(name, state, source, dtype, tensor)
        if source.key != (name, state):
            self.origin[name, state] = source.key
        if dtype != source.dtype:
            self.casts.add((name, state))
        return tensor

    def _optimizer_value(self) -> Any:
        if self._numbered is not None:  # as it was read: nothing says of which parameters
            return self._plain.value(self._numbered, "optimizer")
        state: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        number = 0
        for index, (names, group) in enumerate(self._groups()):
            numbers = list(range(number, number + len(names)))
            settings = self._plain.mapping(group.settings, f"group{index}")
            groups.append({**settings, "params": numbers, "param_names": list(names)})
            for at, name in zip(numbers, names, strict=True):
                found = self._states(name)
                if found:
                    scalars = self._plain.mapping(group.scalars, f"group{index}")
                    state[at] = {**_steps(scalars, self.sheet), **found}
            number += len(names)
        return {"state": state, "param_groups": groups}

    def _groups(self) -> Iterator[tuple[Sequence[str], Any]]:
        own = self._as_written.get("groups")
        known = isinstance(own, (list, tuple)) and len(own) == len(self._source.groups)
        for index, group in enumerate(self._source.groups):
            names: list[str] = [str(name) for name in own[index]] if known and own else []
            seen = set(names)
            for space in self._source.layout.spaces:
                for entry in space.in_groups().get(index, ()):
                    if entry.name not in seen:
                        seen.add(entry.name)
                        names.append(entry.name)
            yield names, group

    def _states(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for state in (*optimizer_states(self._source), MASTER):
            tensor = self._source.tensors.get((name, state))
            if tensor is None or self._is_weight(name, tensor):
                continue
            found[state] = self._tensor(name, state, tensor, tensor.dtype)
        return found

    def _is_weight(self, name: str, tensor: Tensor) -> bool:
        """Whether the weights hold a tensor bit for bit."""
        weight = self._pieces.get((name, PARAM))
        return (
            weight is not None
            and weight.source.key == tensor.key
            and (weight.dtype == tensor.dtype)
        )

    # -- where it lies ------------------------------------------------------------------------

    def manifest(self, target: Path, path: str, blueprint: Blueprint) -> Manifest:
        """The target."""
        regions: list[tuple[int, int, int, int | None, str]] = []
        rows: dict[tuple[str, DType, bool], list[tuple[Entry, int]]] = {}
        for key, payload in blueprint.payload.items():
            assert isinstance(payload, Whole), "nothing is cut"
            offset, nbytes = blueprint.layout.offset(key), blueprint.sizes[key]
            if nbytes:
                regions.append((0, offset, nbytes, None, f"data/{key}"))
            (entry,) = payload.entries
            kind = (payload.state, payload.dtype, (entry.name, payload.state) in self.casts)
            rows.setdefault(kind, []).append((entry, offset))
        layout, stores = _laid(rows)
        return Manifest(
            format=OBJECTS,
            root=target,
            layout=layout,
            files=(File(path, blueprint.nbytes),),
            stores=stores,
            groups=self._source.groups if self._optimizer else (),
            aliases={a: n for a, n in self._source.aliases.items() if (n, PARAM) in self._pieces},
            objects=self._source.objects,
            regions=Regions.of("crc32", regions),
        )

    def losses(self) -> Iterator[Loss]:
        """What the file won't hold."""
        yield from self._lost
        held = {piece.source.key for piece in self._pieces.values()}
        for key in self._source.tensors:
            if key in held or (key[1] == CLIENT and self._optimizer):
                continue
            if key[1] in (PARAM, MASTER):
                why = "a state dict holds one weight a name, and another state is written"
                yield Loss(key_text(key), why, harmless=True)
            elif self._optimizer:
                yield Loss(key_text(key), "it is in no parameter group")
            else:
                yield Loss(key_text(key), "a state dict holds the model only", harmless=True)
        if self._source.groups and not self._optimizer:
            yield Loss("groups", "the optimizer wasn't asked for", harmless=True)
        kept = {OBJECTS, "client", "step", "scheduler"} if self._optimizer else {OBJECTS}
        for name in self._source.objects:
            if name not in kept and not name.endswith(AS_WRITTEN):
                why = "a torch file of a model and an optimizer has no place for it"
                yield Loss(name, why, harmless=not self._optimizer)
        for note in self._source.notes:
            if note.kind == "left-out":
                yield Loss(note.where, note.text, harmless=True)


def _section(source: Manifest, name: str) -> Mapping[str, Any]:
    found = source.objects.get(name)
    return found if isinstance(found, Mapping) else {}


def _steps(scalars: Mapping[str, Any], sheet: Sheet) -> dict[str, Any]:
    """State that a group's parameters share, each with a tensor of its own, as torch has them."""
    found: dict[str, Any] = {}
    for name, value in scalars.items():
        if name == "step" and isinstance(value, (int, float, np.generic)):
            value = sheet.array(np.array(value, np.float32))  # torch counts steps in float32
        found[name] = value
    return found


def _laid(
    rows: Mapping[tuple[str, DType, bool], Sequence[tuple[Entry, int]]],
) -> tuple[Layout, dict[tuple[str, str], Store]]:
    spaces: list[FlatSpace] = []
    stores: dict[tuple[str, str], Store] = {}
    for (state, dtype, cast), some in rows.items():
        name = f"{state}.{dtype}" + ("-cast" if cast else "")
        entries = tuple(entry for entry, _ in some)
        spaces.append(FlatSpace(name, entries, Replicated(1), {state: dtype}))
        offsets = ints([offset for _, offset in some])
        stores[name, state] = EntryStore(ints(np.zeros(len(some))), offsets)
    return Layout(tuple(spaces), {"shard": 1}), stores


@dataclass(frozen=True, slots=True)
class _Finish:
    """Writes all that isn't payload."""

    path: str
    blueprint: Blueprint
    manifest: Manifest

    def __call__(self, folder: Path, result: Result) -> None:
        path = folder / self.path if self.path else folder
        offsets = self.manifest.regions.offsets.tolist()
        checksums = dict(zip(offsets, result.regions.tolist(), strict=True))
        self.blueprint.finish_file(path, checksums)
