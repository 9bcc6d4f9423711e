"""Are the headers of safetensors files read strictly, and written as the reference does?

The judge is the safetensors library. Where it takes a header that this reader refuses, the corpus
says so, and the test holds it to that: nothing is refused or let through by accident.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, TensorSpec, deserialize, serialize

from reshard.dtypes import BY_SAFETENSORS
from reshard.errors import CorruptError, NotFoundError, ReshardError
from reshard.formats import _safetensors_header
from reshard.formats._safetensors_header import (
    HEADER_LIMIT,
    Slot,
    encode,
    looks_like,
    read,
    reference_order,
)
from reshard.formats._safetensors_json import JsonObject

# the names by which the library's own writer knows the types (it writes no 6-bit ones)
SPEC_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16",
    "U32": "uint32", "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16",
    "BF16": "bfloat16", "F32": "float32", "F64": "float64", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn_x2",
}  # fmt: skip

NAMES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.sampled_from(["", "../../x", "/etc/passwd", "a\0b", 'q"\\\n', "é\u2028😀", "w" * 300]),
).filter(lambda name: name != "__metadata__")


@st.composite
def tensors(draw: st.DrawFn, codes: tuple[str, ...]) -> dict[str, tuple[str, list[int], bytes]]:
    """Name to (type, shape, bytes); sub-byte types with an even number of rows that fit bytes."""
    made: dict[str, tuple[str, list[int], bytes]] = {}
    for name in draw(st.lists(NAMES, max_size=7, unique=True)):
        code = draw(st.sampled_from(codes))
        shape = draw(st.lists(st.integers(0, 4), max_size=4))
        dtype = BY_SAFETENSORS[code]
        if dtype.bits % 8:
            shape.append(8 // math.gcd(dtype.bits, 8))
        size = dtype.nbytes(math.prod(shape))
        made[name] = (code, shape, draw(st.binary(min_size=size, max_size=size)))
    return made


def write(path: Path, header: bytes, payload: bytes = b"") -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + payload)
    return path


def in_order(made: dict[str, tuple[str, list[int], bytes]]) -> tuple[list[Slot], bytes]:
    """Slots and payload as our writer lays them."""
    slots, payload = [], b""
    for name in sorted(made, key=lambda n: reference_order(made[n][0], n)):
        code, shape, data = made[name]
        at = len(payload)
        slots.append(Slot(name, BY_SAFETENSORS[code], tuple(shape), at, at + len(data)))
        payload += data
    return slots, payload


def library_bytes(
    made: dict[str, tuple[str, list[int], bytes]], metadata: dict[str, str] | None
) -> bytes:
    arrays = {name: np.frombuffer(data + b"\0", np.uint8) for name, (_, _, data) in made.items()}
    specs = {}
    for name, (code, shape, data) in made.items():
        stored = [*shape[:-1], shape[-1] // 2] if code == "F4" else shape
        specs[name] = TensorSpec(
            dtype=SPEC_NAMES[code],
            shape=stored,
            data_ptr=arrays[name].ctypes.data,
            data_len=len(data),
        )
    return bytes(serialize(specs, metadata=metadata))


# not {}: of no tensors and {} the library makes a file that it can't read itself (0.8.0)
METADATA = st.none() | st.dictionaries(
    NAMES, st.text(max_size=5, alphabet='aé"\n'), min_size=1, max_size=3
)


@given(made=tensors(tuple(SPEC_NAMES)), metadata=METADATA)
def test_reads_what_the_library_writes(
    tmp_path_factory: pytest.TempPathFactory,
    made: dict[str, tuple[str, list[int], bytes]],
    metadata: dict[str, str] | None,
) -> None:
    path = tmp_path_factory.mktemp("x") / "x.safetensors"
    raw = library_bytes(made, metadata)
    path.write_bytes(raw)
    header = read(path)
    assert dict(header.metadata) == (metadata or {})
    assert header.nbytes == len(raw)
    found = {
        s.name: (
            s.dtype.safetensors,
            list(s.shape),
            raw[header.payload + s.start : header.payload + s.stop],
        )
        for s in header.slots
    }
    assert found == made
    assert looks_like(raw[:9], len(raw))


@given(made=tensors(tuple(SPEC_NAMES)))
def test_writes_the_very_bytes_of_the_library(
    made: dict[str, tuple[str, list[int], bytes]],
) -> None:
    slots, payload = in_order(made)
    assert encode(slots, {}) + payload == library_bytes(made, None)


@given(made=tensors(tuple(BY_SAFETENSORS)), metadata=METADATA)
def test_the_library_reads_what_we_write(
    made: dict[str, tuple[str, list[int], bytes]], metadata: dict[str, str] | None
) -> None:
    slots, payload = in_order(made)
    found = {
        name: (info["dtype"], info["shape"], bytes(info["data"]))
        for name, info in deserialize(encode(slots, metadata or {}) + payload)
    }
    assert found == made


def test_every_type_of_the_library_is_known(tmp_path: Path) -> None:
    for code in BY_SAFETENSORS:
        raw = json.dumps({"x": {"dtype": code, "shape": [0], "data_offsets": [0, 0]}}).encode()
        assert deserialize(len(raw).to_bytes(8, "little") + raw)[0][1]["dtype"] == code
        assert read(write(tmp_path / "x", raw)).slots[0].dtype is BY_SAFETENSORS[code]


# -- headers that break a rule --------------------------------------------------------------------


def one(**changes: Any) -> dict[str, Any]:
    """A sound tensor of 8 bytes, with changes (``None`` takes a field away)."""
    info: dict[str, Any] = {"dtype": "U8", "shape": [8], "data_offsets": [0, 8], **changes}
    return {k: v for k, v in info.items() if v is not None}


def text(content: Any) -> bytes:
    return json.dumps(content).encode()


GOOD = text(one())
TAKES, REFUSES = True, False

# what is wrong, header, part of our message, what the reference makes of it (payload: 8 bytes)
CORPUS: list[tuple[str, bytes, str, bool]] = [
    ("no JSON", b'{"a": }', "isn't valid JSON", REFUSES),
    ("cut JSON", text({"a": one()})[:-1], "ends with|isn't valid", REFUSES),
    ("a list", b"[]", "begins with", REFUSES),
    ("no header", b"", "begins with", REFUSES),
    ("space first", b" " + text({"a": one()}), "begins with", TAKES),
    ("a line end last", text({"a": one()}) + b"\n", "only spaces", TAKES),
    ("NUL as padding", text({"a": one()}) + b"\0", "only spaces", REFUSES),
    ("two objects", text({"a": one()}) + b"{}", "isn't valid JSON", REFUSES),
    ("not UTF-8", b'{"\xff":' + GOOD + b"}", "isn't valid JSON", REFUSES),
    ("half a character", b'{"\\ud800":' + GOOD + b"}", "Unicode", REFUSES),
    ("NaN", b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,8]}}', "NaN", REFUSES),
    ("too deep", b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "too deeply", REFUSES),
    ("an endless number", b'{"a":' + b"9" * 5000 + b"}", "isn't valid JSON", REFUSES),
    (
        "a name twice",
        b'{"a":' + text(one(shape=[4], data_offsets=[0, 4])) + b',"a":' + GOOD + b"}",
        "'a' occurs more than once",
        TAKES,
    ),
    (
        "a field twice",
        b'{"a":{"dtype":"U8","dtype":"U8","shape":[8],"data_offsets":[0,8]}}',
        "'dtype' occurs more than once",
        REFUSES,
    ),
    ("an unknown field", text({"a": one(strides=[1])}), "unknown field 'strides'", TAKES),
    ("no object", text({"a": 5}), "not an object", REFUSES),
    ("a list as a tensor", text({"a": ["U8", [8], [0, 8]]}), "not an object", TAKES),
    ("null as a tensor", text({"a": None}), "not an object", REFUSES),
    ("no dtype", text({"a": one(dtype=None)}), "no 'dtype'", REFUSES),
    ("no shape", text({"a": one(shape=None)}), "no 'shape'", REFUSES),
    ("no offsets", text({"a": one(data_offsets=None)}), "no 'data_offsets'", REFUSES),
    ("unknown dtype", text({"a": one(dtype="F128")}), "dtype 'F128'", REFUSES),
    ("dtype in small letters", text({"a": one(dtype="u8")}), "dtype 'u8'", REFUSES),
    ("dtype no text", text({"a": one(dtype=8)}), "dtype 8", REFUSES),
    ("shape no list", text({"a": one(shape=8)}), "shape 8", REFUSES),
    ("a size below 0", text({"a": one(shape=[-8])}), r"shape \[-8\]", REFUSES),
    ("a size of -0", b'{"a":{"dtype":"U8","shape":[8,-0],"data_offsets":[0,0]}}', "-0", REFUSES),
    ("a fraction", text({"a": one(shape=[8.0])}), r"shape \[8.0\]", REFUSES),
    ("true as a size", text({"a": one(shape=[8, True])}), "True", REFUSES),
    ("text as a size", text({"a": one(shape=["8"])}), "'8'", REFUSES),
    ("a size over 64 bits", text({"a": one(shape=[1 << 64, 0])}), "whole numbers", REFUSES),
    ("too many dims", text({"a": one(shape=[8] + [1] * 64)}), "65 dims", TAKES),
    (
        "a product over 64 bits",
        text({"a": one(), "b": one(shape=[1 << 62, 8, 0], data_offsets=[8, 8])}),
        "overflows",
        REFUSES,
    ),
    (
        "the same behind a 0",
        text({"a": one(), "b": one(shape=[0, 1 << 62, 8], data_offsets=[8, 8])}),
        "overflows",
        TAKES,
    ),
    ("one offset", text({"a": one(data_offsets=[8])}), "data_offsets", REFUSES),
    ("three offsets", text({"a": one(data_offsets=[0, 8, 8])}), "data_offsets", REFUSES),
    ("offsets backwards", text({"a": one(data_offsets=[8, 0])}), "data_offsets", REFUSES),
    ("an offset below 0", text({"a": one(data_offsets=[-8, 0])}), "data_offsets", REFUSES),
    ("an offset over 63 bits", text({"a": one(data_offsets=[0, 1 << 63])}), "offsets", REFUSES),
    ("fewer bytes than elements", text({"a": one(shape=[9])}), "takes 9 bytes", REFUSES),
    ("more bytes than elements", text({"a": one(shape=[7])}), "takes 7 bytes", REFUSES),
    ("part of a byte", text({"a": one(dtype="F4", shape=[15])}), "whole bytes", REFUSES),
    (
        "a hole at the beginning",
        text({"a": one(shape=[4], data_offsets=[4, 8])}),
        "bytes 0 to 4 .* no tensor",
        REFUSES,
    ),
    (
        "a hole between",
        text({"a": one(shape=[2], data_offsets=[0, 2]), "b": one(shape=[4], data_offsets=[4, 8])}),
        "bytes 2 to 4 .* no tensor",
        REFUSES,
    ),
    (
        "an overlap",
        text({"a": one(), "b": one(shape=[4], data_offsets=[4, 8])}),
        "'b': begins at byte 4, but 'a' ends at 8",
        REFUSES,
    ),
    (
        "the same bytes twice",
        text({"a": one(), "b": one()}),
        "begins at byte 0",
        REFUSES,
    ),
    (
        "an empty one inside another",
        text({"a": one(), "b": one(shape=[0], data_offsets=[4, 4])}),
        "begins at byte 4",
        REFUSES,
    ),
    (
        "bytes after the last",
        text({"a": one(shape=[4], data_offsets=[0, 4])}),
        "last 4 bytes",
        REFUSES,
    ),
    ("no tensor for the payload", b"{}", "last 8 bytes", REFUSES),
    (
        "a payload cut short",
        text({"a": one(shape=[9], data_offsets=[0, 9])}),
        "cut short",
        REFUSES,
    ),
    ("metadata no object", text({"__metadata__": "x", "a": one()}), "not an object", REFUSES),
    (
        "metadata as a tensor",
        text({"__metadata__": one(), "a": one()}),
        "__metadata__ describes a tensor|not text",
        REFUSES,
    ),
    ("a tensor without a name", GOOD, "has no name|not an object", REFUSES),
    ("metadata null", text({"__metadata__": None, "a": one()}), "not an object", TAKES),
    ("metadata no text", text({"__metadata__": {"k": 1}, "a": one()}), "not text", REFUSES),
    (
        "metadata twice in itself",
        b'{"__metadata__":{"k":"1","k":"2"},"a":' + GOOD + b"}",
        "'k' occurs more than once",
        TAKES,
    ),
    (
        "metadata twice",
        b'{"__metadata__":{},"__metadata__":{},"a":' + GOOD + b"}",
        "'__metadata__' occurs more than once",
        REFUSES,
    ),
]

AS_TENSORS = ("metadata as a tensor", "a tensor without a name")
"""Cases in which something looks like a tensor at first, and is none."""


@pytest.mark.parametrize(
    ("header", "message", "reference"), [c[1:] for c in CORPUS], ids=[c[0] for c in CORPUS]
)
def test_each_rule(tmp_path: Path, header: bytes, message: str, reference: bool) -> None:
    payload = bytes(8)
    path = write(tmp_path / "x.safetensors", header, payload)
    with pytest.raises(CorruptError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)
    if reference is TAKES:
        deserialize(path.read_bytes())
    else:
        with pytest.raises(SafetensorError):
            deserialize(path.read_bytes())


@pytest.mark.parametrize(
    "header", [c[1] for c in CORPUS if c[0] not in AS_TENSORS],
    ids=[c[0] for c in CORPUS if c[0] not in AS_TENSORS],
)  # fmt: skip
def test_the_same_is_said_after_a_first_look_and_without(
    tmp_path: Path, header: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "x.safetensors", header, bytes(8))
    said = []
    for made in (_safetensors_header._object, JsonObject):
        monkeypatch.setattr(_safetensors_header, "_object", made)
        with pytest.raises(CorruptError) as caught:
            read(path)
        said.append(str(caught.value))
    assert said[0] == said[1]


@given(made=tensors(tuple(SPEC_NAMES)))
def test_sound_tensors_need_one_look(
    tmp_path_factory: pytest.TempPathFactory, made: dict[str, tuple[str, list[int], bytes]]
) -> None:
    """While their JSON is parsed, unless they are empty; a second look would find the same."""
    slots, payload = in_order(made)
    path = tmp_path_factory.mktemp("x") / "x.safetensors"
    path.write_bytes(encode(slots, {}) + payload)
    fields = _safetensors_header._fields
    with mock.patch.object(_safetensors_header, "_fields", side_effect=fields) as second:
        header = read(path)
        assert second.call_count == sum(0 in slot.shape for slot in slots)
    with mock.patch.object(_safetensors_header, "_object", JsonObject):
        assert read(path) == header


def test_sound_headers_that_look_odd(tmp_path: Path) -> None:
    empty = write(tmp_path / "a", b"{}")
    assert read(empty).slots == ()
    spaces = write(tmp_path / "b", b'{ \n"a" : ' + GOOD + b"}   ", bytes(8))
    assert [s.name for s in read(spaces).slots] == ["a"]
    # the payload of older files isn't aligned
    assert (len(spaces.read_bytes()) - 8) % 8 != 0
    scalar = text({"": one(shape=[], dtype="F64"), "z": one(shape=[3, 0], data_offsets=[0, 0])})
    assert [s.shape for s in read(write(tmp_path / "c", scalar, bytes(8))).slots] == [(3, 0), ()]


def test_all_problems_at_once(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"k": 1},
        "a": one(dtype="X", shape=[-1]),
        "b": 3,
        "c": one(data_offsets=None),
    }
    path = write(tmp_path / "x.safetensors", text(header), bytes(8))
    with pytest.raises(CorruptError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: 5 problems in the header:")
    for part in ("'k' is 1", "'a': its dtype 'X'", "'a': its shape [-1]", "'b': is 3", "'c': has"):
        assert part in message


def test_many_problems_are_counted_not_listed(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", text({f"t{i}": i for i in range(1000)}))
    with pytest.raises(CorruptError, match="1000 problems") as caught:
        read(path)
    assert "and 980 more" in str(caught.value)
    assert len(str(caught.value)) < 3000


# -- files that are cut, or aren't files ----------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 7])
def test_no_room_for_a_length(tmp_path: Path, nbytes: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(bytes(nbytes))
    with pytest.raises(CorruptError, match=f"has {nbytes} bytes"):
        read(path)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    whole = library_bytes({"a": ("F32", [3], bytes(12)), "b": ("U8", [5], bytes(5))}, None)
    path = tmp_path / "x.safetensors"
    for nbytes in range(len(whole)):
        path.write_bytes(whole[:nbytes])
        with pytest.raises(CorruptError):
            read(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CorruptError, match="last 1 bytes"):
        read(path)


def test_a_length_is_checked_before_anything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes((HEADER_LIMIT + 1).to_bytes(8, "little") + b"{}")
    with pytest.raises(CorruptError, match="the format allows 100000000"):
        read(path)
    path.write_bytes(HEADER_LIMIT.to_bytes(8, "little") + b"{}")
    with pytest.raises(CorruptError, match="but 2 follow"):
        read(path)
    path.write_bytes(b"\xff" * 8 + b"{}")
    with pytest.raises(CorruptError, match="the format allows"):
        read(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read(tmp_path / "gone.safetensors")
    with pytest.raises(CorruptError, match="isn't a regular file"):
        read(tmp_path)
    os.mkfifo(tmp_path / "pipe.safetensors")  # opening it must not wait for a writer
    with pytest.raises(CorruptError, match="isn't a regular file"):
        read(tmp_path / "pipe.safetensors")


# -- chance ---------------------------------------------------------------------------------------

_BASE = library_bytes(
    {"a.b": ("F32", [2, 3], bytes(24)), "c": ("U8", [5], bytes(5)), "e": ("I64", [0], b"")},
    {"format": "pt"},
)


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    raw = bytearray(_BASE)
    tokens = [b'"', b"{", b"}", b"[", b"]", b",", b":", b"-", b"0", b"e9", b"null", b" ", b"\\u"]
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(raw) - 30)))
        kind = draw(st.sampled_from(["byte", "cut", "insert", "copy"]))
        if kind == "byte":
            raw[at] = draw(st.integers(0, 255))
        elif kind == "cut":
            del raw[at : at + draw(st.integers(1, 6))]
        elif kind == "insert":
            raw[at:at] = draw(st.sampled_from(tokens))
        else:
            other = draw(st.integers(0, len(raw) - 1))
            raw[at:at] = raw[other : other + draw(st.integers(1, 40))]
    if draw(st.booleans()):  # keep the length true, so that the JSON is what is looked at
        length = len(raw) - 8 - (len(_BASE) - 8 - int.from_bytes(_BASE[:8], "little"))
        raw[:8] = max(0, length).to_bytes(8, "little")
    return bytes(raw)


@given(raw=mutations())
def test_damaged_headers_only_raise_our_errors(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    path = tmp_path_factory.mktemp("x") / "x.safetensors"
    path.write_bytes(raw)
    try:
        header = read(path)
    except ReshardError:
        return
    # whatever is let through, the reference reads just the same
    found = {n: (i["dtype"], tuple(i["shape"]), bytes(i["data"])) for n, i in deserialize(raw)}
    ours = {
        s.name: (
            s.dtype.safetensors,
            s.shape,
            raw[header.payload + s.start : header.payload + s.stop],
        )
        for s in header.slots
    }
    assert ours == found
