"""What do the names that every checkpoint may use stand for?

Tables from ``"module.name"`` to functions that make something inert or plain from the arguments in
a pickle: torch's tensors, Python's containers and numbers, paths. They trust none of their
arguments. Sources: torch 2.13, ``torch/_utils.py`` and ``torch/_tensor.py``; Python's ``pickle``
and ``_compat_pickle``; numpy's ``multiarray`` and ``numeric``.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from reshard.errors import CorruptError, UnsafeError, UnsupportedError
from reshard.pickle_scan import BadPickleError
from reshard.pickle_stubs import GlobalStub, Opaque, OrderedMapping, Record, StoredArray
from reshard.stored import DEVICE, STORAGE_CLASS, Device, Size, StorageRef, StoredTensor, brief

Factory = Callable[..., object]


@dataclass(frozen=True, slots=True)
class StorageType:
    """A ``torch.FloatStorage`` and so on: the type of a storage's elements."""

    dtype: str

    def __setstate__(self, state: object) -> None:
        raise CorruptError("a pickle tries to change a class")


STORAGES: Final = {name: dtype for dtype, name in STORAGE_CLASS.items()} | {
    "UntypedStorage": "uint8"
}


def _tensor_v2(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    requires_grad: Any,
    hooks: object = None,
    metadata: object = None,
) -> StoredTensor:
    if not isinstance(storage, StorageRef):
        raise CorruptError(f"a tensor lies in {brief(storage)}, not in a storage")
    return _tensor_v3(
        storage, offset, shape, strides, requires_grad, hooks, storage.dtype, metadata
    )


def _tensor_v3(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    requires_grad: Any,
    hooks: object,
    dtype: Any,
    metadata: object = None,
) -> StoredTensor:
    if metadata and (not isinstance(metadata, dict) or any(metadata.values())):
        raise UnsupportedError(
            f"a tensor is stored with {brief(metadata)}: its values aren't the stored ones",
            hint="save it again after tensor.resolve_conj() or tensor.resolve_neg()",
        )
    if not isinstance(dtype, str):
        raise UnsupportedError(f"a tensor has the dtype {brief(dtype)}")
    return StoredTensor(storage, offset, tuple(shape), tuple(strides), str(dtype), requires_grad)


def _tensor_v1(storage: Any, offset: Any, shape: Any, strides: Any) -> StoredTensor:
    return _tensor_v2(storage, offset, shape, strides, False)


def _parameter(data: Any, requires_grad: Any = True, *_: object) -> object:
    if isinstance(data, StoredTensor):
        return dataclasses.replace(data, requires_grad=requires_grad)
    return Opaque("torch.nn.parameter.Parameter", (data, requires_grad))


def _from_type(make: Any, kind: Any, args: Any, state: Any) -> object:
    """Give the tensor inside a subclass or one with attributes; those are dropped."""
    if not (isinstance(make, type) and issubclass(make, GlobalStub)):
        raise CorruptError(f"a tensor is rebuilt by {brief(make)}")
    inner = make(*args)
    if isinstance(inner, StoredTensor):
        return inner
    record = Opaque(getattr(kind, "qualname", brief(kind)), args)
    record.state = state
    return record


def _layout(name: Any) -> str:
    if not isinstance(name, str):
        raise CorruptError(f"a layout is {brief(name)}")
    return name


def _device(kind: Any, index: Any = None) -> Device:
    if isinstance(kind, str) and isinstance(index, int | None):
        found = kind if index is None else f"{kind}:{index}"
        if DEVICE.fullmatch(found):
            return Device(found)
    raise CorruptError(f"a device is {brief(kind)}, {brief(index)}")


# ---------------------------------------------------------------------------- plain Python

_Plain = TypeVar("_Plain")
SIZED: Final = (list, tuple, dict, set, frozenset, str, bytes, bytearray)


def _copy_of(kind: Callable[..., _Plain]) -> Callable[..., _Plain]:
    """``kind()`` or ``kind(value)`` of values already there: no counts, no iterators."""

    def make(*args: Any) -> _Plain:
        if len(args) > 1 or not all(isinstance(arg, SIZED) for arg in args):
            raise BadPickleError(f"{kind} is called with {brief(args)}")
        return kind(*args)

    return make


