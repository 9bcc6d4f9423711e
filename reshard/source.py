"""How are the bytes of a source file brought in?

Two ways with one face. :class:`Mapped` maps a file and hands out slices of the page cache: no
copy, no memory of our own. :class:`Read` reads into a buffer that is used again: for network
file systems, where a page fault that fails would kill the process instead of raising an error.
Both serve encoded files from :mod:`reshard.decoded`.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from reshard.decoded import MEMORY, DecodedFiles
from reshard.errors import CorruptError, NotFoundError, ReshardError
from reshard.manifest import Manifest

OPEN_FILES = 128
"""How many source files are kept open at once."""

HUGE_PAGE = 2 << 20

_REMOTE = ("nfs", "fuse", "lustre", "cifs", "smb", "beegfs", "gpfs", "ceph", "9p", "afs", "wekafs")


class Fetcher(Protocol):
    """Hands out bytes of source files."""

    def fetch(self, file: int, offset: int, nbytes: int) -> memoryview:
        """Bytes of a file, valid until the next :meth:`reset`."""
        ...

    def full(self) -> bool:
        """Whether what was handed out should be used, and :meth:`reset` called, before more is."""
        ...

    def reset(self) -> None:
        """Say that everything handed out so far has been used."""
        ...

    def release(self, file: int, low: int, high: int) -> None:
        """Say that bytes ``[low, high)`` of a file won't be needed soon."""
        ...


class SourceFiles:
    """The open files of a manifest, shared by threads; the least recently used are closed.

    Parameters
    ----------
    manifest
        The checkpoint.
    memory, scratch
        Where encoded files are kept when they are decoded: see
        :class:`~reshard.decoded.DecodedFiles`.
    """

    def __init__(
        self, manifest: Manifest, *, memory: int = MEMORY, scratch: Path | None = None
    ) -> None:
        self._manifest = manifest
        self._decoded = DecodedFiles(manifest.root, memory, scratch)
        self._lock = threading.Lock()
        self._maps: OrderedDict[int, _Map] = OrderedDict()
        self._fds: OrderedDict[int, Handle] = OrderedDict()

    def _open(self, file: int) -> int:
        path = self._manifest.path(file)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise source_error(error, path) from error
        size = os.fstat(fd).st_size
        expected = self._manifest.files[file].nbytes
        if size != expected:
            os.close(fd)
            raise CorruptError(
                f"has {size} bytes and had {expected} when it was opened",
                where=path,
                hint="the file changed while it was being read",
            )
        return fd

    def map(self, file: int) -> memoryview:
        """The whole file as mapped memory."""
        if self.encoded(file):
            return self._decode(file)
        with self._lock:
            found = self._maps.get(file)
            if found is None:
                found = self._maps[file] = _Map(self._open(file), self.path(file))
                if len(self._maps) > OPEN_FILES:
                    # slices that are still in use keep the mapping alive
                    self._maps.popitem(last=False)
            else:
                self._maps.move_to_end(file)
            return found.view

    def release(self, file: int, low: int, high: int) -> None:
        """Unmap the pages of bytes ``[low, high)`` of a file, if it is still mapped."""
        if self.encoded(file):
            self._decoded.release(file, low, high)
            return
        with self._lock:
            found = self._maps.get(file)
        if found is not None and found.memory is not None and high > low:
            low -= low % mmap.PAGESIZE
            found.memory.madvise(mmap.MADV_DONTNEED, low, high - low)

    def handle(self, file: int) -> Handle:
        """The file, open for reading."""
        with self._lock:
            found = self._fds.get(file)
            if found is None:
                found = self._fds[file] = Handle(self._open(file))
                if len(self._fds) > OPEN_FILES:
                    self._fds.popitem(last=False)
            else:
                self._fds.move_to_end(file)
            return found

    def encoded(self, file: int) -> bool:
        """Whether a file has to be decoded: it can be mapped, and has no handle."""
        return self._manifest.files[file].decoder is not None

    def _decode(self, file: int) -> memoryview:
        found = self._decoded.find(file)
        if found is not None:
            return found
        what, path = self._manifest.files[file], self.path(file)
        assert what.decoder is not None
        try:
            return self._decoded.get(file, what.decoder, what.nbytes, path)
        except OSError as error:
            raise source_error(error, path) from error

    def path(self, file: int) -> Path:
        """Where a file lies."""
        return self._manifest.path(file)


