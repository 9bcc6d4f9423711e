"""Does plain data come back from JSON as it was, and is what isn't plain data refused?"""

from __future__ import annotations

import json
import math
import struct
from argparse import Namespace
from typing import Any

import numpy as np
import pytest
from documents import WHOLE_BYTES, values
from hypothesis import given
from hypothesis import strategies as st

from reshard.dtypes import BY_NAME
from reshard.errors import CorruptError, UnsupportedError
from reshard.plain import DEEPEST, LeftOut, NumpyArray, TensorRef, decode, encode, faults, walk
from reshard.stored import Device, DTypeName


def through_json(value: Any) -> Any:
    text = json.dumps(encode(value), allow_nan=False)
    return decode(json.loads(text))


def same(a: Any, b: Any) -> bool:
    """Equal in value, type and bits."""
    if type(a) is not type(b):
        return False
    if type(a) is float:
        return struct.pack("<d", a) == struct.pack("<d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True)
        return len(a) == len(b) and all(same(x, y) for x, y in pairs)
    if isinstance(a, Namespace):
        return same(vars(a), vars(b))
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(a == b)


numbers = st.integers(-(2**200), 2**200) | st.floats()
hashable = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=5,
).filter(lambda v: v == v)
arrays = st.builds(
    values,
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from(WHOLE_BYTES),
    st.integers(0, 99),
)
scalars = st.builds(
    lambda kind, seed: values((), kind, seed)[()], st.sampled_from(WHOLE_BYTES), st.integers(0, 99)
)


def namespace(attributes: dict[str, Any]) -> Namespace:
    found = Namespace()
    vars(found).update(attributes)
    return found


plain = st.recursive(
    hashable
    | st.just(math.nan)
    | arrays
    | arrays.map(lambda array: array.view(NumpyArray))
    | scalars
    | st.sampled_from([DTypeName("bfloat16"), Device("cuda:1"), Device("cpu")])
    | st.builds(TensorRef, st.text(max_size=3), st.text(max_size=3))
    | st.builds(LeftOut, st.text(max_size=3)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.sets(hashable, max_size=3)
        | st.dictionaries(
            st.text(max_size=3) | st.sampled_from(["$tuple", "a/b~c"]), inner, max_size=3
        )
        | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(namespace)
        | st.dictionaries(hashable, inner, max_size=3)
    ),
    max_leaves=12,
)


@given(plain)
def test_plain_data_comes_back(value: Any) -> None:
    assert same(through_json(value), value)


@given(plain)
def test_what_is_encoded_has_no_faults(value: Any) -> None:
    assert list(faults(json.loads(json.dumps(encode(value))))) == []


def test_what_is_numpys_own_is_told_from_tensors() -> None:
    some = [np.float32(0.1), np.float64(0.1), np.array(7), np.array([7]).view(NumpyArray)]
    found = through_json(some)
    assert [type(v) for v in found] == [np.float32, np.float64, np.ndarray, NumpyArray]
    assert [f.tolist() for f in found] == [s.tolist() for s in some]
    assert [encode(v)["$array"].get("kind") for v in some] == ["scalar", "scalar", None, "numpy"]
    assert [type(v) for v in through_json([np.str_("a"), np.bytes_(b"b")])] == [str, bytes]


@pytest.mark.parametrize("order", ["<", ">"])
def test_arrays_of_either_byte_order_and_any_strides(order: str) -> None:
    array = np.arange(24, dtype=f"{order}i4").reshape(4, 6).T[::2]
    found = through_json(array)
    assert found.tolist() == array.tolist()
    assert found.dtype == np.dtype("<i4")
    assert found.flags.writeable


