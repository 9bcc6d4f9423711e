"""What do scripts call?

The verbs of the library, over whatever formats there are: :func:`open`, :func:`convert`,
:func:`consolidate`, :func:`prepare`, :func:`verify`, :func:`diff`. The command line is a thin
layer over them.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.checkpoint import Checkpoint
from reshard.conversion import Job, Wanted, planned
from reshard.coverage import check
from reshard.execute import Options
from reshard.formats import detect, formats
from reshard.manifest import Manifest
from reshard.report import Report

if TYPE_CHECKING:
    from reshard.difference import Difference
    from reshard.verification import Verified

Place = str | os.PathLike[str]


def open_manifest(path: Place, format: str | None = None) -> Manifest:
    """Read what the checkpoint at a path says of itself, and check that it is whole.

    Parameters
    ----------
    path
        The checkpoint, or a folder that holds it.
    format
        Which one is meant, where a folder holds checkpoints of several formats.

    Raises
    ------
    ReshardError
        If there is none, or it is damaged or incomplete.
    """
    found_format, found = detect(Path(path), format)
    manifest = found_format.open(found.root)
    check(manifest)
    return manifest


def open(path: Place, format: str | None = None) -> Checkpoint:
    """Open a checkpoint of any format; tensors are read when they are asked for.

    Parameters
    ----------
    path
        The checkpoint, or a folder that holds it.
    format
        Which one is meant, where a folder holds checkpoints of several formats.

    Returns
    -------
    Checkpoint
        A mapping from names to lazy tensors.

    Raises
    ------
    ReshardError
        If there is none, or it is damaged or incomplete.
    """
    return Checkpoint(open_manifest(path, format))


def prepare(
    source: Place | Manifest,
    target: Place,
    wanted: Wanted | None = None,
    options: Options | None = None,
) -> Job:
    """Check and plan a conversion without doing it; ``.report`` says what it would do."""
    manifest = source if isinstance(source, Manifest) else open_manifest(source)
    return planned(manifest, target, wanted or Wanted(), options or Options(), formats())


def convert(
    source: Place | Manifest,
    target: Place,
    wanted: Wanted | None = None,
    options: Options | None = None,
) -> Report:
    """Convert a checkpoint to another world size, stage or format.

    A conversion that was killed goes on where it was when it is called again.

    Parameters
    ----------
    source
        A checkpoint of any format.
    target
        Where the new one will stand; nothing may be there.
    wanted
        What is asked for: world size, stage, format, casts.
    options
        How to move bytes: workers, memory, progress.

    Returns
    -------
    Report
        What was done.

    Raises
    ------
    ReshardError
        If anything is wrong; the target's path is untouched then.
    """
    return prepare(source, target, wanted, options).run()


def consolidate(
    source: Place | Manifest,
    target: Place,
    wanted: Wanted | None = None,
    options: Options | None = None,
) -> Report:
    """Put the whole tensors of a checkpoint into safetensors.

    A target that ends in ``.safetensors`` is one file, any other a folder with an index. The
    weights are the fp32 masters where there are any (``Wanted(state="param")`` for the others).
    """
    wanted = replace(wanted or Wanted(), format="safetensors")
    return convert(source, target, wanted, options)


def verify(path: Place, options: Options | None = None) -> Verified:
    """Read all bytes of a checkpoint and check whatever they can be checked against.

    Returns
    -------
    Verified
        What was checked, and every problem that was found.
    """
    from reshard.verification import verify as verified

    return verified(open_manifest(path), options)


def diff(a: Place, b: Place, options: Options | None = None) -> Difference:
    """Say in what two checkpoints differ, whatever their formats and layouts."""
    from reshard.difference import diff as compared

    return compared(open_manifest(a), open_manifest(b), options)
