"""Do pickles load as what they say, and does nothing in them ever run?"""

from __future__ import annotations

import collections
import copyreg
import dataclasses
import datetime
import enum
import io
import pathlib
import pickle
import posix
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard import pickle_stubs
from reshard.errors import CorruptError, ReshardError, UnsafeError, UnsupportedError
from reshard.pickle_write import Call, Global, NewObj, dump_pickle
from reshard.pickles import (
    GlobalStub,
    Opaque,
    PickleResult,
    Record,
    Size,
    StorageRef,
    StoredArray,
    StoredTensor,
    load_pickle,
)

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 80), 1 << 80),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    st.binary(max_size=8),
)
KEYS = st.one_of(st.text(max_size=4), st.integers(), st.tuples(st.integers(), st.text(max_size=2)))
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(collections.OrderedDict),
        st.sets(st.one_of(st.integers(), st.text(max_size=4)), max_size=4),
    ),
    max_leaves=20,
)


def load(data: bytes, **options: Any) -> PickleResult:
    return load_pickle(data, where="dir/some.pt", **options)


def same(one: object, other: object) -> bool:
    """Equal, and of the same plain types all the way down."""
    if isinstance(one, collections.OrderedDict) != isinstance(other, collections.OrderedDict):
        return False
    if isinstance(one, dict):
        assert isinstance(other, dict)
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        assert isinstance(other, list | tuple)
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


# ------------------------------------------------------------------ plain data


@given(PLAIN, st.integers(0, 5))
def test_plain_data_loads_as_itself(value: object, protocol: int) -> None:
    found = load(pickle.dumps(value, protocol))
    assert same(found.value, value)
    assert found.opaque == ()


@given(PLAIN)
def test_what_is_written_loads_with_pickle_and_with_us(value: object) -> None:
    data = dump_pickle(value)
    assert same(pickle.loads(data), value)
    assert same(load(data).value, value)
    assert dump_pickle(pickle.loads(data)) == data


@given(PLAIN)
def test_what_is_written_loads_with_torchs_restricted_unpickler(value: object) -> None:
    unpickler = pytest.importorskip("torch._weights_only_unpickler")
    assert same(unpickler.load(io.BytesIO(dump_pickle(value))), value)


def test_more_plain_types() -> None:
    value = [frozenset("ab"), bytearray(b"x\xff"), 1 + 2j, range(1, 9, 3), slice(1, None), b"", ()]
    for protocol in range(2, 6):
        assert load(pickle.dumps(value, protocol)).value == value
    names = [bytearray, int, list, float, dict]
    found = load(pickle.dumps(names, 2))
    assert all(issubclass(name, GlobalStub) for name in found.value)
    assert [name.qualname for name in found.value] == [f"builtins.{t.__name__}" for t in names]


def test_shared_lists_stay_shared() -> None:
    inner: list[int] = [1]
    for data in (pickle.dumps([inner, inner]), dump_pickle([inner, inner])):
        value = load(data).value
        assert value[0] is value[1]
        loaded = pickle.loads(data)
        assert loaded[0] is loaded[1]


def test_large_integers_and_many_memo_entries() -> None:
    value = [1 << 2040, -(1 << 2047), 1 << 4000, *(f"key {i}" for i in range(300)), "key 299"]
    assert pickle.loads(dump_pickle(value)) == value
    assert load(dump_pickle(value)).value == value


@pytest.mark.parametrize(
    "value",
    [object(), np.zeros(2), lambda: 0, True.__class__, Path("x")],
    ids=["object", "array", "function", "class", "path"],
)
def test_unknown_objects_are_not_written(value: object) -> None:
    with pytest.raises(TypeError, match="can't write"):
        dump_pickle({"a": [value]})


def test_subclasses_of_plain_types_are_not_taken_for_them() -> None:
    class Text(str):
        pass

    class Kind(enum.IntEnum):
        A = 1

    for value in (Text("x"), Kind.A):
        with pytest.raises(TypeError):
            dump_pickle(value)


