"""Is the header of a safetensors file sound, and how is one written?

A file is the header's length (8 bytes, little-endian), the header (JSON), and the payload. The
reader here is stricter than the reference implementation, which keeps the last of two tensors of
one name and leaves unknown fields unread: a header with anything in it that could be read in two
ways is refused, with all of its problems at once.

Sources: the format's specification (the README of github.com/huggingface/safetensors) and the
reference implementation, ``safetensors/src/tensor.rs`` (0.8), also for the order of tensors.
"""

from __future__ import annotations

import json
import math
import operator
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from reshard.box import Shape
from reshard.dtypes import BY_SAFETENSORS, DType
from reshard.errors import CorruptError
from reshard.formats._safetensors_json import JsonObject, is_text, parse_json, refuse
from reshard.source import source_error
from reshard.stored import brief

HEADER_LIMIT = 100_000_000
"""Longest header that the reference implementation reads."""

HUB_LIMIT = 25_000_000
"""Longest header that the hub's library reads over the network."""

SUFFIX = ".safetensors"
"""How the name of a file ends."""

METADATA = "__metadata__"
"""The one key of a header that isn't a tensor."""

PREFIX = 8
"""Bytes of the header's length, and what the header is padded to a multiple of."""

_MAX_DIMS = 64  # what torch and numpy can hold
_MOST = (1 << 63) - 1

_ASCENDING = (
    "BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0",
    "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64",
    "I64", "U64",
)  # fmt: skip
_RANK = {code: rank for rank, code in enumerate(_ASCENDING)}


class Slot(NamedTuple):
    """A tensor in a file.

    Parameters
    ----------
    name
        Any text, also an empty one or one that looks like a path.
    dtype, shape
        Its element type and sizes.
    start, stop
        Its bytes, counted from the beginning of the payload.
    """

    name: str
    dtype: DType
    shape: Shape
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself.

    Parameters
    ----------
    slots
        Its tensors, in the order of their bytes; together they fill the payload.
    metadata
        Its free text.
    payload
        The byte of the file at which the payload begins.
    nbytes
        The file's size.
    """

    slots: tuple[Slot, ...]
    metadata: Mapping[str, str]
    payload: int
    nbytes: int


def reference_order(code: str, name: str) -> tuple[int, bytes]:
    """Key that sorts tensors as the reference implementation lays them: wide types first."""
    return -_RANK[code], name.encode()


def encode(slots: Iterable[Slot], metadata: Mapping[str, str]) -> bytes:
    """Write the length and the header, padded with spaces so that the payload is aligned."""
    content: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    for slot in slots:
        content[slot.name] = {
            "dtype": slot.dtype.safetensors,
            "shape": slot.shape,
            "data_offsets": (slot.start, slot.stop),
        }
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % PREFIX)
    return len(text).to_bytes(PREFIX, "little") + text


def looks_like(start: bytes, nbytes: int) -> bool:
    """Whether a file of that size, whose first 9 bytes are given, may be a safetensors file."""
    length = int.from_bytes(start[:PREFIX], "little")
    return start[PREFIX:] == b"{" and 2 <= length <= min(HEADER_LIMIT, nbytes - PREFIX)


def read(path: Path) -> Header:
    """Read and check the header of a file.

    Raises
    ------
    NotFoundError
        If the file isn't there.
    CorruptError
        If the file is cut short or its header breaks a rule of the format; all that is wrong
        with the header is listed.
    """
    raw, nbytes = _read_bytes(path)
    problems: list[str] = []
    content = _content(raw, path)
    fields = content.fields
    metadata = _metadata(fields.pop(METADATA, JsonObject()), problems)
    problems += [f"{brief(name)} occurs more than once" for name in content.repeated]
    slots = sorted(_slots(fields, problems), key=operator.attrgetter("start", "stop", "name"))
    payload = PREFIX + len(raw)
    if not problems:
        _check_cover(slots, nbytes - payload, problems)
    refuse(problems, path, "the header")
    return Header(tuple(slots), metadata, payload, nbytes)


def _read_bytes(path: Path) -> tuple[bytes, int]:
    """The header's bytes, without the length, and the size of the file."""
    try:
        # a pipe of that name must not make us wait for its writer
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise source_error(error, path) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptError("isn't a regular file", where=path)
        length = _length(os.pread(fd, PREFIX, 0), status.st_size, path)
        raw = os.pread(fd, length, PREFIX)
    except OSError as error:
        raise source_error(error, path) from error
    finally:
        os.close(fd)
    if len(raw) < length:
        raise CorruptError("the file was cut while it was read", where=path)
    return raw, status.st_size


