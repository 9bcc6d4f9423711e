"""How does a folder belong to one process at a time?

By a lock on a file in it, which the system takes back when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
from pathlib import Path

from reshard.errors import TargetError

NAME = "lock"
"""Name of the file."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class FolderLock:
    """Makes a folder and holds it.

    Parameters
    ----------
    folder
        The folder; its parent exists.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / NAME
        self._fd = -1

    def take(self) -> bool:
        """Make the folder if it isn't there, and hold it.

        Returns
        -------
        bool
            Whether it is held; not so where the file system has no locks.

        Raises
        ------
        TargetError
            If another process holds it.
        OSError
            If it can't be made.
        """
        while True:
            self.folder.mkdir(exist_ok=True)
            try:
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:  # the process that held it has just removed it
                continue
            held = False
            try:
                locks = self._lock(fd)
                held = locks and self._is_it(fd)
                if not locks:
                    return False
            finally:
                if not held:
                    os.close(fd)
            if held:
                self._fd = fd
                os.ftruncate(fd, 0)
                os.write(fd, f"process {os.getpid()} on {platform.node()}".encode())
                return True

    def _lock(self, fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(fd, 200).decode(errors="replace") or "another process"
            raise TargetError(
                f"{holder} is working in it",
                where=self.folder,
                hint="wait until it has ended, or choose another target; nothing was written",
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return False
        return True

    def _is_it(self, fd: int) -> bool:
        """Whether a file that was opened still has its name: its holder may have removed it."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(fd), os.stat(self.path))
        return False

    def release(self, *, remove: bool) -> None:
        """Let go of the folder.

        Parameters
        ----------
        remove
            Whether the folder goes too, if nothing else is in it.
        """
        if remove:
            self.path.unlink(missing_ok=True)
            self._remove_folder()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if remove:
            self._remove_folder()  # NFS keeps a name for a file that is open

    def _remove_folder(self) -> None:
        with contextlib.suppress(OSError):  # gone already, or another process has come in
            self.folder.rmdir()
