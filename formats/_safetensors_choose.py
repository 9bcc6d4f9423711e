"""Which tensors of a checkpoint does a safetensors file hold, and what is left out?

One weight a name: the masters where there are any, else the parameters; buffers beside them, and
optimizer state where it is asked for. Everything else of the source is listed as left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from reshard.box import Shape
from reshard.dtypes import FLOATS, DType
from reshard.errors import RequestError, UnsupportedError
from reshard.format import AS_WRITTEN, Loss, Request, optimizer_states, weights_state
from reshard.formats._safetensors_header import METADATA
from reshard.formats._safetensors_json import is_text
from reshard.formats._safetensors_notes import Notes, label_of
from reshard.layout import BUFFER, CLIENT, MASTER, PARAM, TensorKey, key_text
from reshard.manifest import Manifest, Tensor
from reshard.stored import brief

OBJECTS = "safetensors"

FRAMEWORK = "format"
"""The key of a file's metadata that says which framework's tensors it holds, such as ``pt``."""

"""The key of a manifest's objects under which the free text of safetensors files stands."""


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor that will be written.

    Parameters
    ----------
    label
        What it is called in the file.
    key
        Its name and state in the target.
    source
        The tensor of the source that it is made of.
    dtype
        The element type that it gets.
    """

    label: str
    key: TensorKey
    source: Tensor
    dtype: DType

    @property
    def shape(self) -> Shape:
        """Its sizes."""
        return self.source.shape

    @property
    def nbytes(self) -> int:
        """Its bytes in the target."""
        return self.dtype.nbytes(self.source.numel)

    @property
    def cast(self) -> bool:
        """Whether its element type changes."""
        return self.dtype != self.source.dtype


def choose(source: Manifest, request: Request) -> list[Item]:
    """The tensors to write, in the order of their names."""
    items = [*weights_of(source, request), *buffers_of(source)]
    if request.optimizer:
        items += _optimizer(source, items)
    if not items:
        raise RequestError("there are no weights to write", where=source.root)
    _refuse_types(source, items)
    _refuse_names(source, items)
    return sorted(items, key=lambda i: natural_order(i.label))


def weights_of(source: Manifest, request: Request) -> Iterator[Item]:
    """One weight a name: the state that is asked for, or the best that there is."""
    state = weights_state(source, request)
    trained = {n for n, s in source.tensors if s not in (PARAM, BUFFER, CLIENT)}
    if request.state is not None and request.state not in source.states:
        raise RequestError(
            f"there is no state {request.state!r} to write as the weights",
            where=source.root,
            hint=f"states: {', '.join(source.states)}",
        )
    if state in (BUFFER, CLIENT):
        raise RequestError(f"the state {state!r} can't be written as the weights")
    lacking: list[str] = []
    for name in dict.fromkeys(n for n, s in source.tensors if s not in (BUFFER, CLIENT)):
        own = source.tensors.get((name, state or PARAM))
        if own is None and not (request.state is not None and name in trained):
            own = source.tensors.get((name, PARAM))  # frozen, or in full precision already
        if own is None:
            lacking.append(name)
            continue
        dtype = request.casts.of(name, own.dtype)
        yield Item(label_of((name, PARAM)), (name, PARAM), own, dtype)
    if lacking:
        raise RequestError(
            f"{len(lacking)} trained parameters have no state {state or PARAM!r} to write as "
            f"the weights: {_some(lacking)}",
            where=source.root,
            hint="leave --state out to take the best state of each"
            if request.state is not None
            else "the weights of this checkpoint are stored elsewhere",
        )


def buffers_of(source: Manifest) -> Iterator[Item]:
    """All buffers, of whatever type."""
    for key, tensor in source.tensors.items():
        if key[1] == BUFFER:
            yield Item(label_of(key), key, tensor, tensor.dtype)


def _optimizer(source: Manifest, weights: Iterable[Item]) -> Iterator[Item]:
    """Optimizer state, and masters that the weights don't hold bit for bit."""
    held = {i.source.key for i in weights if not i.cast}
    wanted = {*optimizer_states(source), MASTER}
    for key, tensor in source.tensors.items():
        if key[1] in wanted and key not in held:
            yield Item(label_of(key), key, tensor, tensor.dtype)


def _refuse_types(source: Manifest, items: Iterable[Item]) -> None:
    for item in items:
        if item.source.dtype.safetensors is None and not item.cast:
            raise UnsupportedError(
                f"{key_text(item.source.key)} is {item.source.dtype}, which safetensors can't hold",
                where=source.root,
            )
        if not item.cast:
            continue
        if item.dtype.name not in FLOATS:
            raise RequestError(f"weights can't be cast to {item.dtype}")
        if item.dtype.bits % 8 or item.source.dtype.bits % 8:
            raise RequestError(
                f"{key_text(item.source.key)} is {item.source.dtype} and can't be cast to "
                f"{item.dtype}: types narrower than a byte are only copied",
                where=source.root,
                hint="name it to keep its type, or don't cast",
            )


def _refuse_names(source: Manifest, items: Sequence[Item]) -> None:
    """Labels must be text, distinct, and read back as the tensors that they stand for."""
    notes = notes_of(items, {})
    seen: dict[str, Item] = {}
    for item in items:
        other = seen.setdefault(item.label, item)
        if other is not item:
            raise RequestError(
                f"{key_text(other.source.key)} and {key_text(item.source.key)} would both be "
                f"called {brief(item.label)}",
                where=source.root,
            )
        if item.label == METADATA or not is_text(item.label):
            raise RequestError(
                f"a safetensors file can't hold a tensor named {brief(item.label)}",
                where=source.root,
            )
    for item in items:
        if notes.key(item.label) != item.key:
            raise RequestError(
                f"the name {brief(item.label)} of {key_text(item.source.key)} would be read as "
                f"{key_text(notes.key(item.label))}",
                where=source.root,
                hint="write it without optimizer state",
            )


def losses(source: Manifest, request: Request, items: Iterable[Item]) -> Iterator[Loss]:
    held = {i.source.key for i in items}
    for key in source.tensors:
        if key not in held:
            yield Loss(key_text(key), _why_not(key[1]), harmless=True)
    if source.groups:
        why = "a safetensors file has no place for the optimizer's settings and step counts"
        yield Loss("groups", why, harmless=not request.optimizer)
    for name in source.objects:
        if name != OBJECTS and not name.endswith(AS_WRITTEN):
            yield Loss(name, "a safetensors file holds the model only", harmless=True)
    for note in source.notes:
        if note.kind == "left-out":
            yield Loss(note.where, note.text, harmless=True)


def _why_not(state: str) -> str:
    if state in (PARAM, MASTER):
        return "a safetensors file holds one weight a name, and another state is written"
    if state == CLIENT:
        return "a safetensors file holds the model only"
    return "optimizer state wasn't asked for"


def natural_order(name: str) -> tuple[list[str], str]:
    """Key that sorts names with numbers in them by the numbers: layer 2 before layer 10."""
    parts = re.split("([0-9]+)", name)
    numbers = [p.lstrip("0") for p in parts[1::2]]
    parts[1::2] = [f"{len(n):09d}{n}" for n in numbers]  # the longer number is the larger one
    return parts, name


def notes_of(items: Iterable[Item], aliases: Mapping[str, str]) -> Notes:
    """What must be noted in a file so that these tensors are read back as what they are."""
    keys = [i.key for i in items]
    states = dict.fromkeys(s for _, s in keys if s not in (PARAM, BUFFER))
    return Notes(tuple(sorted(states)), frozenset(n for n, s in keys if s == BUFFER), aliases)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(map(brief, names[:20])) + more