def test_a_set_is_written_in_one_order() -> None:
    items = [f"name {i}" for i in range(50)]
    shuffled = random.Random(1).sample(items, len(items))
    assert dump_pickle(set(items)) == dump_pickle(set(shuffled))


def test_paths_become_text() -> None:
    paths = [
        pathlib.PurePosixPath("/a/b/../c"),
        pathlib.PosixPath("rel/x"),
        pathlib.PureWindowsPath(r"C:\a\b"),
        pathlib.PurePosixPath("/"),
    ]
    for protocol in (2, 4):
        assert load(pickle.dumps(paths, protocol)).value == [str(path) for path in paths]
    moved = pickle.dumps(paths, 2).replace(b"cpathlib\n", b"cpathlib._local\n")
    assert load(moved).value == [str(path) for path in paths]


ARRAYS = [
    np.arange(6, dtype=np.uint32).reshape(2, 3).T,
    np.array(["ab", "c"]),
    np.array([b"ab", b"c"]),
    np.array(2.5),
    np.zeros((0, 2), np.int64),
    np.array([1, 2], ">i4"),
    np.array([True, False]),
    np.array([1 + 2j]),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: a.dtype.str)
@pytest.mark.parametrize("protocol", range(2, 6))
def test_numpy_arrays(array: np.ndarray[Any, Any], protocol: int) -> None:
    found = load(pickle.dumps({"a": array}, protocol))
    stored = found.value["a"]
    assert isinstance(stored, StoredArray)
    assert found.opaque == ()
    np.testing.assert_array_equal(stored.numpy(), array, strict=True)
    again = pickle.loads(dump_pickle(stored))
    np.testing.assert_array_equal(again, array)


def test_numpy_scalars_and_random_states() -> None:
    state: Any = np.random.RandomState(3).get_state()
    value = (np.float32(1.5), np.int64(-3), np.bool_(True), state, random.Random(1).getstate())
    for data in (pickle.dumps(value, 2), pickle.dumps(value, 5)):
        found = load(data).value
        assert found[:3] == value[:3]
        assert [type(one) for one in found[:3]] == [np.float32, np.int64, np.bool_]
        np.testing.assert_array_equal(found[3][1].numpy(), state[1])
        assert found[4] == value[4]
    written = pickle.loads(dump_pickle(value[0]))
    assert written == value[0]
    assert type(written) is np.float32


def test_arrays_of_objects_are_reported_and_never_made() -> None:
    found = load(pickle.dumps([np.array([{"a": 1}], object), np.datetime64("2020-01-01")]))
    assert found.opaque == ("numpy.dtype('O8')", "numpy.dtype('M8')")
    with pytest.raises(UnsupportedError, match="something else than numbers"):
        found.value[0].numpy()


@pytest.mark.parametrize(
    ("shape", "data"), [((3,), b"12345678"), ((-1,), b"1234"), ((1 << 62, 4), b""), ("x", b"1234")]
)
def test_arrays_that_do_not_fit_their_bytes(shape: Any, data: bytes) -> None:
    dtype = Call(Global("numpy", "dtype"), ("i4", False, True))
    made = (Global("numpy", "ndarray"), (0,), b"b")
    call = Call(
        Global("numpy._core.multiarray", "_reconstruct"), made, (1, shape, dtype, False, data)
    )
    with pytest.raises(CorruptError):
        load(dump_pickle(call)).value.numpy()


# ------------------------------------------------------------------ objects that aren't known


@dataclasses.dataclass
class Config:
    lr: float
    layers: list[int]


class Colour(enum.Enum):
    RED = 1


class Outer:
    class Nested:
        pass


class Slotted:
    __slots__ = ("a", "b")
    a: int
    b: int


class Items(list[int]):
    pass


class Table(dict[str, int]):
    pass


