"""What does a pickle in a checkpoint say, without running anything that it asks for?

The boundary is one method: :meth:`_Unpickler.find_class` never imports and never gives anything
but our own inert stand-ins. A tensor becomes a :class:`~reshard.stored.StoredTensor`, plain
containers and numbers become themselves, every other class becomes a :class:`Record` of what the
pickle says about it. Whatever opcodes follow can only call these stand-ins.

A name has one of four fates, in this order: the caller *knows* it (``known``); it is in the tables
of plain, numpy and torch names (:mod:`reshard.pickle_table`); it is refused with
:class:`UnsafeError` (:mod:`reshard.pickle_refused`, a matter of honesty, not the boundary); or it
becomes an :class:`Opaque`, listed in the result so that it can be reported.

The layout of torch's pickles is that of torch 2.13, ``torch/_utils.py`` and
``torch/serialization.py``; ``builtins.getattr`` is how Python pickles a nested class or an
enum's member at protocol 2, and is taken as that alone: it gives a name, a :class:`GlobalStub`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from reshard.dtypes import BY_TORCH
from reshard.errors import CorruptError, ReshardError, UnsafeError, UnsupportedError
from reshard.pickle_refused import is_refused
from reshard.pickle_scan import BadPickleError, check_tree, scan
from reshard.pickle_stubs import (
    ArrayDType,
    GlobalStub,
    Opaque,
    Record,
    StoredArray,
    array_scalar,
    global_stub,
)
from reshard.pickle_table import (
    COPYING,
    PLAIN,
    RENAMED,
    SIZED,
    STORAGES,
    TYPES,
    Factory,
    StorageType,
)
from reshard.stored import Device, DTypeName, Size, StorageRef, StoredTensor, brief

__all__ = [
    "Device",
    "DTypeName",
    "GlobalStub",
    "Opaque",
    "PickleResult",
    "Record",
    "Size",
    "StorageRef",
    "StoredArray",
    "StoredTensor",
    "load_pickle",
]


@dataclass(frozen=True, slots=True)
class PickleResult:
    """What a pickle holds.

    Attributes
    ----------
    value
        The value: a finite tree, so that code may recurse into everything but an ``Opaque``.
    opaque
        ``"module.name"`` of all globals that nobody knows, in the order they were met.
    storages
        The storages that it refers to, by key.
    """

    value: Any
    opaque: tuple[str, ...] = ()
    storages: Mapping[str, StorageRef] = field(default_factory=dict[str, StorageRef])


def load_pickle(
    data: bytes,
    *,
    where: str,
    known: Mapping[str, Factory] | None = None,
    persistent_load: Callable[[Any], object] | None = None,
) -> PickleResult:
    """Load a pickle of any protocol without running anything that it names.

    Parameters
    ----------
    data
        One whole pickle.
    where
        The file (and member) that it comes from, for messages.
    known
        ``"module.name"`` → what to make of it. A subclass of :class:`Record` is called with the
        name, the positional and the keyword arguments; anything else with the arguments alone. It
        must be safe for any arguments, and what it returns must be a ``Record`` or a value that a
        pickle's BUILD can't change.
    persistent_load
        What to make of a persistent id; by default torch's storages.

    Returns
    -------
    PickleResult
        The value, the unknown globals, the storages.

    Raises
    ------
    UnsafeError
        It names something that can run code.
    CorruptError
        It is damaged, a tensor lies outside its storage, or it is made to exhaust memory.
    UnsupportedError
        A tensor of an unknown type, or one that is stored conjugated or negated.
    """
    unpickler = _Unpickler(data, where, known or {}, persistent_load)
    try:
        scan(data)
        value = unpickler.load()
        # what is in an Opaque is nobody's business
        check_tree(value, (Record,), (Opaque,), most=1_000_000 + 8 * len(data))
    except ReshardError as error:
        if error.where is not None:
            raise
        raise type(error)(error.what, where=where, hint=error.hint) from error
    except BadPickleError as error:
        raise CorruptError(f"the pickle is damaged: {error}", where=where) from error
    # Whatever goes wrong while an arbitrary stream is decoded means that the stream is bad.
    except Exception as error:
        detail = f"{type(error).__name__}: {error!s:.200}"
        raise CorruptError(f"the pickle is damaged: {detail}", where=where) from error
    return PickleResult(value, tuple(unpickler.opaque), unpickler.storages)


class _Unpickler(pickle.Unpickler):
    """CPython's unpickler with its two doors to the outside closed."""

    def __init__(
        self,
        data: bytes,
        where: str,
        known: Mapping[str, Factory],
        persistent_load: Callable[[Any], object] | None,
    ) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self.where = where
        self.known = known
        self.opaque: dict[str, None] = {}
        self.storages: dict[str, StorageRef] = {}
        self._globals: dict[tuple[str, str], object] = {}
        self._persistent = persistent_load or self._storage
        self._copies_left = 4096 + 8 * len(data)

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        key = module_name, global_name
        found = self._globals.get(key)
        if found is None:
            found = self._globals[key] = self._resolve(module_name, global_name)
        return found

    def persistent_load(self, pid: Any) -> Any:
        return self._persistent(pid)

    def _resolve(self, module: str, name: str) -> object:
        plain_name = f"{RENAMED.get(module, module)}.{name}"
        plain_name = RENAMED.get(plain_name, plain_name)
        for qualname in (f"{module}.{name}", plain_name):
            factory = self.known.get(qualname)
            if factory is not None:
                return global_stub(qualname, factory)
        if module in ("torch", "torch.cuda", "torch.storage"):
            if name in STORAGES:
                return StorageType(STORAGES[name])
            if module == "torch" and name in BY_TORCH:
                return DTypeName(name)
        if plain_name in _METHODS:
            return global_stub(plain_name, getattr(self, _METHODS[plain_name]))
        if plain_name in COPYING:
            return global_stub(plain_name, self._counted(COPYING[plain_name]))
        if plain_name in PLAIN:
            return global_stub(plain_name, PLAIN[plain_name])
        if plain_name in TYPES:
            return global_stub(plain_name, self._noted(plain_name))
        if is_refused(plain_name):
            raise UnsafeError(
                f"the pickle asks for {brief(plain_name)}, which can run code or reach outside",
                where=self.where,
                hint="nothing was run; a checkpoint that names it shouldn't be trusted",
            )
        self.opaque[plain_name] = None
        return global_stub(plain_name, Opaque)

    def _storage(self, pid: Any) -> StorageRef:
        """Make the storage of torch's id ``("storage", class, key, device, numel)``."""
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] not in ("storage", b"storage"):
            raise CorruptError(f"a persistent id {brief(pid)} isn't that of a storage")
        _, kind, key, device, numel = pid
        if not isinstance(kind, StorageType):
            raise UnsupportedError(f"a storage of the class {brief(kind)}")
        found = StorageRef(key, kind.dtype, numel, device)
        first = self.storages.setdefault(found.key, found)
        if first.nbytes != found.nbytes:
            raise CorruptError(
                f"storage {brief(key)} has {first.nbytes} bytes and {found.nbytes} bytes"
            )
        return found

    def _counted(self, factory: Factory) -> Factory:
        """Bound what a factory copies: a few opcodes could copy a long list again and again."""

        def call(*args: Any) -> object:
            for arg in args:
                self._copies_left -= len(arg) if isinstance(arg, SIZED) else 1
            if self._copies_left < 0:
                raise BadPickleError("it copies the same values again and again")
            return factory(*args)

        return call

    def _noted(self, qualname: str) -> Factory:
        def call(*args: Any, **kwargs: Any) -> Opaque:
            self.opaque[qualname] = None
            return Opaque(qualname, args, kwargs)

        return call

    def _member(self, owner: object, name: object) -> object:
        """Take ``getattr(Class, "Name")`` as a name: of a nested class, or an enum's member."""
        named = isinstance(name, str) and name.isidentifier()
        if not named or not isinstance(owner, type) or not issubclass(owner, GlobalStub):
            raise UnsafeError(
                f"the pickle asks for builtins.getattr({brief(owner)}, {brief(name)})",
                hint="nothing was run; a checkpoint that does so shouldn't be trusted",
            )
        qualname = f"{owner.qualname}.{name}"
        found = self._globals.get(("getattr", qualname))
        if found is None:
            found = global_stub(qualname, self.known.get(qualname) or self._noted(qualname))
            self._globals["getattr", qualname] = found
        return found

    def _array_dtype(self, *args: Any) -> ArrayDType:
        dtype = ArrayDType("numpy.dtype", args)
        if dtype.numpy() is None:
            code = args[0] if args else None
            self.opaque[f"numpy.dtype({brief(code)})"] = None
        return dtype

    def _scalar(self, *args: Any) -> object:
        plain = bool(args) and isinstance(args[0], ArrayDType) and args[0].numpy() is not None
        return array_scalar(*args) if plain else Opaque("numpy.core.multiarray.scalar", args)


#: Made by a method of the unpickler.
_METHODS: Final = {
    "builtins.getattr": "_member",
    "numpy.dtype": "_array_dtype",
    "numpy.core.multiarray.scalar": "_scalar",
}
