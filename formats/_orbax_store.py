"""Where does an Orbax checkpoint keep its arrays: in files, or in a database?

Both are a map from names (``params.dense.kernel/0.0``) to values. :class:`Files` are a folder an
array; :class:`Database` is an OCDBT database, which tensorstore reads. Chunks that have to be
decoded get a :class:`Chunk`, the decoder of one.

A database is read through tensorstore, so that a value comes into memory whole: large chunks are
decoded one at a time.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from reshard.decoded import Write
from reshard.errors import CorruptError, IncompleteError
from reshard.formats._zarr import Array, decoded

DATABASE = "manifest.ocdbt"

LARGE = 8 << 20
"""Decoded bytes from which on chunks are decoded one at a time."""

_one_large = threading.Lock()


class Values(Protocol):
    """A map from names to values, below a folder of the checkpoint."""

    def names(self, array: str) -> set[str]:
        """Names of the values of an array, without its own name before them."""
        ...

    def read(self, name: str) -> bytes | None:
        """A value; ``None`` if there is none."""
        ...

    def stored(self, name: str) -> tuple[str, ...]:
        """The files that a value depends on, relative to the checkpoint."""
        ...


@dataclass(frozen=True)
class Files:
    """Values that are files.

    Parameters
    ----------
    root
        The checkpoint.
    folder
        The folder in it that holds the arrays, ``""`` for itself.
    """

    root: Path
    folder: str

    def names(self, array: str) -> set[str]:
        """See :meth:`Values.names`."""
        top = self.root / self.folder / array
        found: set[str] = set()
        for folder, _, files in os.walk(top):
            inside = Path(folder).relative_to(top)
            found.update((inside / file).as_posix() for file in files)
        return found

    def read(self, name: str) -> bytes | None:
        """See :meth:`Values.read`."""
        try:
            return (self.root / self.folder / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def stored(self, name: str) -> tuple[str, ...]:
        """See :meth:`Values.stored`."""
        return (self.path(name),)

    def path(self, name: str) -> str:
        """Where a value's file lies, relative to the checkpoint."""
        return f"{self.folder}/{name}" if self.folder else name


# malloc keeps memory for each thread that has read a value, as much as the largest took
_ONE_READER = {"file_io_concurrency": {"limit": 1}, "data_copy_concurrency": {"limit": 1}}


@dataclass(frozen=True)
class Database:
    """Values in an OCDBT database.

    Parameters
    ----------
    root, folder
        As for :class:`Files`.
    """

    root: Path
    folder: str
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @cached_property
    def _store(self) -> Any:
        import tensorstore

        base = {"driver": "file", "path": f"{os.path.abspath(self.root / self.folder)}/"}
        with self._errors("the database can't be opened"):
            spec = {"driver": "ocdbt", "base": base}
            return tensorstore.KvStore.open(spec, context=tensorstore.Context(_ONE_READER)).result()

    @cached_property
    def _names(self) -> dict[str, set[str]]:
        with self._errors("the database can't be listed"):
            keys = self._store.list().result()
        found: dict[str, set[str]] = {}
        for key in keys:
            array, _, name = os.fsdecode(key).partition("/")
            found.setdefault(array, set()).add(name)
        return found

    @cached_property
    def _files(self) -> tuple[str, ...]:
        top, found = self.root / self.folder, []
        for folder, _, files in os.walk(top):
            if Path(folder).name == "d" or DATABASE in files:
                where = Path(folder).relative_to(self.root)
                found += [(where / file).as_posix() for file in files]
        return tuple(sorted(found))

    def names(self, array: str) -> set[str]:
        """See :meth:`Values.names`."""
        return self._names.get(array, set())

    def read(self, name: str) -> bytes | None:
        """See :meth:`Values.read`."""
        with self._lock:
            store = self._store
        with self._errors(f"{name} can't be read from the database"):
            found = store.read(os.fsencode(name)).result()
        return bytes(found.value) if found.state == "value" else None

    def stored(self, name: str) -> tuple[str, ...]:
        """See :meth:`Values.stored`: any of the database's files may hold it."""
        return self._files

    @contextlib.contextmanager
    def _errors(self, what: str) -> Any:
        try:
            yield
        except (ValueError, KeyError, OSError) as error:  # what tensorstore raises
            where = self.root / self.folder / DATABASE
            raise CorruptError(f"{what}: {str(error)[:300]}", where=where) from error


@dataclass(frozen=True)
class Chunk:
    """The decoder of one chunk.

    Parameters
    ----------
    values, name
        Where it is stored.
    array
        Which array it is of.
    """

    values: Values
    name: str
    array: Array

    @property
    def stored(self) -> tuple[str, ...]:
        """See :attr:`~reshard.decoded.Decoder.stored`."""
        return self.values.stored(self.name)

    def decode(self, root: Path, write: Write) -> None:
        """See :meth:`~reshard.decoded.Decoder.decode`."""
        large = self.array.chunk_nbytes > LARGE
        with _one_large if large else contextlib.nullcontext():
            stored = self.values.read(self.name)
            if stored is None:
                raise IncompleteError(f"the chunk {self.name} is gone", where=root)
            for part in decoded(self.array, stored):
                write(part)


def check_chunks(array: Array, found: Iterable[str], name: str, where: Path) -> None:
    """See that an array has each of its chunks, and none outside of its grid.

    Raises
    ------
    CorruptError
        If one is missing, or too many.
    """
    there = {chunk for chunk in found if array.is_chunk(chunk) or not array.shape}
    known = set()
    for chunk, _ in array.boxes():  # ends soon, however many chunks there should be
        if chunk not in there:
            raise IncompleteError(
                f"the chunk {name}/{chunk} is missing (the array has {array.chunks})",
                where=where,
                hint="copy the checkpoint again; others would read zeros in its place",
            )
        known.add(chunk)
    extra = there - known - {".zarray", ".zattrs", "zarr.json"}
    if extra:
        raise CorruptError(
            f"{name} has a chunk {min(extra)} outside of its shape {list(array.shape)}",
            where=where,
            hint="files of another checkpoint were copied into this one",
        )