def test_unknown_classes_become_opaque_and_are_reported() -> None:
    slotted = Slotted()
    slotted.a, slotted.b = 1, 2
    items, table = Items([1, 2]), Table(x=3)
    value = [Config(0.1, [1]), slotted, items, table, datetime.date(2020, 1, 2), Colour.RED]
    for protocol in range(2, 6):
        found = load(pickle.dumps(value, protocol))
        config, slots, listed, mapped, date, _ = found.value
        assert all(isinstance(one, Opaque) for one in (config, slots, listed, mapped, date))
        assert config.fields == {"lr": 0.1, "layers": [1]}
        assert slots.fields == {"a": 1, "b": 2}
        assert listed.items == [1, 2]
        assert mapped.pairs == [("x", 3)]
        assert date.args == (b"\x07\xe4\x01\x02",)
        name = Config.__module__
        assert found.opaque[:4] == tuple(
            f"{name}.{c}" for c in ("Config", "Slotted", "Items", "Table")
        )
        assert "datetime.date" in found.opaque


def test_known_classes_become_what_the_caller_says() -> None:
    name = f"{Config.__module__}.Config"
    data = pickle.dumps({"c": Config(0.5, [])})
    record = load(data, known={name: Record}).value["c"]
    assert type(record) is Record
    assert record.qualname == name
    assert record.fields == {"lr": 0.5, "layers": []}
    assert load(data, known={name: Record}).opaque == ()
    called = pickle.dumps(datetime.timedelta(1, 2, 3))
    assert load(called, known={"datetime.timedelta": lambda *a: sum(a)}).value == 6


def test_newobj_ex_keeps_keywords() -> None:
    data = b"\x80\x04\x8c\x01m\x8c\x01C\x93K\x01\x85}\x8c\x01kK\x02s\x92."
    record = load(data).value
    assert (record.qualname, record.args, record.kwargs) == ("m.C", (1,), {"k": 2})


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_members_of_enums_and_nested_classes_are_names(protocol: int) -> None:
    by_name = b"\x80\x02c__builtin__\ngetattr\ncmod\nKind\nX\x03\0\0\0RED\x86R."
    found = load(by_name)
    assert issubclass(found.value, GlobalStub)
    assert found.value.qualname == "mod.Kind.RED"
    assert found.opaque == ("mod.Kind",)
    nested = load(pickle.dumps(Outer.Nested(), protocol)).value
    assert isinstance(nested, Opaque)
    assert nested.qualname.endswith(".Outer.Nested")


def test_records_can_be_keys() -> None:
    value = {datetime.date(2020, 1, 1): 1, datetime.date(2020, 1, 2): 2}
    found = load(pickle.dumps(value)).value
    assert [key.qualname for key in found] == ["datetime.date"] * 2
    assert list(found.values()) == [1, 2]


def test_objects_are_written_as_pickle_writes_them() -> None:
    name = Global(Config.__module__, "Config")
    value = {
        "new": NewObj(name, {"lr": 1.0, "layers": [3]}),
        "called": Call(Global("datetime", "timedelta"), (1, 2)),
        "name": Global("collections", "Counter"),
    }
    found = pickle.loads(dump_pickle({**value, "again": value["new"]}))
    assert found["new"] == Config(1.0, [3])
    assert found["again"] is found["new"]
    assert found["called"] == datetime.timedelta(1, 2)
    assert found["name"] is collections.Counter


# ------------------------------------------------------------------ nothing runs


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, reduced: tuple[Any, ...]) -> None:
        self.reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def evil_values(canary: Path) -> dict[str, tuple[Any, ...]]:
    code = f"open({str(canary)!r}, 'w').close()"
    return {
        "os.system": (vars(posix)["system"], (f"touch {canary}",)),
        "builtins.exec": (exec, (code,)),
        "builtins.eval": (eval, (code,)),
        "builtins.open": (open, (str(canary), "w")),
        "operator.call": (getattr, (Evil((__import__, ("os",))), "system")),
        "chain": (map, (exec, [code])),
        "state": (dict, (), Evil((exec, (code,)))),
        "items": (list, (), None, iter([Evil((exec, (code,)))])),
    }


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", evil_values(Path("x")))
def test_canaries(tmp_path: Path, name: str, protocol: int) -> None:
    canary = tmp_path / "canary"
    data = pickle.dumps([1, Evil(evil_values(canary)[name])], protocol)
    with pytest.raises(UnsafeError, match=r"dir/some\.pt: .*can run code") as caught:
        load(data)
    assert not canary.exists()
    assert caught.value.where == "dir/some.pt"
    if name in ("os.system", "builtins.exec", "builtins.open"):
        used = {"os.system": "posix.system", "builtins.open": "io.open"}.get(name, name)
        assert used in str(caught.value)
        pickle.loads(data)  # the canary does sing when it is let out
        assert canary.exists()