def test_the_form_is_what_is_documented() -> None:
    assert encode({"t": (1, "a"), "n": math.inf, 3: b"\x00\xff", "x": {2, 1}}) == {
        "$dict": [
            ["t", {"$tuple": [1, "a"]}],
            ["n", {"$float": "inf"}],
            [3, {"$bytes": "AP8="}],
            ["x", {"$set": [1, 2]}],
        ]
    }
    assert encode(np.array([[1], [256]], np.int16)) == {
        "$array": {"dtype": "int16", "shape": [2, 1], "data": "AQAAAQ=="}
    }
    assert encode([TensorRef("w", "client"), LeftOut("a.B")]) == [
        {"$tensor": ["w", "client"]},
        {"$left-out": "a.B"},
    ]
    assert encode([DTypeName("bfloat16"), Device("cuda:0"), {DTypeName("int8"): "int8"}]) == [
        {"$dtype": "bfloat16"},
        {"$device": "cuda:0"},
        {"$dict": [[{"$dtype": "int8"}, "int8"]]},
    ]
    assert encode([Namespace(lr=0.1, size=(2,)), namespace({"$a": 1})]) == [
        {"$namespace": {"lr": 0.1, "size": {"$tuple": [2]}}},
        {"$namespace": {"$dict": [["$a", 1]]}},
    ]
    assert encode(np.int8(-1)) == {
        "$array": {"dtype": "int8", "shape": [], "data": "/w==", "kind": "scalar"}
    }
    assert encode(np.array([1], np.int8).view(NumpyArray)) == {
        "$array": {"dtype": "int8", "shape": [1], "data": "AQ==", "kind": "numpy"}
    }


class Odd:
    pass


class OddNamespace(Namespace):
    pass


@pytest.mark.parametrize("value", [Odd(), OddNamespace(), Odd, len, 1j, range(3), {"a": [Odd()]}])
def test_what_isnt_plain_data_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="is not plain data"):
        encode(value)


def test_what_no_reader_could_read_is_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    deepest: Any = 1
    for _ in range(DEEPEST):
        deepest = [deepest]
    assert through_json(deepest) == deepest
    for value, text in (
        (circle, "nests deeper"),
        ([deepest], "nests deeper"),
        (1 << 5000, "5001 bits"),
        (np.array(["a"]), "unknown element type"),
        (np.array([None]), "unknown element type"),
    ):
        with pytest.raises(UnsupportedError, match=text):
            encode(value)


