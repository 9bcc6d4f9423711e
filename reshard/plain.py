"""How is state that isn't tensors kept as JSON, with nothing lost and nothing run?

Training state holds more kinds of value than JSON has: tuples, bytes, integer keys, NaN, small
arrays. Each of those becomes an object with one key that begins with ``$``; the rest stands for
itself. Values are data only: no mark names a class, and the few kinds of object that there are
hold nothing but values.

===============  =====================================================
``$tuple``       a tuple
``$set``         a set
``$frozenset``   a set that can't change
``$bytes``       bytes, base64
``$float``       ``nan``, ``inf`` or ``-inf``
``$dict``        a dict whose keys aren't all plain text, as pairs
``$namespace``   an ``argparse.Namespace``: its attributes, as a dict
``$array``       an array: dtype, shape, little-endian bytes in base64;
                 ``kind`` says whether it was numpy's, or is a tensor
``$dtype``       one of torch's element types, by its name
``$device``      one of torch's devices
``$tensor``      a tensor of the checkpoint, by name and state
``$left-out``    a value that couldn't be carried: what it was
===============  =====================================================

The normative text is ``docs/layout-schema.md``, section "Plain data".
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from reshard.dtypes import BY_NAME, BY_TORCH, from_numpy
from reshard.errors import CorruptError, UnsupportedError
from reshard.layout import TensorKey
from reshard.stored import DEVICE, Device, DTypeName

LARGEST_ARRAY = 64 << 10
"""Bytes of the largest array that is kept inside JSON; larger ones are tensors."""

DEEPEST = 100
"""Levels of JSON that plain data may have: every reader's stack holds that many."""

MOST_DIMS = 64
"""Dims of a tensor or an array: as many as numpy and torch have."""

LONGEST_INT = 4096
"""Bits of the largest integer: Python itself refuses to read much longer ones."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands for a tensor of the checkpoint inside plain data."""

    name: str
    state: str

    @property
    def key(self) -> TensorKey:
        """The tensor's key."""
        return self.name, self.state