@pytest.mark.parametrize(
    "stream",
    [
        b"(S'{command}'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'{command}'\no.",  # OBJ
        b"cos\nsystem\n(S'{command}'\ntR.",
        b"\x80\x02(S'{command}'\niposix\nsystem\n.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93(S'{command}'\ntR.",  # STACK_GLOBAL
        b"\x80\x04\x8c\x02os\x8c\x06system\x93(S'{command}'\nt\x81.",  # NEWOBJ
    ],
)
def test_every_way_to_call(tmp_path: Path, stream: bytes) -> None:
    canary = tmp_path / "canary"
    data = stream.replace(b"{command}", f"touch {canary}".encode())
    with pytest.raises(UnsafeError, match=r"some\.pt.*(os|posix)\.system"):
        load(data)
    assert not canary.exists()
    if b"\x81" not in data:
        pickle.loads(data)
        assert canary.exists()


REFUSED = [
    "os.system", "posix.system", "nt.system", "sys.exit", "subprocess.Popen", "builtins.eval",
    "builtins.exec", "builtins.compile", "builtins.open", "builtins.__import__", "builtins.map",
    "__builtin__.eval", "importlib.import_module", "runpy.run_path", "shutil.rmtree",
    "socket.socket", "ctypes.CDLL", "pickle.loads", "_pickle.loads", "code.interact", "pty.spawn",
    "webbrowser.open", "commands.getoutput", "operator.attrgetter", "_operator.methodcaller",
    "functools.partial", "types.FunctionType", "codecs.decode", "_codecs.decode",
    "tempfile.mktemp", "asyncio.run", "multiprocessing.Process", "threading.Thread",
    "signal.alarm", "platform.popen", "http.client.HTTPConnection", "urllib.request.urlopen",
    "requests.get", "torch.hub.load", "torch.load", "torch.serialization.load", "torch.jit.load",
    "torch.package.PackageImporter", "torch._dynamo.optimize", "torch.utils.cpp_extension.load",
    "torch.storage._load_from_bytes", "numpy.load", "numpy.testing._private.utils.runstring",
    "pip.main", "setuptools.setup", "timeit.timeit", "pdb.run", "bdb.Bdb", "cProfile.run",
]  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_dangerous_names_are_refused_at_once(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    data = dump_pickle([Global(module, attribute)])
    with pytest.raises(UnsafeError, match=name.replace("__builtin__", "builtins")):
        load(data)


@pytest.mark.parametrize("name", ["oslo.Config", "mytypes.X", "torch.optim.adam.Adam", "sysx.y"])
def test_names_that_only_look_alike_are_not_refused(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert load(dump_pickle(Global(module, attribute))).opaque == (name,)


def test_dotted_names_are_never_followed() -> None:
    for module, name in (("collections", "OrderedDict.fromkeys"), ("torch", "Size.__class__")):
        data = b"\x80\x04\x8c%c%s\x8c%c%s\x93]K\x01a\x85R." % (
            len(module), module.encode(), len(name), name.encode(),
        )  # fmt: skip
        found = load(data)
        assert isinstance(found.value, Opaque)
        assert found.opaque == (f"{module}.{name}",)


@pytest.mark.parametrize(
    ("owner", "name"), [("x", "upper"), (1, "real"), ([], "append"), (b"x", "decode")]
)
def test_getattr_is_for_names_alone(owner: object, name: str) -> None:
    with pytest.raises(UnsafeError, match=r"builtins\.getattr"):
        load(dump_pickle(Call(Global("__builtin__", "getattr"), (owner, name))))


def test_getattr_on_a_result_is_refused() -> None:
    made = Call(Global("m", "f"), (1,))
    with pytest.raises(UnsafeError, match=r"builtins\.getattr"):
        load(dump_pickle(Call(Global("builtins", "getattr"), (made, "system"))))


def test_calling_through_getattr_stays_inert() -> None:
    class_call = b"\x80\x02c__builtin__\ngetattr\ncm\nC\nX\x06\0\0\0system\x86RK\x01\x85R."
    found = load(class_call)
    assert isinstance(found.value, Opaque)
    assert found.opaque == ("m.C", "m.C.system")


def test_a_pickle_cannot_change_our_classes() -> None:
    before = dict(vars(pickle_stubs.GlobalStub)), dict(vars(Record)), dict(vars(Opaque))
    for name in ("m\nC", "collections\nOrderedDict", "torch\nSize", "torch\nFloatStorage"):
        glob = b"\x80\x02c" + name.encode() + b"\n"
        for state in (b"}X\x01\0\0\0aK\x01s", b"N}X\x07\0\0\0__new__K\x01s\x86"):
            with pytest.raises(CorruptError, match=r"some\.pt"):
                load(glob + state + b"b.")
    assert before == (dict(vars(pickle_stubs.GlobalStub)), dict(vars(Record)), dict(vars(Opaque)))


def test_state_does_not_hide_the_methods_of_an_ordered_dict() -> None:
    state = {"items": 1, "_metadata": 2}
    value = load(dump_pickle(Call(Global("collections", "OrderedDict"), (), state))).value
    assert list(value.items()) == []


TENSOR = StoredTensor(StorageRef("0", "float32", 6), 0, (2, 3), (3, 1), "float32")


def test_a_pickle_cannot_change_a_tensor_or_storage() -> None:
    tensor = dump_pickle(TENSOR)[:-1]
    state = dump_pickle([StorageRef, 99][1:])[2:-1]
    for prefix in (
        tensor,
        b"\x80\x02(X\x07\0\0\0storagectorch\nByteStorage\nX\x01\0\0\x000h\0K\x04tQ",
    ):
        with pytest.raises(CorruptError):
            load(prefix + state + b"b.")


def test_calling_the_result_of_a_call_is_an_error() -> None:
    for made in (b"cm\nC\n)R", b"cm\nC\n)\x81", b"K\x01", b"X\x01\0\0\0x", b"ctorch\nint8\n"):
        with pytest.raises(CorruptError):
            load(b"\x80\x02" + made + b")R.")


def test_extension_codes_and_buffers_are_refused() -> None:
    copyreg.add_extension("os", "system", 0xF1)
    try:
        for stream in (b"\x80\x02\x82\xf1.", b"\x80\x02\x83\xf1\0.", b"\x80\x05\x97."):
            with pytest.raises(CorruptError, match="an opcode"):
                load(stream)
    finally:
        copyreg.remove_extension("os", "system", 0xF1)


@pytest.mark.parametrize(
    "stream",
    [b"\x80\x02K\x01Q.", b"\x80\x02X\x01\0\0\0aQ.", b"\x80\x02)Q.", b"Pname\n."],
)
def test_other_persistent_ids_are_errors(stream: bytes) -> None:
    with pytest.raises(CorruptError, match=r"some\.pt"):
        load(stream)


def test_a_caller_can_read_persistent_ids() -> None:
    assert load(b"\x80\x02K\x07Q.", persistent_load=lambda pid: pid + 1).value == 8


def test_codecs_encode_is_for_bytes_alone() -> None:
    for encoding in ("zlib", "rot13", "idna", 3):
        with pytest.raises(UnsafeError, match="encode"):
            load(dump_pickle(Call(Global("_codecs", "encode"), ("x", encoding))))


# ------------------------------------------------------------------ damage and bombs


def nested(opens: bytes, closes: bytes, depth: int) -> bytes:
    return b"\x80\x02" + opens * depth + closes * depth + b"."


BOMBS: dict[str, bytes] = {
    "memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "text memo": b"Np2147483646\n.",
    "long text": b"\x80\x02X\xff\xff\xff\x7fabc.",
    "long bytes": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f" + b".",
    "bytearray 8": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",
    "bytes of a count": dump_pickle(Call(Global("builtins", "bytearray"), (1 << 40,))),
    "bytes of a count, too": dump_pickle(Call(Global("builtins", "bytes"), (1 << 40,))),
    "list of a range": dump_pickle(
        Call(Global("builtins", "list"), (Call(Global("builtins", "range"), (1 << 40,)),))
    ),
    "deep lists": nested(b"]", b"a", 5000)[:-2] + b".",
    "deep tuples": b"\x80\x02)" + b"\x85" * 5000 + b".",
    "itself": b"\x80\x02]q\x00h\x00a.",
    "laughs": b"\x80\x02]q\x00" + b"".join(
        b"(h%ch%clq%c" % (i, i, i + 1) for i in range(100)
    ) + b".",
    "wide": b"\x80\x02](" + b"N" * 20000 + b"eq\x00](" + b"h\x00" * 20000 + b"e.",
    "copies": b"\x80\x02cbuiltins\nlist\nq\x00]q\x01(" + b"N" * 20000 + b"e\x85q\x020"
    + b"h\x00h\x02R0" * 20000 + b"N.",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_errors(name: str) -> None:
    with pytest.raises(CorruptError, match=r"some\.pt"):
        load(BOMBS[name])


@pytest.mark.parametrize(
    "stream",
    [
        b"", b".", b"\x80", b"\x80\x02", b"\x80\x06N.", b"\x80\x02N", b"\x80\x02NN", b"N.N",
        b"\x80\x02h\x07.", b"\x80\x02g7\n.", b"\x80\x02(.", b"\x80\x02N0.", b"\x80\x02}]Ns.",
        b"\x80\x02cm\n", b"\x80\x02cm\nC", b"\x80\x02R.", b"\x80\x02X\x02\0\0\0\xff\xff.",
        b"\x80\x02K", b"\x80\x02\x8a\x05abc.", b"Ix\n.", b"Fx\n.", b"S'x\n.", b"V\\ud8\n.",
        b"\x80\x02\xff.", b"L" + b"9" * 5000 + b"L\n.", b"\x80\x02cm\nC\nK\x01R.", b"pxx\nN.",
        b"\x80\x02U\x01\xff.", b"garbage", b"\x00" * 100,
    ],
)  # fmt: skip
def test_bad_streams_are_errors_with_the_file(stream: bytes) -> None:
    with pytest.raises(CorruptError, match=r"dir/some\.pt"):
        load(stream)


SAMPLE = [
    pickle.dumps({"a": [Config(0.1, [1, 2]), b"xyz", {"k": (1, 2.5, "text")}, {1, 2}]}, protocol)
    for protocol in range(6)
] + [
    dump_pickle({"t": TENSOR, "s": Size((1, 2)), "o": collections.OrderedDict(a=TENSOR)}),
    pickle.dumps({"a": ARRAYS, "s": np.float32(1)}),
]


@given(st.sampled_from(SAMPLE), st.data())
def test_random_damage_gives_our_errors_or_a_value(data: bytes, draw: st.DataObject) -> None:
    damaged = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 4))):
        at = draw.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = draw.draw(st.integers(0, 255))
    try:
        load(bytes(damaged))
    except ReshardError as error:
        found = str(error)
    else:
        return
    assert "some.pt" in found


