"""How does a target come into being all at once, or not at all?

Everything is written into a staging folder beside the target, brought to disk, and then renamed:
one atomic step. Until that step the target's path is untouched, and after it the target is whole.

The staging folder belongs to one process at a time (:mod:`reshard.lock`). What a killed process
left in it stays there for the next one, which goes on from it or removes it
(:mod:`reshard.resume`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from reshard.errors import TargetError
from reshard.lock import FolderLock
from reshard.targets import make_file, target_error

SUFFIX = ".zreshard-partial"


def write_file(path: Path, data: bytes) -> None:
    """Write a small file; :meth:`Staging.commit` brings it to disk."""
    fd = make_file(path, 0)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    except OSError as error:
        raise target_error(error, path) from error
    finally:
        os.close(fd)


def sync_path(path: Path) -> None:
    """Bring a file, or a folder's list of names, to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Staging:
    """A folder beside the target in which it is made.

    Parameters
    ----------
    target
        The path that the target will have.
    single_file
        Whether the target is one file.

    Attributes
    ----------
    folder
        The staging folder.
    shared
        Whether a later process can go on from it. Where the file system has no locks it can't:
        the folder then has a name that no other process uses.
    path
        Where the payload is written, inside of it: the target's folder, or its one file.
    journal
        Where it is written down what is complete.
    """

    def __init__(self, target: Path, *, single_file: bool) -> None:
        self.target = target
        self.single_file = single_file
        self.folder = target.parent / f".{target.name}{SUFFIX}"
        self.shared = True
        self._made: list[Path] = []
        self._lock = FolderLock(self.folder)
        self._ours = False

    @property
    def path(self) -> Path:
        """Where the payload is written."""
        return self.folder / "payload"

    @property
    def journal(self) -> Path:
        """Where it is written down what is complete."""
        return self.folder / "journal"

    def occupied(self) -> int:
        """Bytes of the disk that an earlier process's leftovers take."""
        blocks = 0
        for folder, _, files in os.walk(self.folder):
            for name in files:
                with contextlib.suppress(FileNotFoundError):  # another process removes it
                    blocks += os.lstat(Path(folder, name)).st_blocks
        return 512 * blocks  # the unit of st_blocks, whatever the file system's is

    def begin(self, *, keep: bool = False) -> Path:
        """Make the folder, or take it over; returns :attr:`path`.

        Parameters
        ----------
        keep
            Whether what an earlier process left in it stays.

        Raises
        ------
        TargetError
            If the target exists, another process is writing it, or its folder can't be written.
        """
        check_target(self.target)
        parents = (self.target.parent, *self.target.parent.parents)
        self._made = [p for p in parents if not p.exists()]
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self.shared = self._lock.take()
            if not self.shared:
                self._lock.release(remove=True)
                name = tempfile.mkdtemp(prefix=f"{self.folder.name}-", dir=self.folder.parent)
                self.folder = Path(name)
            self._ours = True
            if not keep or not self.shared:
                self.clear()
        except OSError as error:
            self.leave()
            raise target_error(error, self.target) from error
        return self.path

    def clear(self) -> None:
        """Remove what is in the folder; nothing of it can come back after a power cut.

        Raises
        ------
        OSError
            If something can't be removed.
        """
        if self._remove_all():
            sync_path(self.folder)
        if not self.single_file:
            self.path.mkdir()

    def _remove_all(self) -> int:
        """Remove all but the lock; returns how much there was."""
        inside = [p for p in self.folder.iterdir() if p != self._lock.path]
        # the journal first: without it nothing that is left can be taken for complete
        for path in sorted(inside, key=lambda p: p != self.journal):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        return len(inside)

    def commit(self, *, sync: bool = True) -> None:
        """Bring everything to disk and rename: the target is there now.

        Parameters
        ----------
        sync
            Whether it is on the disk when the call returns, and before it has its name.
        """
        try:
            if sync:
                for folder, _, files in os.walk(self.path):
                    for name in (*files, ""):
                        sync_path(Path(folder, name))
                if self.single_file:
                    sync_path(self.path)
            check_target(self.target)
            os.rename(self.path, self.target)
            if sync:
                sync_path(self.target.parent)
            self._remove_folder()
        except OSError as error:
            raise target_error(error, self.target) from error

    def _remove_folder(self) -> None:
        try:
            with contextlib.suppress(FileNotFoundError):  # gone already
                self._remove_all()
                if not self.shared:
                    self.folder.rmdir()
        finally:
            self._lock.release(remove=True)
            self._ours = False

    def abandon(self) -> None:
        """Remove what was staged, and folders that were made for it and are empty.

        What another process stages at the same place is left alone.
        """
        if self._ours:
            self._remove_folder()
        for parent in self._made:
            with contextlib.suppress(OSError):  # not empty: somebody else uses it now
                parent.rmdir()

    def leave(self) -> bool:
        """Leave what is complete to a later process; returns whether there can be anything."""
        useful = self.shared and self.journal.exists() and self.path.exists()
        if useful:
            self._lock.release(remove=False)
            self._ours = False
        else:
            self.abandon()
        return useful


def check_target(target: Path) -> None:
    """Refuse a target that exists.

    Raises
    ------
    TargetError
        If something is at the path (an empty folder is allowed).
    """
    if not os.path.lexists(target):
        return
    if target.is_dir() and not target.is_symlink() and not any(target.iterdir()):
        return
    raise TargetError(
        "exists already",
        where=target,
        hint="nothing was written; choose another path, or move what is there away first",
    )
