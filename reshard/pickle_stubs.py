"""What does an object of a pickle become, when its class is never imported?

A :class:`Record`: its class's name, what it would have been called with, and the state it would
have been given. Nothing is computed from them. :class:`Opaque` is a record of a class that nobody
vouches for; :class:`StoredArray` is one of a numpy array, which can be read out.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NoReturn, cast

import numpy as np
import numpy.typing as npt

from reshard.errors import CorruptError, UnsupportedError
from reshard.stored import brief

#: numpy's codes for what an array may hold: booleans, numbers, text and bytes, no objects.
_PLAIN_CODE: Final = re.compile(r"[<>|=]?[biufcSU]\d{1,6}")

_TEXT: Final = frozenset((str,))


class Record:
    """An inert object of a pickle.

    Parameters
    ----------
    qualname
        Its class or function, ``"module.name"``.
    args, kwargs
        What the pickle would have called it with; ``None`` without keywords.

    Attributes
    ----------
    state
        What the pickle would have given to ``__setstate__``; ``None`` if nothing.
    items
        What it would have been extended with; ``None`` if nothing.
    pairs
        What it would have been filled with, as a dict is; ``None`` if nothing.
    """

    __slots__ = ("args", "items", "kwargs", "pairs", "qualname", "state")

    def __init__(
        self,
        qualname: str,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> None:
        self.qualname = qualname
        self.args = args
        self.kwargs: Mapping[str, object] | None = kwargs or None
        self.state: object = None
        # Metadata can have millions of records: lists are made only when something comes.
        self.items: list[object] | None = None
        self.pairs: list[tuple[object, object]] | None = None

    @property
    def fields(self) -> dict[str, object]:
        """The state as attributes: of ``__dict__``, then of slots.

        Raises
        ------
        CorruptError
            The state is something else than attributes.
        """
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        found: dict[str, object] = {}
        for part in parts:
            if part is None:
                continue
            if not isinstance(part, dict) or not _TEXT.issuperset(map(type, part)):
                raise CorruptError(f"an object {self.qualname} has a state that isn't attributes")
            found.update(part)
        return found

    def __setstate__(self, state: object) -> None:
        self.state = state

    def append(self, item: object) -> None:
        """Add an item, as APPEND asks for."""
        self.extend((item,))

    def add(self, item: object) -> None:
        """Add an item, as ADDITEMS asks for."""
        self.extend((item,))

    def extend(self, items: Iterable[object]) -> None:
        """Add items, as APPENDS asks for."""
        if self.items is None:
            self.items = []
        self.items.extend(items)

    def __setitem__(self, key: object, value: object) -> None:
        if self.pairs is None:
            self.pairs = []
        self.pairs.append((key, value))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.qualname}>"


class Opaque(Record):
    """A record of a class or function that isn't known: to be reported and left out."""

    __slots__ = ()