@given(st.binary(max_size=60))
def test_random_opcodes_give_our_errors_or_a_value(data: bytes) -> None:
    try:
        load(b"\x80\x04" + data + b".")
    except ReshardError as error:
        found = str(error)
    else:
        return
    assert "some.pt" in found


def test_every_truncation_is_an_error() -> None:
    for data in SAMPLE:
        for end in range(len(data)):
            with pytest.raises(CorruptError):
                load(data[:end])


# ------------------------------------------------------------------ tensors


def rebuild(**changes: Any) -> bytes:
    """Write the call of ``_rebuild_tensor_v2`` for TENSOR, with some arguments changed."""
    fields: dict[str, Any] = dict(
        kind="FloatStorage", key="0", numel=6, offset=0, shape=(2, 3), strides=(3, 1), grad=False
    )
    fields.update(changes)

    def body(value: object) -> bytes:
        return dump_pickle(value)[2:-1].replace(b"q\0", b"").replace(b"q\1", b"")

    storage = b"(" + body("storage") + body(Global("torch", fields["kind"]))
    storage += body(fields["key"]) + body("cpu") + body(fields["numel"]) + b"tQ"
    rest = (body(fields[name]) for name in ("offset", "shape", "strides", "grad"))
    extra = body(fields["metadata"]) if "metadata" in fields else b""
    call = body(Global("torch._utils", "_rebuild_tensor_v2")) + b"(" + storage
    return b"\x80\x02" + call + b"".join(rest) + b"N" + extra + b"tR."


