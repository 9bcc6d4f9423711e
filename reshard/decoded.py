"""How are bytes served that don't lie on the disk as they are?

A file of a manifest may be **encoded**: a compressed chunk, a value of a database. Its format then
gives a :class:`Decoder`, and everything else of the core sees the decoded bytes, by offset and
length, as if they lay in a file.

:class:`DecodedFiles` keeps what was decoded, so that one pass over a checkpoint decodes each file
about once. Small files are kept in memory, as long as there is room. All others are streamed into
**slabs**, mapped temporary files without a name that hold many of them each: the memory and the
descriptors that this takes don't grow with the checkpoint. The slabs that were used least recently
are dropped when there are too many.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from reshard.errors import CorruptError, TargetError

SMALL = 64 << 10
"""Bytes up to which a decoded file is kept in memory."""

MEMORY = 16 << 20
"""Bytes of decoded files that are kept in memory, if nothing else is said."""

SLAB = 64 << 20
"""Bytes of a slab; a larger file has one for itself."""

DISK = 4 << 30
"""Bytes of all slabs; a single larger one is kept alone."""

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


def disk_for(sizes: Iterable[int]) -> int:
    """Bytes of temporary files that decoded files of these sizes may take at a time."""
    large = [nbytes for nbytes in sizes if nbytes > SMALL]
    if not large:
        return 0
    slabs = sum(large) + len(large) * mmap.PAGESIZE + SLAB
    return min(slabs, max(DISK, max(large)) + SLAB)


class _Slab:
    """A temporary file that decoded files are laid into, one after the other."""

    def __init__(self, folder: Path | None, nbytes: int) -> None:
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - kept
            os.ftruncate(self._file.fileno(), nbytes)
            self.memory = mmap.mmap(self._file.fileno(), nbytes, prot=mmap.PROT_READ)
        except OSError as error:
            raise TargetError(
                f"no temporary file can be made: {error.strerror}", where=folder
            ) from error
        self.nbytes = nbytes
        self.used = 0
        self.files: list[int] = []

    def room(self, nbytes: int) -> bool:
        """Whether a file of that size fits."""
        return self.used + nbytes <= self.nbytes

    def take(self, file: int, nbytes: int) -> int:
        """Give a file its place: the byte at which it begins."""
        begin = self.used
        self.used += -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.files.append(file)
        return begin

    def write(self, piece: memoryview, at: int) -> None:
        """Write bytes of a file; not by way of the mapping, where a full disk would kill us."""
        while len(piece):
            done = os.pwrite(self._file.fileno(), piece, at)
            piece, at = piece[done:], at + done


class _Turns:
    """Has threads decode at the same time only as much as memory allows.

    What is stored of a file is read as one by some libraries, and is about as long as the file.

    Parameters
    ----------
    most
        Bytes of files that may be decoded at a time; a longer one is decoded alone.
    """

    def __init__(self, most: int) -> None:
        self._most = self._left = most
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        """Wait for a turn, and have it while the block runs."""
        part = min(nbytes, self._most)
        with self._changed:
            self._changed.wait_for(lambda: self._left >= part)
            self._left -= part
        try:
            yield
        finally:
            with self._changed:
                self._left += part
                self._changed.notify_all()


@dataclass(slots=True)
class _Decoded:
    """A file, decoded or about to be; its slab and place there, where it is in one."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    view: memoryview | None = None
    slab: _Slab | None = None
    begin: int = 0


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
        self._room = memory
        self._turns = _Turns(memory)
        self._folder = folder
        self._lock = threading.Lock()
        self._files: dict[int, _Decoded] = {}
        self._slabs: OrderedDict[_Slab, None] = OrderedDict()

    def find(self, file: int) -> memoryview | None:
        """The bytes of a file, if they are kept."""
        with self._lock:
            found = self._files.get(file)
            if found is None or found.view is None:
                return None
            if found.slab is not None:
                self._slabs.move_to_end(found.slab)
            return found.view

    def get(self, file: int, decoder: Decoder, nbytes: int, path: Path) -> memoryview:
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
        with self._lock:
            found = self._files.setdefault(file, _Decoded())
        with found.lock:
            if found.view is None:
                if self._take_memory(nbytes):
                    found.view = self._in_memory(decoder, nbytes, path)
                else:
                    found.view = self._in_slab(file, found, decoder, nbytes, path)
            return found.view

    def release(self, file: int, low: int, high: int) -> None:
        """Unmap the pages of bytes ``[low, high)`` of a file, if they are mapped."""
        with self._lock:
            found = self._files.get(file)
        if found is not None and found.slab is not None and found.view is not None and high > low:
            low += found.begin
            first = low - low % mmap.PAGESIZE
            found.slab.memory.madvise(mmap.MADV_DONTNEED, first, found.begin + high - first)

    def _take_memory(self, nbytes: int) -> bool:
        with self._lock:
            fits = nbytes <= min(SMALL, self._room)
            self._room -= nbytes if fits else 0
            return fits

    def _in_memory(self, decoder: Decoder, nbytes: int, path: Path) -> memoryview:
        content = memoryview(bytearray(nbytes))

        def put(piece: memoryview, at: int) -> None:
            content[at : at + len(piece)] = piece

        self._decode(decoder, nbytes, path, put)
        return content.toreadonly()

    def _in_slab(
        self, file: int, found: _Decoded, decoder: Decoder, nbytes: int, path: Path
    ) -> memoryview:
        with self._lock:
            slab = self._slab(nbytes)
            found.slab, found.begin = slab, slab.take(file, nbytes)
            self._files[file] = found

        def put(piece: memoryview, at: int) -> None:
            try:
                slab.write(piece, found.begin + at)
            except OSError as error:
                raise _no_room(error, nbytes, path) from error

        self._decode(decoder, nbytes, path, put)
        return memoryview(slab.memory)[found.begin : found.begin + nbytes]

    def _slab(self, nbytes: int) -> _Slab:
        """One with room: the last that was used, or a new one in the place of the oldest."""
        newest = next(reversed(self._slabs), None)
        if newest is not None and newest.room(nbytes):
            return newest
        slab = _Slab(self._folder, max(SLAB, nbytes))
        self._slabs[slab] = None
        while len(self._slabs) > 1 and sum(s.nbytes for s in self._slabs) > DISK:
            oldest, _ = self._slabs.popitem(last=False)
            for file in oldest.files:
                found = self._files.get(file)
                if found is not None and found.slab is oldest:
                    del self._files[file]
        return slab

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
            with self._turns.taken(nbytes):
                decoder.decode(self._root, write)
        except ValueError as error:
            raise CorruptError(f"can't be decoded: {error}", where=path) from error
        if at != nbytes:
            raise CorruptError(f"decodes to {at} bytes and should have {nbytes}", where=path)


def _no_room(error: OSError, nbytes: int, path: Path) -> TargetError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return TargetError(
        f"a temporary file for its {nbytes} decoded bytes can't be written: {error.strerror}",
        where=path,
        hint="free some space, or let TMPDIR name a folder on another disk" if full else None,
    )
