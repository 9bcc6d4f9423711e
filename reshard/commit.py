"""How does a target come into being all at once, or not at all?

Everything is written into a staging folder beside the target, brought to disk, and then renamed:
one atomic step. Until that step the target's path is untouched, and after it the target is whole.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from reshard.errors import TargetError
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

    Raises
    ------
    TargetError
        If the target exists, or its folder can't be written.
    """

    def __init__(self, target: Path, *, single_file: bool) -> None:
        self.target = target
        self.single_file = single_file
        self.folder = target.parent / f".{target.name}{SUFFIX}"
        self._made: list[Path] = []

    def begin(self) -> Path:
        """Make the folder; returns where the executor writes (the file itself, if it is one)."""
        check_target(self.target)
        parents = (self.target.parent, *self.target.parent.parents)
        self._made = [p for p in parents if not p.exists()]
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            if self.folder.exists():
                shutil.rmtree(self.folder)
            self.folder.mkdir()
        except OSError as error:
            raise target_error(error, self.target) from error
        return self.path

    @property
    def path(self) -> Path:
        """Where the payload is written."""
        return self.folder / self.target.name if self.single_file else self.folder

    def commit(self, *, sync: bool = True) -> None:
        """Bring everything to disk and rename: the target is there now.

        Parameters
        ----------
        sync
            Whether it is on the disk when the call returns, and before it has its name.
        """
        try:
            if sync:
                for folder, _, files in os.walk(self.folder):
                    for name in (*files, ""):
                        sync_path(Path(folder, name))
            check_target(self.target)
            os.rename(self.path, self.target)
            if sync:
                sync_path(self.target.parent)
            if self.single_file:
                self.folder.rmdir()
        except OSError as error:
            raise target_error(error, self.target) from error

    def abandon(self) -> None:
        """Remove what was staged, and folders that were made for it and are empty."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.folder)
        for parent in self._made:
            with contextlib.suppress(OSError):  # not empty: somebody else uses it now
                parent.rmdir()


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