class NumpyArray(np.ndarray[Any, Any]):
    """An array that was numpy's own where it came from; any other array stands for a tensor.

    Made by ``array.view(NumpyArray)``.
    """


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Stands where a value was that can't be carried.

    Parameters
    ----------
    what
        Its class, as the file named it.
    """

    what: str


def encode(value: Any) -> Any:
    """Turn plain data into what JSON has.

    Numpy's text and bytes are Python's; a bytearray becomes bytes, and any mapping a dict.

    Raises
    ------
    TypeError
        For a value that isn't plain data.
    UnsupportedError
        For data that nests deeper than :data:`DEEPEST` (or holds itself), an integer that is
        longer than :data:`LONGEST_INT`, or an array of a type that isn't in the table.
    """
    return _encode(value, 0)


def _encode(value: Any, depth: int) -> Any:
    if depth > DEEPEST:
        raise UnsupportedError(f"plain data that nests deeper than {DEEPEST} levels")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, DTypeName):
        return {"$dtype": str(value)}
    if isinstance(value, Device):
        return {"$device": str(value)}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, np.bytes_):
        return {"$array": _encode_array(value)}
    if isinstance(value, int):
        if value.bit_length() > LONGEST_INT:
            raise UnsupportedError(f"an integer of {value.bit_length()} bits in plain data")
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, list):
        return [_encode(v, depth + 1) for v in value]
    if isinstance(value, tuple):
        return {"$tuple": [_encode(v, depth + 2) for v in value]}
    if isinstance(value, (set, frozenset)):
        mark = "$set" if isinstance(value, set) else "$frozenset"
        return {mark: sorted((_encode(v, depth + 2) for v in value), key=repr)}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        if all(_is_json_key(k) for k in value):
            return {str(k): _encode(v, depth + 1) for k, v in value.items()}
        pairs = value.items()
        return {"$dict": [[_encode(k, depth + 3), _encode(v, depth + 3)] for k, v in pairs]}
    if type(value) is Namespace:
        return {"$namespace": _encode(vars(value), depth + 1)}
    if isinstance(value, TensorRef):
        return {"$tensor": [value.name, value.state]}
    if isinstance(value, LeftOut):
        return {"$left-out": value.what}
    raise TypeError(f"{type(value).__name__} is not plain data")


def _is_json_key(key: object) -> bool:
    plain = isinstance(key, str) and not isinstance(key, (DTypeName, Device))
    return plain and not str(key).startswith("$")


def _encode_array(array: np.ndarray[Any, Any] | np.generic) -> dict[str, Any]:
    kind = from_numpy(array.dtype)
    data = np.ascontiguousarray(array, kind.numpy).tobytes()
    found: dict[str, Any] = {
        "dtype": kind.name,
        "shape": list(array.shape),
        "data": base64.b64encode(data).decode(),
    }
    if isinstance(array, np.generic):
        found["kind"] = "scalar"
    elif isinstance(array, NumpyArray):
        found["kind"] = "numpy"
    return found


def decode(value: Any, where: str = "") -> Any:
    """Turn what :func:`encode` made back into plain data.

    Parameters
    ----------
    value
        What JSON gave.
    where
        Its place in the document, for messages.

    Raises
    ------
    CorruptError
        If a marked value isn't what its mark says.
    """
    for place, text in faults(value, where):
        raise CorruptError(text, where=place or None)
    return _decode(value)


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    mark = _mark_of(value)
    if mark is None:
        return {k: _decode(v) for k, v in value.items()}
    inner = value[mark]
    if mark == "$tuple":
        return tuple(_decode(v) for v in inner)
    if mark == "$set":
        return {_decode(v) for v in inner}
    if mark == "$frozenset":
        return frozenset(_decode(v) for v in inner)
    if mark == "$bytes":
        return base64.b64decode(inner)
    if mark == "$float":
        return float(inner)
    if mark == "$dict":
        return {_decode(k): _decode(v) for k, v in inner}
    if mark == "$namespace":
        found = Namespace()
        vars(found).update(_decode(inner))
        return found
    if mark == "$array":
        return _decode_array(inner)
    if mark == "$dtype":
        return DTypeName(inner)
    if mark == "$device":
        return Device(inner)
    if mark == "$tensor":
        return TensorRef(*inner)
    return LeftOut(inner)


def _decode_array(inner: dict[str, Any]) -> Any:
    data = np.frombuffer(base64.b64decode(inner["data"]), np.uint8)
    array = data.view(BY_NAME[inner["dtype"]].numpy).reshape(inner["shape"]).copy()
    kind = inner.get("kind")
    if kind == "scalar":
        return array[()]
    return array.view(NumpyArray) if kind == "numpy" else array


def _mark_of(value: dict[str, Any]) -> str | None:
    """The mark of an object that has no faults."""
    key = next(iter(value), "")
    return key if key.startswith("$") else None


def pointer(key: str) -> str:
    """A key as a step of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


def shown(value: object) -> str:
    """A value of a document in a message: short, whatever it is."""
    if isinstance(value, str):
        return json.dumps(value if len(value) <= 60 else value[:57] + "...")
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    return f"a {type(value).__name__}"


