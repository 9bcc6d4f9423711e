"""How is a value written as the pickle that torch reads?

A small emitter of pickle protocol 2, the one that ``torch.save`` writes and ``torch.load`` expects
(with ``weights_only=True`` too, as far as the value allows that). It knows plain data, tensors and
a few explicit building blocks; anything else is a ``TypeError``, never a guess.

The bytes depend on the value alone: equal strings are shared by their text, lists and dicts by
identity (as in Python's own pickles), the elements of a set are sorted by their pickled bytes, and
tuples are written out each time.

The opcodes are those of ``pickletools``; the shape of tensors is that of torch 2.13,
``torch._tensor.Tensor._reduce_ex_internal`` and ``torch.serialization._save``.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from reshard.pickle_stubs import StoredArray
from reshard.stored import (
    STORAGE_CLASS,
    Device,
    DTypeName,
    Size,
    StorageRef,
    StoredTensor,
    contiguous_strides,
)

__all__ = [
    "Call",
    "Global",
    "NewObj",
    "StorageRef",
    "StoredTensor",
    "contiguous_strides",
    "dump_pickle",
]


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function, by its name.

    Parameters
    ----------
    module, name
        Without newlines: the reader imports ``module`` and takes ``name`` from it.
    """

    module: str
    name: str

    def __post_init__(self) -> None:
        for text in (self.module, self.name):
            assert text, "a global without a name"
            assert "\n" not in text, f"no name of a module or class: {text!r}"


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """An object made by calling ``target(*args)``, then given ``state`` unless that is ``None``."""

    target: Global
    args: tuple[object, ...] = ()
    state: object = None


@dataclass(frozen=True, slots=True, eq=False)
class NewObj:
    """An object as pickle writes one: ``target.__new__(target, *args)``, then its ``state``."""

    target: Global
    state: object = None
    args: tuple[object, ...] = ()


def dump_pickle(value: object, *, storages: Mapping[str, int] | None = None) -> bytes:
    """Write a value as a pickle of protocol 2.

    Parameters
    ----------
    value
        ``None``, ``bool``, ``int``, ``float``, ``str``, ``bytes``, ``list``, ``tuple``, ``dict``,
        ``set``, ``OrderedDict``, numpy scalars, :class:`Global`, :class:`Call`, :class:`NewObj`,
        :class:`StoredTensor`, ``Size``, ``DTypeName``, ``Device`` and ``StoredArray``, nested.
        Subclasses of the plain types are not taken for them.
    storages
        Bytes of each storage that tensors may lie in, by key; by default any.

    Returns
    -------
    bytes
        The same for the same value.

    Raises
    ------
    TypeError
        Something else is in it.
    ValueError
        Two tensors give one storage different types or sizes, or one isn't in ``storages``.
    """
    emitter = _Emitter()
    emitter.emit(value)
    if storages is not None:
        for key, storage in emitter.storages.items():
            if storages.get(key) != storage.nbytes:
                raise ValueError(f"{storage} is a storage of {storages.get(key)} bytes")
    return b"\x80\x02" + bytes(emitter.out) + b"."