def _number_of(kind: Callable[..., _Plain]) -> Callable[..., _Plain]:
    def make(*args: Any) -> _Plain:
        if len(args) > 3 or not all(isinstance(arg, int | float | None) for arg in args):
            raise BadPickleError(f"{kind} is called with {brief(args)}")
        return kind(*args)

    return make


def _encode(text: Any, encoding: Any = "utf-8") -> bytes:
    """``_codecs.encode``: how bytes are written at protocol 2."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1", "utf-8", "ascii"):
        raise UnsafeError(f"the pickle asks for _codecs.encode(..., {brief(encoding)})")
    return text.encode(encoding)


def _bytearray(data: Any = b"", encoding: Any = None) -> bytearray:
    return bytearray(data if encoding is None else _encode(data, encoding))


def _path_of(kind: type[pathlib.PurePath]) -> Factory:
    """Join the parts of a path as its own system does; nothing is looked up on a disk."""

    def make(*parts: Any) -> str:
        return str(kind(*parts))

    return make


def _size(sizes: Any = ()) -> Size:
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise CorruptError(f"a torch.Size is {brief(sizes)}")
    return Size(sizes)


def _frombuffer(data: Any, dtype: Any, shape: Any, order: Any) -> StoredArray:
    array = StoredArray("numpy.core.numeric._frombuffer")
    array.state = (1, shape, dtype, order == "F", data)
    return array


#: Names of modules and globals in old or newer versions, and what they are called here.
RENAMED: Final = {
    "__builtin__": "builtins",
    "builtins.long": "builtins.int",
    "builtins.unicode": "builtins.str",
    "builtins.xrange": "builtins.range",
    "copy_reg": "copyreg",
    "numpy._core.multiarray": "numpy.core.multiarray",
    "numpy._core.numeric": "numpy.core.numeric",
    "pathlib._local": "pathlib",
    "torch.tensor": "torch._tensor",
}
#: Harmless as names of types; made into an Opaque, and reported, only if the pickle calls them.
TYPES: Final = frozenset(("builtins.object", "builtins.str", "numpy.ndarray", "torch.Tensor"))
#: Made by copying what is given, which is counted.
COPYING: Final[Mapping[str, Factory]] = {
    "_codecs.encode": _encode,
    "builtins.bytes": _copy_of(bytes),
    "builtins.bytearray": _bytearray,
    "builtins.dict": _copy_of(dict),
    "builtins.frozenset": _copy_of(frozenset),
    "builtins.list": _copy_of(list),
    "builtins.set": _copy_of(set),
    "builtins.tuple": _copy_of(tuple),
    "collections.OrderedDict": _copy_of(OrderedMapping),
    "torch.Size": _size,
}
PLAIN: Final[Mapping[str, Factory]] = {
    "argparse.Namespace": Record,
    "builtins.bool": _number_of(bool),
    "builtins.complex": _number_of(complex),
    "builtins.float": _number_of(float),
    "builtins.int": _number_of(int),
    "builtins.range": _number_of(range),
    "builtins.slice": _number_of(slice),
    "numpy.core.multiarray._reconstruct": StoredArray,
    "numpy.core.numeric._frombuffer": _frombuffer,
    "pathlib.Path": _path_of(pathlib.PurePosixPath),
    "pathlib.PosixPath": _path_of(pathlib.PurePosixPath),
    "pathlib.PurePath": _path_of(pathlib.PurePosixPath),
    "pathlib.PurePosixPath": _path_of(pathlib.PurePosixPath),
    "pathlib.PureWindowsPath": _path_of(pathlib.PureWindowsPath),
    "pathlib.WindowsPath": _path_of(pathlib.PureWindowsPath),
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_tensor": _tensor_v1,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch.device": _device,
    "torch.nn.parameter.Parameter": _parameter,
    "torch.serialization._get_layout": _layout,
}
