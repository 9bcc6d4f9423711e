"""How are the files of a target made, filled and brought to disk?

Each file is made at its final size when its first byte is due, so that a full disk is noticed at
once and what isn't written is zero, and closed when its last byte is there.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Container, Sequence
from functools import partial
from pathlib import Path

from reshard.errors import TargetError
from reshard.source import Handle
from reshard.store import File


class TargetFiles:
    """The files of a target, written by several threads.

    Parameters
    ----------
    folder
        Where they are made; parents of their paths are made too.
    files
        Their paths and sizes.
    sync
        Whether a finished file is flushed to disk.
    kept
        Files that are there already and go on to be written.
    """

    def __init__(
        self, folder: Path, files: Sequence[File], *, sync: bool, kept: Container[int] = ()
    ) -> None:
        self._folder = folder
        self._files = files
        self._sync = sync
        self._kept = kept
        self._lock = threading.Lock()
        self._open: dict[int, Handle] = {}
        self._finished: set[int] = set()
        self._closed = False

    def _path(self, file: int) -> Path:
        name = self._files[file].path
        return self._folder / name if name else self._folder

    def _handle(self, file: int) -> Handle:
        with self._lock:
            assert not self._closed, "closed"
            assert file not in self._finished, f"file {file} is finished"
            found = self._open.get(file)
            if found is None:
                keep = file in self._kept
                fd = make_file(self._path(file), self._files[file].nbytes, keep=keep)
                found = self._open[file] = Handle(fd)
            return found

    def opened(self, file: int) -> Target:
        """A file to write to; it stays open until it is finished and this is dropped."""
        return Target(self._handle(file), partial(self._path, file))

    def write(self, file: int, parts: Sequence[memoryview], offset: int) -> None:
        """Write neighbouring bytes at an offset of a file."""
        self.opened(file).write(parts, offset)

    def finish(self, file: int) -> None:
        """Close a file to which nothing more will be written."""
        handle = self._handle(file)
        with self._lock:
            del self._open[file]
            self._finished.add(file)
        try:
            if self._sync:
                os.fsync(handle.fd)
        except OSError as error:
            raise target_error(error, self._path(file)) from error

    def close(self) -> None:
        """Let go of what is still open, after an error; no file is made any more."""
        with self._lock:
            self._closed = True
            self._open.clear()


class Target:
    """An open file of a target.

    Parameters
    ----------
    handle, path
        The file, and what says where it lies: of use only after an error.
    """

    __slots__ = ("_handle", "_path")

    def __init__(self, handle: Handle, path: Callable[[], Path]) -> None:
        self._handle = handle
        self._path = path

    def write(self, parts: Sequence[memoryview], offset: int) -> None:
        """Write neighbouring bytes at an offset."""
        total = sum(p.nbytes for p in parts)
        try:
            done = os.pwritev(self._handle.fd, parts, offset)
            rest = memoryview(b"" if done == total else b"".join(parts))
            while done < total:
                done += os.pwrite(self._handle.fd, rest[done:], offset + done)
        except OSError as error:
            raise target_error(error, self._path()) from error


def make_file(path: Path, nbytes: int, *, keep: bool = False) -> int:
    """Make a file of ``nbytes`` zeros, its space reserved where the file system can.

    Parameters
    ----------
    path, nbytes
        Where, and how large.
    keep
        Whether what is there already stays.

    Returns
    -------
    int
        Its descriptor, open for reading and writing.

    Raises
    ------
    TargetError
        If the disk is full or the file can't be made.
    """
    flags = os.O_RDWR | os.O_CREAT | (0 if keep else os.O_TRUNC) | os.O_CLOEXEC
    try:
        try:
            fd = os.open(path, flags, 0o666)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, flags, 0o666)
    except OSError as error:
        raise target_error(error, path) from error
    try:
        if nbytes:
            _reserve(fd, nbytes)
    except OSError as error:
        os.close(fd)
        raise target_error(error, path) from error
    return fd


def _reserve(fd: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(fd, nbytes)


def write_at(fd: int, data: bytes, offset: int) -> None:
    """Write all of some bytes at an offset of a file."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def target_error(error: OSError, path: Path) -> TargetError:
    """An operating system's error while writing, as one of ours."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return TargetError(
            f"no space left: {error.strerror}",
            where=path,
            hint="free some space, or choose a target on another disk; nothing was committed",
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return TargetError(
            f"can't be written: {error.strerror}", where=path, hint="check the folder's permissions"
        )
    return TargetError(f"can't be written: {error.strerror}", where=path)