def test_a_tensor_is_what_the_call_says() -> None:
    found = load(rebuild())
    assert found.value == TENSOR
    assert found.storages == {"0": TENSOR.storage}
    assert load(rebuild(metadata={"conj": False})).value == TENSOR


@pytest.mark.parametrize(
    "changes",
    [
        dict(numel=5), dict(offset=1), dict(strides=(4, 1)), dict(shape=(2, 4)), dict(offset=-1),
        dict(shape=(-2, 3)), dict(strides=(-3, 1)), dict(shape=(2,)), dict(shape=(2.0, 3)),
        dict(shape=(True, 3)), dict(offset=None), dict(key=3), dict(numel=-1), dict(numel="6"),
        dict(grad=1), dict(shape=None), dict(shape=(1 << 70, 1 << 70)), dict(numel=6.0),
    ],
    ids=str,
)  # fmt: skip
def test_a_tensor_outside_its_storage_is_corrupt(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptError, match=r"dir/some\.pt"):
        load(rebuild(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        dict(metadata={"conj": True}), dict(metadata={"neg": True}), dict(kind="QInt8Storage"),
        dict(kind="ComplexHalfStorage"), dict(shape=(1,) * 65, strides=(1,) * 65),
    ],
    ids=str,
)  # fmt: skip
def test_a_tensor_that_we_cannot_read_right_is_unsupported(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"dir/some\.pt"):
        load(rebuild(**changes))


