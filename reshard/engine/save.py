"""How is the state of an engine saved, all of it or nothing?

Every rank writes the chunks of its own slices into one staging folder and tells rank 0 their
checksums; rank 0 writes what is small, then the manifest, and renames the folder: the checkpoint
is there. Whatever goes wrong on any rank is raised on all, and the path stays untouched.

The ranks first compare what they are about to write (``prepare.py``), by the engine's own messages.
From then on they speak only through the store (``board.py``), so that a thread can do the rest
while training goes on (``job.py``).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.commit import Staging
from reshard.engine import keep
from reshard.engine.data import Position, Samples
from reshard.engine.job import Job
from reshard.engine.prepare import prepare, sources
from reshard.engine.snapshot import Running
from reshard.engine.together import together
from reshard.engine.writer import Source

if TYPE_CHECKING:
    from reshard.engine.state import Stateful


def save(
    engine: Stateful,
    path: str | os.PathLike[str],
    *,
    client: Mapping[str, Any] | None = None,
    scheduler: Any = None,
    data: Samples | Position | None = None,
    blocking: bool = True,
    sync: bool = True,
    keep_last: int | None = None,
) -> Running:
    """Save the state of an engine between two steps. All ranks call this.

    Parameters
    ----------
    engine
        The engine.
    path
        Where the checkpoint will be, on a file system that all ranks share; nothing may be there.
    client
        The script's own state, as plain data and tensors: the same on every rank that gives it.
    scheduler
        Whose ``state_dict()`` is saved.
    data
        Which samples have been read.
    blocking
        Whether the checkpoint is there when this returns. Otherwise the slices are copied and
        written beside the training; a save that is still under way is waited for first.
    sync
        Whether it is on the disk, not only in the page cache, before it has its name.
    keep_last
        How many checkpoints of the folder to keep, this one among them: older ones that this
        engine's saves wrote are deleted once the new one is there (see :mod:`.keep`).

    Returns
    -------
    Running
        ``wait()`` returns when the checkpoint is there.

    Raises
    ------
    NotAtSafePoint
        In the middle of a step. Nothing was written, and the step can go on.
    ReshardError
        If the state can't be saved or the path not written; on every rank, whichever met it. Also
        the error of the last save beside the training, if nobody has met it yet.
    """
    keep.check_keep(keep_last)
    engine.saving.settle()
    target = Path(os.path.abspath(path))
    prepared = prepare(engine, target, client, scheduler, data)
    staging = Staging(target, single_file=False)
    rows: list[Source] = []

    def begin() -> list[str]:
        where = str(staging.begin()) if engine.rank == 0 else ""
        rows.extend(sources(engine, prepared, copy=not blocking))
        return [where, secrets.token_hex(8)]

    try:
        folder, name = together(engine, "save: begin", begin)[0]
    except BaseException:
        if engine.rank == 0:
            staging.abandon()
        raise
    job = Job(
        engine, prepared, staging, Path(folder), rows, name=name, sync=sync, keep_last=keep_last
    )
    running = Running(target, job.run, blocking=blocking)
    engine.saving.running = running
    return running
