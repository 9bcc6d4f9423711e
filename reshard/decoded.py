"""How are bytes served that don't lie on the disk as they are?

A file of a manifest may be **encoded**: a compressed chunk, a value of a database. Its format then
gives a :class:`Decoder`, and everything else of the core sees the decoded bytes, by offset and
length, as if they lay in a file.

:class:`DecodedFiles` keeps what was decoded, so that one pass over a checkpoint decodes each file
about once. Small files are kept in memory; larger ones are streamed to temporary files without a
name, which are mapped: the memory that this takes doesn't grow with the checkpoint. Those that
were used least recently are dropped when either place is full.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from reshard.errors import CorruptError, TargetError

SMALL = 1 << 20
"""Bytes up to which a decoded file is kept in memory."""

MEMORY = 16 << 20
"""Bytes of decoded files that are kept in memory, if nothing else is said."""

DISK = 4 << 30
"""Bytes of decoded files that are kept on disk; a single larger one is kept alone."""

OPEN = 128
"""How many decoded files are kept on disk: each has a descriptor."""

Write = Callable[[bytes | memoryview], object]
"""Takes the next bytes of a decoded file."""


class Decoder(Protocol):
    """Makes the bytes of one file of a manifest out of what is stored."""

    @property
    def stored(self) -> tuple[str, ...]:
        """The files on the disk that the bytes depend on, relative to the checkpoint's root.

        Their marks tell whether the checkpoint has changed. Decoders of one database give the
        very same tuple.
        """
        ...

    def decode(self, root: Path, write: Write) -> None:
        """Hand all bytes to ``write``, in their order, in pieces of any length.

        Parameters
        ----------
        root
            The checkpoint's root.
        write
            Keeps no reference to what it is given.

        Raises
        ------
        ValueError
            If what is stored can't be decoded; a :class:`~reshard.errors.CorruptError` is made
            of it that names the file.
        OSError
            If it can't be read.
        """
        ...


@dataclass(slots=True)
class Decoded:
    """A file, decoded or about to be; ``memory`` is the mapping of one that lies on the disk."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    view: memoryview | None = None
    memory: mmap.mmap | None = None


class _Shelf:
    """What fits one place, the least recently used first."""

    def __init__(self, nbytes: int, files: int | None = None) -> None:
        self._room = nbytes
        self._most = files
        self._sizes: OrderedDict[int, int] = OrderedDict()

    def use(self, file: int) -> None:
        """Say that a file is used, if it is here."""
        if file in self._sizes:
            self._sizes.move_to_end(file)

    def add(self, file: int, nbytes: int) -> Iterator[int]:
        """Put a file here; gives those that had to go for it."""
        self._room -= nbytes - self._sizes.pop(file, 0)
        self._sizes[file] = nbytes
        most = len(self._sizes) if self._most is None else self._most
        while len(self._sizes) > 1 and (self._room < 0 or len(self._sizes) > most):
            oldest, size = self._sizes.popitem(last=False)
            self._room += size
            yield oldest


class DecodedFiles:
    """The decoded files of one checkpoint, shared by threads.

    Parameters
    ----------
    root
        The checkpoint's root.
    memory
        Bytes of them that may be kept in memory.
    folder
        Where temporary files are made; ``None`` for the system's place (``TMPDIR``).
    """

    def __init__(self, root: Path, memory: int = MEMORY, folder: Path | None = None) -> None:
        self._root = root
        self._small = min(SMALL, memory)
        self._folder = folder
        self._lock = threading.Lock()
        self._files: dict[int, Decoded] = {}
        self._memory, self._disk = _Shelf(memory), _Shelf(DISK, OPEN)

    def get(self, file: int, decoder: Decoder, nbytes: int, path: Path) -> Decoded:
        """The bytes of a file; threads that ask for one that is being decoded wait for it.

        Parameters
        ----------
        file
            Its index in the manifest.
        decoder, nbytes
            What makes its bytes, and how many there must be.
        path
            What it is called in messages.

        Raises
        ------
        CorruptError
            If it can't be decoded, or has another length.
        TargetError
            If there is no room for a temporary file.
        OSError
            If what is stored can't be read.
        """
        shelf = self._memory if nbytes <= self._small else self._disk
        with self._lock:
            found = self._files.setdefault(file, Decoded())
            shelf.use(file)
        with found.lock:
            if found.view is None:
                if shelf is self._memory:
                    found.view = self._in_memory(decoder, nbytes, path)
                else:
                    found.memory = self._on_disk(decoder, nbytes, path)
                    found.view = memoryview(found.memory)
                with self._lock:
                    self._files[file] = found
                    for dropped in shelf.add(file, nbytes):  # slices in use keep their bytes
                        self._files.pop(dropped, None)
            return found

    def find(self, file: int) -> Decoded | None:
        """What is kept of a file."""
        with self._lock:
            return self._files.get(file)

    def _in_memory(self, decoder: Decoder, nbytes: int, path: Path) -> memoryview:
        content = memoryview(bytearray(nbytes))

        def put(piece: memoryview, at: int) -> None:
            content[at : at + len(piece)] = piece

        self._decode(decoder, nbytes, path, put)
        return content.toreadonly()

    def _on_disk(self, decoder: Decoder, nbytes: int, path: Path) -> mmap.mmap:
        with _temporary(self._folder) as scratch:

            def put(piece: memoryview, at: int) -> None:
                try:
                    while len(piece):
                        done = os.pwrite(scratch.fileno(), piece, at)
                        piece, at = piece[done:], at + done
                except OSError as error:
                    raise _no_room(error, nbytes, path) from error

            self._decode(decoder, nbytes, path, put)
            return mmap.mmap(scratch.fileno(), nbytes, prot=mmap.PROT_READ)

    def _decode(
        self, decoder: Decoder, nbytes: int, path: Path, put: Callable[[memoryview, int], None]
    ) -> None:
        at = 0

        def write(piece: bytes | memoryview) -> None:
            nonlocal at
            view = memoryview(piece).cast("B")
            if at + len(view) > nbytes:  # told at once: a few bytes can decode to terabytes
                raise CorruptError(f"decodes to more than the {nbytes} bytes it has", where=path)
            put(view, at)
            at += len(view)

        try:
            decoder.decode(self._root, write)
        except ValueError as error:
            raise CorruptError(f"can't be decoded: {error}", where=path) from error
        if at != nbytes:
            raise CorruptError(f"decodes to {at} bytes and should have {nbytes}", where=path)


def _temporary(folder: Path | None) -> IO[bytes]:
    """A file without a name, gone when it is closed and unmapped."""
    try:
        return tempfile.TemporaryFile(dir=folder, buffering=0)
    except OSError as error:
        raise TargetError(
            f"no temporary file can be made: {error.strerror}", where=folder
        ) from error


def _no_room(error: OSError, nbytes: int, path: Path) -> TargetError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return TargetError(
        f"a temporary file for its {nbytes} decoded bytes can't be written: {error.strerror}",
        where=path,
        hint="free some space, or let TMPDIR name a folder on another disk" if full else None,
    )