def test_one_storage_has_one_size() -> None:
    one, other = rebuild()[2:-1], rebuild(numel=7)[2:-1]
    with pytest.raises(CorruptError, match="24 bytes and 28"):
        load(b"\x80\x02" + one + other + b"\x86.")
    with pytest.raises(ValueError, match="one storage"):
        dump_pickle([TENSOR, dataclasses.replace(TENSOR, storage=StorageRef("0", "float32", 7))])


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=4),
    st.integers(0, 20),
    st.integers(0, 60),
)
def test_extents_agree_with_torch(dims: list[tuple[int, int]], offset: int, numel: int) -> None:
    torch = pytest.importorskip("torch")
    shape, strides = tuple(d for d, _ in dims), tuple(s for _, s in dims)
    # torch grows a storage that is too small; one that stays as it is was large enough
    storage = torch.UntypedStorage(2 * numel)
    view = torch.empty(0, dtype=torch.int16).set_(storage, offset, shape, strides)
    fits = storage.nbytes() == 2 * numel
    ref = StorageRef("0", "int16", numel)
    if not fits:
        with pytest.raises(CorruptError):
            StoredTensor(ref, offset, shape, strides, "int16")
        return
    tensor = StoredTensor(ref, offset, shape, strides, "int16")
    assert tensor.numel == view.numel()
    assert tensor.contiguous == view.is_contiguous()


def test_errors_of_a_known_factory_name_the_file() -> None:
    def fail(*args: object) -> object:
        raise CorruptError("a made-up problem")

    def crash(*args: object) -> object:
        raise AttributeError("a bug or a bad argument")

    for factory in (fail, crash):
        with pytest.raises(CorruptError, match=r"dir/some\.pt"):
            load(dump_pickle(Call(Global("m", "f"))), known={"m.f": factory})