BAD: list[tuple[Any, str]] = [
    ({"$tuple": "ab"}, "/$tuple"),
    ({"$tuple": [{"$float": "1.5"}]}, "/$tuple/0/$float"),
    ({"$set": [[]]}, "/$set"),
    ({"$set": [1, 1.0]}, "/$set"),
    ({"$set": {"a": 1}}, "/$set"),
    ({"$frozenset": [{"$array": {"dtype": "int8", "shape": [], "data": "AA=="}}]}, "/$frozenset"),
    ({"$bytes": "AP8"}, "/$bytes"),
    ({"$bytes": "AP 8="}, "/$bytes"),
    ({"$bytes": 1}, "/$bytes"),
    ({"$float": "1e5"}, "/$float"),
    ({"$float": ["nan"]}, "/$float"),
    ({"$dict": [[1, 2], [1, 3]]}, "/$dict"),
    ({"$dict": [[1, 2, 3]]}, "/$dict"),
    ({"$dict": {"a": 1}}, "/$dict"),
    ({"$dict": [[[], 2]]}, "/$dict"),
    ({"$tensor": "ab"}, "/$tensor"),
    ({"$tensor": ["a", 1]}, "/$tensor"),
    ({"$left-out": None}, "/$left-out"),
    ({"$array": []}, "/$array"),
    ({"$array": {"dtype": "int8", "shape": [1]}}, "/$array"),
    ({"$array": {"dtype": "int8", "shape": [1], "data": "AA==", "x": 1}}, "/$array"),
    ({"$array": {"dtype": "fp16", "shape": [1], "data": "AAA="}}, "/$array/dtype"),
    ({"$array": {"dtype": ["int8"], "shape": [1], "data": "AA=="}}, "/$array/dtype"),
    ({"$array": {"dtype": "float4_e2m1fn", "shape": [2], "data": "AA=="}}, "/$array/dtype"),
    ({"$array": {"dtype": "int8", "shape": [-1], "data": "AA=="}}, "/$array/shape"),
    ({"$array": {"dtype": "int8", "shape": [True], "data": "AA=="}}, "/$array/shape"),
    ({"$array": {"dtype": "int8", "shape": 1, "data": "AA=="}}, "/$array/shape"),
    ({"$array": {"dtype": "int8", "shape": [0, 1 << 40, 1 << 40], "data": ""}}, "/$array/shape"),
    ({"$array": {"dtype": "int8", "shape": [1] * 65, "data": "AA=="}}, "/$array/shape"),
    ({"$array": {"dtype": "int16", "shape": [1], "data": "AA=="}}, "/$array/data"),
    ({"$array": {"dtype": "int8", "shape": [1], "data": "?"}}, "/$array/data"),
    ({"$array": {"dtype": "int8", "shape": [1], "data": "AA==", "kind": 1}}, "/$array/kind"),
    ({"$array": {"dtype": "int8", "shape": [], "data": "AA==", "kind": "x"}}, "/$array/kind"),
    (
        {"$array": {"dtype": "int8", "shape": [1], "data": "AA==", "kind": "scalar"}},
        "/$array/shape",
    ),
    ({"$dtype": "fp16"}, "/$dtype"),
    ({"$dtype": 1}, "/$dtype"),
    ({"$device": "cuda:x"}, "/$device"),
    ({"$device": "cuda:0\n"}, "/$device"),
    ({"$device": None}, "/$device"),
    ({"$namespace": []}, "/$namespace"),
    ({"$namespace": {"$tuple": []}}, "/$namespace"),
    ({"$namespace": {"$dict": [], "a": 1}}, "/$namespace"),
    ({"$namespace": {"$dict": [[1, 2]]}}, "/$namespace"),
    ({"$namespace": {"a": {"$float": 1}}}, "/$namespace/a/$float"),
    ({"$unknown": 1}, ""),
    ({"$": 1}, ""),
    ({"$tuple": [], "a": 1}, ""),
    ({"a/b": [0, {"~": {"$tuple": 1}}]}, "/a~1b/1/~0/$tuple"),
    (math.inf, ""),
    (1 << 5000, ""),
]


@pytest.mark.parametrize(("value", "place"), BAD, ids=lambda v: str(v)[:50])
def test_a_bad_mark_is_found_at_its_place(value: Any, place: str) -> None:
    assert [p for p, _ in faults(value, "/objects/x")] == ["/objects/x" + place]
    with pytest.raises(CorruptError) as error:
        decode(value, "/objects/x")
    assert error.value.where == "/objects/x" + place


def test_all_faults_are_found() -> None:
    value = [b for b, _ in BAD]
    assert [p for p, _ in faults(value)] == [f"/{i}{p}" for i, (_, p) in enumerate(BAD)]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["a", "$tuple", "$set", "$dict", "$array", "$bytes", "$tensor", "$namespace"]
                ),
                inner,
                max_size=2,
            )
        ),
        max_leaves=10,
    )
)
def test_any_json_is_either_faulty_or_plain_data(value: Any) -> None:
    if list(faults(value)):
        with pytest.raises(CorruptError):
            decode(value)
    else:
        decoded = decode(value)
        assert same(decode(encode(decoded)), decoded)


def test_walk_names_every_value() -> None:
    value = {"a": [1, (2,)], "b": {3: None}, "c": Namespace(d=4)}
    found = {"/".join(path): v for path, v in walk(value)}
    assert found == {
        "": value,
        "a": [1, (2,)],
        "a/0": 1,
        "a/1": (2,),
        "a/1/0": 2,
        "b": {3: None},
        "b/3": None,
        "c": Namespace(d=4),
        "c/d": 4,
    }


def test_every_type_of_whole_bytes_is_kept() -> None:
    for kind in BY_NAME.values():
        if kind.bits % 8 == 0:
            array = values((2, 3), kind, 1)
            assert same(through_json(array), array)