@dataclass(slots=True)
class _Emitter:
    out: bytearray = field(default_factory=bytearray)
    memo: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    storages: dict[str, StorageRef] = field(default_factory=dict[str, StorageRef])
    alive: list[object] = field(default_factory=list[object])

    def emit(self, value: object) -> None:
        emit = _EMITTERS.get(type(value))
        if emit is not None:
            emit(self, value)
        elif isinstance(value, OrderedDict):
            self.dictionary(value, lambda: self.call(_ORDERED_DICT))
        elif isinstance(value, np.generic):
            array = np.asarray(value)
            self.call(_ARRAY_SCALAR, _array_dtype(array.dtype), array.tobytes())
        else:
            raise TypeError(f"can't write a {type(value)} into a pickle")

    # ------------------------------------------------------------------ memo

    def shared(self, key: Hashable) -> bool:
        """Write a reference to what is in the memo; say whether it was there."""
        index = self.memo.get(key)
        if index is None:
            return False
        self.out += b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)
        return True

    def remember(self, key: Hashable) -> None:
        """Put the object that was just made into the memo."""
        index = self.memo[key] = len(self.memo)
        self.out += b"q" + bytes([index]) if index < 256 else b"r" + struct.pack("<I", index)

    def same(self, value: object) -> bool:
        """As :meth:`shared`, for an object that is the same only as itself."""
        self.alive.append(value)  # its id must not be used again
        return self.shared(("id", id(value)))

    # ------------------------------------------------------------------ plain data

    def none(self, value: None) -> None:
        self.out += b"N"

    def boolean(self, value: bool) -> None:
        self.out += b"\x88" if value else b"\x89"

    def integer(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self.out += b"K" + bytes([value])
        elif 0 <= value < 1 << 16:
            self.out += b"M" + struct.pack("<H", value)
        elif -(1 << 31) <= value < 1 << 31:
            self.out += b"J" + struct.pack("<i", value)
        else:
            count = value.bit_length() // 8 + 1
            self.out += b"\x8a" + bytes([count]) if count < 256 else b"\x8b" + _u32(count)
            self.out += value.to_bytes(count, "little", signed=True)

    def floating(self, value: float) -> None:
        self.out += b"G" + struct.pack(">d", value)

    def text(self, value: str) -> None:
        if not self.shared(("str", value)):
            data = value.encode("utf-8", "surrogatepass")
            self.out += b"X" + _u32(len(data)) + data
            self.remember(("str", value))

    def binary(self, value: bytes) -> None:
        # Protocol 2 has no bytes: this is how Python itself writes them there.
        self.call(Global("_codecs", "encode"), value.decode("latin1"), "latin1")

    def plain_tuple(self, value: tuple[object, ...]) -> None:
        if len(value) > 3:
            self.out += b"("
        for one in value:
            self.emit(one)
        self.out += (b")", b"\x85", b"\x86", b"\x87")[len(value)] if len(value) <= 3 else b"t"

    def plain_list(self, value: list[object]) -> None:
        if self.same(value):
            return
        self.out += b"]"
        self.remember(("id", id(value)))
        if value:
            self.out += b"("
            for one in value:
                self.emit(one)
            self.out += b"e"

    def plain_dict(self, value: dict[object, object]) -> None:
        self.dictionary(value, lambda: self.out.extend(b"}"))

    def dictionary(self, value: dict[object, object], begin: Callable[[], object]) -> None:
        if self.same(value):
            return
        begin()
        self.remember(("id", id(value)))
        if value:
            self.out += b"("
            for key, one in value.items():
                self.emit(key)
                self.emit(one)
            self.out += b"u"

    def plain_set(self, value: set[object]) -> None:
        self.call(Global("builtins", "set"), sorted(value, key=dump_pickle))

    # ------------------------------------------------------------------ objects

    def glob(self, value: Global) -> None:
        if not self.shared(value):
            self.out += b"c" + value.module.encode() + b"\n" + value.name.encode() + b"\n"
            self.remember(value)

    def call(self, target: Global, *args: object) -> None:
        """Write the call of a function."""
        self.glob(target)
        self.plain_tuple(args)
        self.out += b"R"

    def made(self, value: Call | NewObj) -> None:
        if self.same(value):
            return
        self.glob(value.target)
        self.plain_tuple(value.args)
        self.out += b"R" if isinstance(value, Call) else b"\x81"
        self.remember(("id", id(value)))
        if value.state is not None:
            self.emit(value.state)
            self.out += b"b"

    def size(self, value: Size) -> None:
        self.call(Global("torch", "Size"), tuple(value))

    def dtype(self, value: DTypeName) -> None:
        self.glob(Global("torch", str(value)))

    def device(self, value: Device) -> None:
        kind, _, index = str(value).partition(":")
        self.call(Global("torch", "device"), kind, *([int(index)] if index else []))

    def array(self, value: StoredArray) -> None:
        array = value.numpy()
        fortran = array.flags.f_contiguous and not array.flags.c_contiguous
        state = (1, array.shape, _array_dtype(array.dtype), fortran, array.tobytes("A"))
        made = (Global("numpy", "ndarray"), (0,), b"b")
        self.emit(Call(Global("numpy.core.multiarray", "_reconstruct"), made, state))

    # ------------------------------------------------------------------ tensors

    def tensor(self, value: StoredTensor) -> None:
        storage = value.storage
        typed = value.dtype in STORAGE_CLASS and value.dtype == storage.dtype
        self.glob(_TENSOR_V2 if typed else _TENSOR_V3)
        self.out += b"("
        self.storage(storage, STORAGE_CLASS[storage.dtype] if typed else None)
        self.emit(value.offset)
        self.plain_tuple(value.shape)
        self.plain_tuple(value.strides)
        self.boolean(value.requires_grad)
        self.call(_ORDERED_DICT)  # backward hooks, which torch never saves
        if not typed:
            self.dtype(DTypeName(value.dtype))
        self.out += b"tR"

    def storage(self, value: StorageRef, kind: str | None) -> None:
        """Write a storage's persistent id; without a class, as an untyped storage."""
        if kind is None:
            value = StorageRef(value.key, "uint8", value.nbytes, value.device)
        if self.storages.setdefault(value.key, value) != value:
            raise ValueError(f"{self.storages[value.key]} and {value} are one storage")
        module = "torch" if kind else "torch.storage"
        self.out += b"("
        self.text("storage")
        self.glob(Global(module, kind or "UntypedStorage"))
        self.text(value.key)
        self.text(value.device)
        self.integer(value.numel)
        self.out += b"tQ"


def _u32(value: int) -> bytes:
    return struct.pack("<I", value)


def _array_dtype(dtype: np.dtype[Any]) -> Call:
    """Give a plain numpy type as numpy pickles it."""
    code = dtype.str[1:]
    width = dtype.itemsize if dtype.kind in "SU" else -1
    align = dtype.alignment if dtype.kind in "SU" else -1
    order = dtype.str[0]
    state = (3, order, None, None, None, width, align, 0)
    return Call(Global("numpy", "dtype"), (code, False, True), state)


_ORDERED_DICT: Final = Global("collections", "OrderedDict")
_ARRAY_SCALAR: Final = Global("numpy.core.multiarray", "scalar")
_TENSOR_V2: Final = Global("torch._utils", "_rebuild_tensor_v2")
_TENSOR_V3: Final = Global("torch._utils", "_rebuild_tensor_v3")
_EMITTERS: Final[dict[type, Callable[[_Emitter, Any], None]]] = {
    type(None): _Emitter.none,
    bool: _Emitter.boolean,
    int: _Emitter.integer,
    float: _Emitter.floating,
    str: _Emitter.text,
    bytes: _Emitter.binary,
    tuple: _Emitter.plain_tuple,
    list: _Emitter.plain_list,
    dict: _Emitter.plain_dict,
    set: _Emitter.plain_set,
    Global: _Emitter.glob,
    Call: _Emitter.made,
    NewObj: _Emitter.made,
    Size: _Emitter.size,
    DTypeName: _Emitter.dtype,
    Device: _Emitter.device,
    StoredArray: _Emitter.array,
    StoredTensor: _Emitter.tensor,
}
