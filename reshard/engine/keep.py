"""Which checkpoints of a folder are there, which is the newest, and which can go?

A checkpoint's age is the step that its manifest records, never its name. It counts if it is whole:
every chunk there at its full length. What was interrupted has a name that begins with a dot and
counts for nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from reshard.engine.manifest import ENGINE
from reshard.errors import NotFoundError, RequestError, ReshardError, TargetError
from reshard.formats import native
from reshard.manifest import Manifest

GONE = ".zreshard-old"
"""Ending of a checkpoint that is being deleted."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A whole checkpoint.

    Parameters
    ----------
    step
        The step that it was saved after.
    written
        When its manifest was written, in nanoseconds; of two with one step the later counts.
    path
        Where it is.
    own
        Whether an engine saved it, rather than a conversion made it.
    """

    step: int
    written: int
    path: Path
    own: bool

    @property
    def age(self) -> tuple[int, int]:
        """What they are sorted by."""
        return self.step, self.written


def checkpoints(folder: str | os.PathLike[str]) -> list[Kept]:
    """The whole checkpoints right below a folder, oldest first."""
    return sorted(_found(Path(folder), []), key=lambda kept: kept.age)


def latest(folder: str | os.PathLike[str]) -> Path:
    """The newest whole checkpoint right below a folder.

    Raises
    ------
    NotFoundError
        If there is none, with what is wrong with those that aren't whole.
    """
    refused: list[str] = []
    found = list(_found(Path(folder), refused))
    if not found:
        more = "".join(f"\n  {text}" for text in refused)
        raise NotFoundError(f"holds no complete checkpoint with a step{more}", where=folder)
    return max(found, key=lambda kept: kept.age).path


def _found(folder: Path, refused: list[str]) -> Iterator[Kept]:
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        marker = path / native.MANIFEST
        if path.name.startswith(".") or not marker.is_file():
            continue
        try:
            manifest = native.FORMAT.open(path)
            written = marker.stat().st_mtime_ns
        except (ReshardError, OSError) as error:  # damaged, or deleted while we look
            refused.append(str(error))
            continue
        step = manifest.objects.get("step")
        if isinstance(step, int):
            yield Kept(step, written, path, is_own(manifest))


def is_own(manifest: Manifest) -> bool:
    """Whether an engine saved it: what a conversion makes of that is cut in other spaces."""
    return ENGINE in manifest.objects and any(
        space.name.startswith("flat0.") for space in manifest.layout.spaces
    )


def prune(new: Path, keep_last: int) -> None:
    """Delete older checkpoints beside a new one.

    The new one stays, and of the others that engines saved here those ``keep_last - 1`` with the
    highest steps. Each is renamed first, which is one step: whenever this is interrupted, what is
    there under its name is whole. What an interrupted one left is deleted now.

    Parameters
    ----------
    new
        The checkpoint that was just committed.
    keep_last
        How many are kept, 1 or more.

    Raises
    ------
    TargetError
        If one can't be deleted.
    """
    check_keep(keep_last)
    others = [k for k in checkpoints(new.parent) if k.own and k.path != new]
    spare = max(0, len(others) - (keep_last - 1))
    try:
        for path in [kept.path for kept in others[:spare]]:
            path.rename(path.with_name(f".{path.name}{GONE}"))
        for path in new.parent.glob(f".*{GONE}"):
            shutil.rmtree(path)
    except OSError as error:
        raise TargetError(
            f"older checkpoints can't be deleted: {error.strerror}",
            where=new.parent,
            hint=f"{new.name} is there and whole; delete others by hand",
        ) from error


def check_keep(keep_last: int | None) -> None:
    """Refuse to keep none."""
    if keep_last is not None and keep_last < 1:
        raise RequestError(f"keep_last is {keep_last}", hint="keep 1 or more")