def faults(value: Any, place: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Everything that is wrong with plain data in JSON.

    Yields
    ------
    place, text
        A JSON pointer that begins with ``place``, and a sentence.
    """
    if depth > DEEPEST:
        yield place, f"nests deeper than {DEEPEST} levels"
    elif isinstance(value, list):
        for i, v in enumerate(value):
            yield from faults(v, f"{place}/{i}", depth + 1)
    elif isinstance(value, dict):
        marks = [k for k in value if isinstance(k, str) and k.startswith("$")]
        if not marks:
            for k, v in value.items():
                yield from faults(v, f"{place}/{pointer(k)}", depth + 1)
        elif len(value) > 1:
            yield place, f"has the mark {shown(marks[0])} beside other keys; a mark stands alone"
        else:
            yield from _mark_faults(marks[0], value[marks[0]], f"{place}/{marks[0]}", depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        yield place, f"is {value!r}; expected a finite number, or the mark $float"
    elif isinstance(value, int) and value.bit_length() > LONGEST_INT:
        yield place, f"is {shown(value)}; expected at most {LONGEST_INT}"


def _mark_faults(mark: str, inner: Any, place: str, depth: int) -> Iterator[tuple[str, str]]:
    if mark in ("$tuple", "$set", "$frozenset"):
        if not isinstance(inner, list):
            yield place, f"is {shown(inner)}; expected a list of values"
            return
        found = list(faults(inner, place, depth))
        yield from found or (_hash_faults(inner, place) if mark != "$tuple" else ())
    elif mark == "$dict":
        if not isinstance(inner, list) or not all(_is_pair(p) for p in inner):
            yield place, f"is {shown(inner)}; expected a list of pairs [key, value]"
            return
        found = list(faults(inner, place, depth))
        yield from found or _hash_faults([k for k, _ in inner], place)
    elif mark == "$namespace":
        yield from _namespace_faults(inner, place, depth)
    elif mark == "$bytes":
        if _base64(inner) is None:
            yield place, f"is {shown(inner)}; expected base64"
    elif mark == "$float":
        if inner not in ("nan", "inf", "-inf"):
            yield place, f'is {shown(inner)}; expected "nan", "inf" or "-inf"'
    elif mark == "$array":
        yield from _array_faults(inner, place)
    elif mark == "$dtype":
        if not isinstance(inner, str) or inner not in BY_TORCH:
            yield place, f"is {shown(inner)}; expected the name of an element type of torch"
    elif mark == "$device":
        if not isinstance(inner, str) or not DEVICE.fullmatch(inner):
            yield place, f"is {shown(inner)}; expected a device such as cuda:0"
    elif mark == "$tensor":
        if not _is_pair(inner) or not all(isinstance(v, str) for v in inner):
            yield place, f"is {shown(inner)}; expected a pair of texts [name, state]"
    elif mark == "$left-out":
        if not isinstance(inner, str):
            yield place, f"is {shown(inner)}; expected a text"
    else:
        yield place.rpartition("/")[0], f"has the unknown mark {shown(mark)}"


def _namespace_faults(inner: Any, place: str, depth: int) -> Iterator[tuple[str, str]]:
    marks = [k for k in inner if k.startswith("$")] if isinstance(inner, dict) else ["$"]
    if marks not in ([], ["$dict"]):
        yield place, f"is {shown(inner)}; expected a dict"
        return
    found = list(faults(inner, place, depth))
    yield from found
    if not found and not all(type(k) is str for k in _decode(inner)):
        yield place, "has attributes whose names aren't texts"


def _hash_faults(values: list[Any], place: str) -> Iterator[tuple[str, str]]:
    """Values that have to be distinct, as a set's and as a dict's keys."""
    try:
        distinct = {_decode(v) for v in values}
    except TypeError as error:
        yield place, f"can't be looked up by its values: {error}"
    else:
        if len(distinct) != len(values):
            yield place, "holds a value twice"


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


def _base64(value: Any) -> bytes | None:
    if not isinstance(value, str):
        return None
    try:
        return base64.b64decode(value, validate=True)
    except (ValueError, binascii.Error):
        return None


def _array_faults(inner: Any, place: str) -> Iterator[tuple[str, str]]:
    keys = ("dtype", "shape", "data")
    if not isinstance(inner, dict) or set(inner) - {"kind"} != set(keys):
        yield place, f"is {shown(inner)}; expected an object with the keys {', '.join(keys)}"
        return
    name, shape, data = (inner[k] for k in keys)
    if "kind" in inner and inner["kind"] not in ("numpy", "scalar"):
        yield f"{place}/kind", f'is {shown(inner["kind"])}; expected "numpy" or "scalar"'
    elif inner.get("kind") == "scalar" and shape != []:
        yield f"{place}/shape", f"is {shown(shape)}; a scalar has no dims"
        return
    kind = BY_NAME.get(name) if isinstance(name, str) else None
    if kind is None or kind.bits % 8:
        yield f"{place}/dtype", f"is {shown(name)}; expected an element type of whole bytes"
        return
    raw = _base64(data)
    if raw is None:
        yield f"{place}/data", f"is {shown(data)}; expected base64"
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        yield f"{place}/shape", f"is {shown(shape)}; expected a list of integers from 0"
    elif len(shape) > MOST_DIMS or math.prod(max(n, 1) for n in shape) * kind.itemsize >= 1 << 63:
        yield f"{place}/shape", f"is {shown(shape)}; no array has such a shape"
    elif raw is not None and len(raw) != math.prod(shape) * kind.itemsize:
        expected = math.prod(shape) * kind.itemsize
        yield f"{place}/data", f"has {len(raw)} bytes; the shape and type give {expected}"


def walk(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value inside plain data with its path, containers first.

    Yields
    ------
    path, value
        ``path`` has a key or an index a level.
    """
    yield path, value
    if type(value) is Namespace:
        value = vars(value)
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from walk(inner, (*path, str(key)))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from walk(inner, (*path, str(index)))