def _length(start: bytes, nbytes: int, path: Path) -> int:
    if len(start) < PREFIX:
        raise CorruptError(
            f"has {nbytes} bytes, too few for the length of a header",
            where=path,
            hint="the file is empty or cut short; copy it again",
        )
    length = int.from_bytes(start, "little")
    if length > HEADER_LIMIT:
        raise CorruptError(
            f"claims a header of {length} bytes; the format allows {HEADER_LIMIT}",
            where=path,
            hint="it isn't a safetensors file, or its beginning is damaged",
        )
    if PREFIX + length > nbytes:
        raise CorruptError(
            f"claims a header of {length} bytes, but {nbytes - PREFIX} follow",
            where=path,
            hint="the file is cut short, or it isn't a safetensors file",
        )
    return length


# -- the JSON in it -------------------------------------------------------------------------------


def _content(raw: bytes, path: Path) -> JsonObject:
    if raw[:1] != b"{":
        raise CorruptError(
            f"the header begins with {raw[:1]!r}, not with '{{'",
            where=path,
            hint="it isn't a safetensors file, or its beginning is damaged",
        )
    text = raw.rstrip(b" ")
    if text[-1:] != b"}":
        raise CorruptError(
            f"the header ends with {text[-1:]!r}; only spaces may follow its last '}}'",
            where=path,
        )
    content = parse_json(text, path, "the header", _object)
    if not isinstance(content, JsonObject):
        raise CorruptError("the header describes one tensor that has no name", where=path)
    return content


def _metadata(found: object, problems: list[str]) -> dict[str, str]:
    if not isinstance(found, JsonObject):
        what = "describes a tensor" if isinstance(found, _Fields) else f"is {brief(found)}"
        problems.append(f"{METADATA} {what}, not an object of texts")
        return {}
    for key in found.repeated:
        problems.append(f"{METADATA}: {brief(key)} occurs more than once")
    metadata: dict[str, str] = {}
    for key, value in found.fields.items():
        if not is_text(key):
            problems.append(f"{METADATA}: the key {brief(key)} isn't valid Unicode")
        elif not is_text(value):
            problems.append(f"{METADATA}: {brief(key)} is {brief(value)}, not text")
        else:
            metadata[key] = str(value)
    return metadata


# -- its tensors ----------------------------------------------------------------------------------

_NAMES = ("dtype", "shape", "data_offsets")


class _Fields(NamedTuple):
    """What an entry of the header says, where all of it is as it should be."""

    dtype: DType
    shape: Shape
    start: int
    stop: int


def _object(pairs: list[tuple[str, object]]) -> _Fields | JsonObject:
    """An object of the header, checked while the parser still has it at hand.

    A header has up to a hundred thousand tensors, and most have nothing that isn't said in a few
    words. What isn't found sound here is looked at again: that finds what is wrong with it.
    """
    if len(pairs) == len(_NAMES):
        fields: dict[str, Any] = dict(pairs)
        values: list[Any] = [fields.get(name) for name in _NAMES]
        code, shape, span = values
        if type(code) is str and type(shape) is type(span) is list and len(span) == 2:
            dtype, (start, stop), numbers = BY_SAFETENSORS.get(code), span, shape + span
            if (
                dtype is not None
                and {*map(type, numbers)} == {int}
                and len(shape) <= _MAX_DIMS
                and min(numbers) >= 0
                and start < stop <= _MOST
                and math.prod(shape) * dtype.bits == 8 * (stop - start)
            ):
                return _Fields(dtype, tuple(shape), start, stop)
    return JsonObject(pairs)


def _slots(infos: Mapping[str, object], problems: list[str]) -> Iterator[Slot]:
    """The tensors that a header describes; what is wrong with them goes to the problems."""
    for name, info in infos.items():
        wrong = [] if is_text(name) else ["its name isn't valid Unicode"]
        found = info if isinstance(info, _Fields) else _fields(info, wrong)
        if found is not None:
            yield Slot(name, *found)
        if wrong:
            problems.extend(f"tensor {brief(name)}: {w}" for w in wrong)