class GlobalMeta(type):
    """Class of the stand-ins for globals: they can't be changed by a pickle's BUILD."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise CorruptError("a pickle tries to change a class")

    def __setstate__(cls, state: object) -> NoReturn:
        raise CorruptError("a pickle tries to change a class")

    def __repr__(cls) -> str:
        return f"<global {cls.qualname}>"

    qualname: str = ""


class GlobalStub(metaclass=GlobalMeta):
    """Stands for a class or function that a pickle names. Calling it makes something inert.

    It is a class because NEWOBJ asks for one, and it never has instances: what its factory
    gives takes their place.
    """

    __slots__ = ()


def global_stub(qualname: str, factory: Callable[..., object]) -> type[GlobalStub]:
    """Make the stand-in for a global.

    Parameters
    ----------
    qualname
        Its name, ``"module.name"``.
    factory
        Called as the global would be; a subclass of :class:`Record` is called with the name, the
        positional and the keyword arguments.
    """
    if isinstance(factory, type) and issubclass(factory, Record):
        kind = factory

        def new(cls: object, *args: Any, **kwargs: Any) -> object:
            return kind(qualname, args, kwargs)
    else:

        def new(cls: object, *args: Any, **kwargs: Any) -> object:
            return factory(*args, **kwargs)

    body = {"qualname": qualname, "__new__": new, "__slots__": ()}
    return GlobalMeta("GlobalStub", (GlobalStub,), body)  # type: ignore[return-value]


class OrderedMapping(OrderedDict[Any, Any]):
    """An ``OrderedDict`` without attributes of its own: those that a pickle sets are dropped.

    (torch puts ``_metadata`` there.) On a plain one they would hide its methods.
    """

    def __setstate__(self, state: object) -> None:
        pass


class ArrayDType(Record):
    """A ``numpy.dtype``: its code is the first argument, its byte order is in the state."""

    __slots__ = ()

    def numpy(self) -> np.dtype[Any] | None:
        """Give the numpy type, or ``None`` for one that isn't plain (objects, fields, dates)."""
        code = self.args[0] if self.args else None
        if not isinstance(code, str) or not _PLAIN_CODE.fullmatch(code):
            return None
        try:
            found = np.dtype(code)
        except TypeError:
            return None
        if self.state is None:
            return found
        state = self.state
        if not isinstance(state, tuple) or len(state) < 5 or any(p is not None for p in state[2:5]):
            return None
        return found.newbyteorder(state[1]) if state[1] in ("<", ">", "|", "=") else None


class StoredArray(Record):
    """A numpy array that lies in the pickle itself."""

    __slots__ = ()

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> StoredArray:
        """Make one of an array of numbers.

        Raises
        ------
        UnsupportedError
            Numpy itself doesn't have the type of its elements (``bfloat16``, say), or they aren't
            numbers.
        """
        if array.dtype.kind not in "biufc":
            raise UnsupportedError(f"a numpy array of {array.dtype} can't be pickled")
        dtype = ArrayDType("numpy.dtype", (array.dtype.str[1:],))
        dtype.state = (3, array.dtype.str[0], None, None, None, -1, -1, 0)
        found = cls("numpy.core.multiarray._reconstruct")
        found.state = (1, array.shape, dtype, False, array.tobytes())
        return found

    @property
    def numeric(self) -> bool:
        """Whether it holds numbers, and not objects, fields, dates or text."""
        dtype = self.state[2] if isinstance(self.state, tuple) and len(self.state) == 5 else None
        found = dtype.numpy() if isinstance(dtype, ArrayDType) else None
        return found is not None and found.kind in "biufc"

    def numpy(self) -> npt.NDArray[Any]:
        """Give the array (read-only, over the pickle's own bytes).

        Raises
        ------
        UnsupportedError
            It holds objects, fields or dates.
        CorruptError
            Its bytes, shape and type don't fit each other.
        """
        state = self.state
        if not isinstance(state, tuple) or len(state) != 5:
            raise CorruptError(f"a numpy array has a state {brief(state)}")
        _, shape, dtype, fortran, data = state
        found = dtype.numpy() if isinstance(dtype, ArrayDType) else None
        if found is None:
            raise UnsupportedError("a numpy array holds something else than numbers and text")
        if not isinstance(data, bytes | bytearray) or not isinstance(shape, tuple):
            raise CorruptError("a numpy array has no bytes or no shape")
        if not all(type(size) is int and size >= 0 for size in shape):
            raise CorruptError(f"a numpy array has the shape {brief(shape)}")
        try:
            flat = np.frombuffer(data, found)
            return flat.reshape(shape, order="F" if fortran else "C")
        except (ValueError, TypeError, OverflowError) as error:
            raise CorruptError(f"a numpy array doesn't fit its bytes: {error}") from error


def array_scalar(dtype: object, data: object = b"") -> np.generic:
    """Make a numpy scalar from its type and bytes (``numpy.core.multiarray.scalar``).

    Raises
    ------
    UnsupportedError, CorruptError
        As :meth:`StoredArray.numpy`.
    """
    array = StoredArray("numpy.core.multiarray.scalar")
    array.state = (1, (), dtype, False, data)
    return cast(np.generic, array.numpy()[()])