class _Map:
    """A mapped file; one without bytes can't be mapped and needn't be."""

    def __init__(self, fd: int, path: Path) -> None:
        self.memory: mmap.mmap | None = None
        self.view = memoryview(b"")
        try:
            if os.fstat(fd).st_size:
                self.memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
                self.view = memoryview(self.memory)
        except OSError as error:
            raise source_error(error, path) from error
        finally:
            os.close(fd)


class Handle:
    """A file descriptor that is closed when nobody uses it any more, and not while somebody does.

    A number that was closed too early could already be another file's.

    Parameters
    ----------
    fd
        The descriptor.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class Mapped:
    """Slices of mapped files, for one thread.

    Parameters
    ----------
    files
        The files.
    most
        Of how many files slices may be in use: each keeps its file open.
    """

    def __init__(self, files: SourceFiles, most: int = 1) -> None:
        self._files = files
        self._most = most
        self._held = 0
        self._last = -1
        self._view = memoryview(b"")

    def fetch(self, file: int, offset: int, nbytes: int) -> memoryview:
        """See :meth:`Fetcher.fetch`."""
        if file != self._last:
            self._view, self._last = self._files.map(file), file
            self._held += 1
        found = self._view[offset : offset + nbytes]
        if len(found) != nbytes:
            raise _short(self._files.path(file), offset + len(found), nbytes - len(found))
        return found

    def full(self) -> bool:
        """See :meth:`Fetcher.full`."""
        return self._held >= self._most

    def reset(self) -> None:
        """See :meth:`Fetcher.reset`."""
        self._held = 0

    def release(self, file: int, low: int, high: int) -> None:
        """See :meth:`Fetcher.release`."""
        self._files.release(file, low, high)


class Read:
    """Bytes read into one buffer of ``nbytes``, for one thread."""

    def __init__(self, files: SourceFiles, nbytes: int) -> None:
        self._files = files
        self._buffer = _buffer(nbytes)
        self._used = 0
        self._last = -1
        self._handle: Handle

    def fetch(self, file: int, offset: int, nbytes: int) -> memoryview:
        """See :meth:`Fetcher.fetch`."""
        assert self._used + nbytes <= len(self._buffer), "the buffer wasn't reset"
        into = self._buffer[self._used : self._used + nbytes]
        self._used += nbytes
        if self._files.encoded(file):
            found = self._files.map(file)[offset : offset + nbytes]
            if len(found) != nbytes:
                raise _short(self._files.path(file), offset + len(found), nbytes - len(found))
            into[:] = found
            return into
        if file != self._last:
            self._handle, self._last = self._files.handle(file), file
        try:
            done = os.preadv(self._handle.fd, [into], offset)
            while done < nbytes:
                got = os.preadv(self._handle.fd, [into[done:]], offset + done)
                if not got:
                    raise _short(self._files.path(file), offset + done, nbytes - done)
                done += got
        except OSError as error:
            raise source_error(error, self._files.path(file)) from error
        return into

    def full(self) -> bool:
        """See :meth:`Fetcher.full`."""
        return self._used == len(self._buffer)

    def reset(self) -> None:
        """See :meth:`Fetcher.reset`."""
        self._used = 0

    def release(self, file: int, low: int, high: int) -> None:
        """See :meth:`Fetcher.release`."""


def _buffer(nbytes: int) -> memoryview:
    """Memory that is filled again and again: of huge pages, whose addresses are found faster."""
    if nbytes < HUGE_PAGE // 4:  # one page of it would be mostly empty
        return memoryview(bytearray(nbytes))
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them
        return memoryview(bytearray(nbytes))
    view = memoryview(memory)
    begin = -np.frombuffer(view, np.uint8).ctypes.data % HUGE_PAGE
    return view[begin : begin + nbytes]


def _short(path: Path, end: int, more: int) -> CorruptError:
    return CorruptError(f"ends at byte {end}; {more} more were expected", where=path)


def source_error(error: OSError, path: Path) -> ReshardError:
    """An operating system's error while reading, as one of ours."""
    if isinstance(error, FileNotFoundError):
        return NotFoundError("the file is gone", where=path)
    if isinstance(error, PermissionError):
        return NotFoundError("no permission to read it", where=path)
    return CorruptError(f"can't be read: {error.strerror}", where=path)


def way_to_read(root: Path) -> Literal["map", "read"]:
    """``"read"`` for files on a network file system, else ``"map"``."""
    best, kind = "", ""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "read"
    place = os.path.realpath(root)
    for line in mounts.splitlines():
        fields = line.split(" ")
        mount = fields[1].replace("\\040", " ")
        inside = place == mount or place.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, fields[2]
    return "read" if kind.startswith(_REMOTE) else "map"