def _fields(info: object, wrong: list[str]) -> _Fields | None:
    """What an entry of the header says, or ``None`` and what is wrong with it."""
    if not isinstance(info, JsonObject):
        wrong.append(f"is {brief(info)}, not an object")
        return None
    fields = info.fields
    before = len(wrong)
    wrong += [f"{brief(f)} occurs more than once" for f in info.repeated]
    wrong += [f"has no {f!r}" for f in _NAMES if f not in fields]
    wrong += [f"has an unknown field {brief(f)}" for f in fields if f not in _NAMES]
    dtype = _dtype(fields, wrong)
    shape = _shape(fields, wrong)
    span = _span(fields, wrong)
    if dtype is not None and shape is not None and span is not None:
        _check_size(dtype, shape, span, wrong)
        if len(wrong) == before:
            return _Fields(dtype, shape, *span)
    return None


def _dtype(fields: Mapping[str, object], wrong: list[str]) -> DType | None:
    code = fields.get("dtype")
    found = BY_SAFETENSORS.get(code) if isinstance(code, str) else None
    if found is None and "dtype" in fields:
        wrong.append(f"its dtype {brief(code)} isn't one of the format")
    return found


def _counts(value: object) -> tuple[int, ...] | None:
    """A list of whole numbers from 0 that fit 63 bits, as a tuple."""
    if not isinstance(value, list):
        return None
    good = all(type(n) is int and 0 <= n <= _MOST for n in value)
    return tuple(value) if good else None


def _shape(fields: Mapping[str, object], wrong: list[str]) -> Shape | None:
    if "shape" not in fields:
        return None
    shape = _counts(fields["shape"])
    if shape is None:
        wrong.append(f"its shape {_listed(fields['shape'])} isn't a list of whole numbers from 0")
    elif len(shape) > _MAX_DIMS:
        wrong.append(f"it has {len(shape)} dims; more than {_MAX_DIMS} can't be held")
        return None
    return shape


def _span(fields: Mapping[str, object], wrong: list[str]) -> tuple[int, int] | None:
    if "data_offsets" not in fields:
        return None
    span = _counts(fields["data_offsets"])
    if span is None or len(span) != 2 or span[0] > span[1]:
        listed = _listed(fields["data_offsets"])
        wrong.append(f"its data_offsets {listed} aren't a first byte and the byte after the last")
        return None
    return span[0], span[1]


def _listed(value: object) -> str:
    if isinstance(value, list) and len(value) <= 8:
        return "[" + ", ".join(map(brief, value)) + "]"
    return brief(value)


def _check_size(dtype: DType, shape: Shape, span: tuple[int, int], wrong: list[str]) -> None:
    # also where a dim is 0, the strides of the others must fit 63 bits
    if math.prod(n for n in shape if n) * dtype.bits > _MOST:
        wrong.append(f"its shape {list(shape)} overflows")
        return
    bits = math.prod(shape) * dtype.bits
    if bits % 8:
        wrong.append(f"{dtype.safetensors} {list(shape)} doesn't fill whole bytes")
    elif bits // 8 != span[1] - span[0]:
        wrong.append(
            f"{dtype.safetensors} {list(shape)} takes {bits // 8} bytes, "
            f"but data_offsets {list(span)} give it {span[1] - span[0]}"
        )


def _check_cover(slots: Sequence[Slot], nbytes: int, problems: list[str]) -> None:
    """Check that the tensors fill the payload without holes or overlaps."""
    starts, stops = [slot.start for slot in slots], [slot.stop for slot in slots]
    if [*starts, nbytes] == [0, *stops]:
        return
    end, last = 0, ""
    for slot in slots:
        if slot.start > end:
            problems.append(f"bytes {end} to {slot.start} of the payload belong to no tensor")
        elif slot.start < end:
            problems.append(
                f"tensor {brief(slot.name)}: begins at byte {slot.start}, "
                f"but {brief(last)} ends at {end}"
            )
        if slot.stop >= end:
            end, last = slot.stop, slot.name
    if end > nbytes:
        problems.append(
            f"the tensors take {end} bytes, but {nbytes} follow the header: the file is cut short"
        )
    elif end < nbytes:
        problems.append(f"the last {nbytes - end} bytes of the file belong to no tensor")
