"""How is a checkpoint written, once it is known what is in it?

Every rank writes the chunks of its own slices and tells rank 0 their checksums; rank 0 writes what
is small, then the manifest, and renames the folder. This is what a thread does beside the training,
or the caller itself.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.array_path import array_path
from reshard.commit import Staging, sync_path
from reshard.digest import CRC64NVME, Sums
from reshard.engine import keep
from reshard.engine.board import Board
from reshard.engine.manifest import Extras
from reshard.engine.prepare import Prepared
from reshard.engine.together import packed, unpacked
from reshard.engine.values import received, sent
from reshard.engine.writer import SliceWriter, Source, Wrote
from reshard.execute import Result
from reshard.formats import native
from reshard.manifest import Manifest

if TYPE_CHECKING:
    from reshard.engine.state import Stateful


class Job:
    """Writes a checkpoint: what a thread does, or the caller itself."""

    def __init__(
        self,
        engine: Stateful,
        prepared: Prepared,
        staging: Staging,
        folder: Path,
        sources: list[Source],
        *,
        name: str,
        sync: bool,
        keep_last: int | None,
    ) -> None:
        self._prepared, self._staging, self._sources = prepared, staging, sources
        self._folder = folder  # of rank 0's staging, which other ranks only write into
        self._sync, self._keep_last = sync, keep_last
        self._rank, self._shard, self._replica = engine.rank, engine.shard, engine.replica
        self._board = Board(engine, name)

    def run(self) -> None:
        """Write, and wait until the checkpoint is there.

        Raises
        ------
        ReshardError
            What went wrong, on any rank.
        """
        with self._board.alive():
            self._run()

    def _run(self) -> None:
        own: BaseException | None = None
        try:
            said: dict[str, Any] = self._write()
        except BaseException as error:  # noqa: BLE001 - raised below, when all ranks know of it
            own, said = error, packed(error)
        self._board.tell(said)
        if self._rank == 0:
            self._board.announce(self._finish())
        outcome = self._board.outcome()
        if own is not None:
            raise own
        if outcome is not None:
            raise unpacked(outcome["error"], outcome["rank"])

    def _write(self) -> dict[str, Any]:
        writer = SliceWriter(self._folder, self._prepared.slices, self._shard, sync=self._sync)
        wrote = Wrote((), ()) if self._replica else writer.write(self._sources)
        rng = base64.b64encode(self._prepared.rng).decode("ascii")
        buffers = {name: sent(one) for name, one in self._prepared.buffers.items()}
        return {"chunks": wrote.chunks, "pieces": wrote.pieces, "rng": rng, "buffers": buffers}

    def _finish(self) -> dict[str, Any] | None:
        """Rank 0: hear from all, and commit or abandon. Returns what went wrong."""
        try:
            said = list(self._board.told())  # nobody writes any more, whatever they told
            for rank, one in enumerate(said):
                if "kind" in one:
                    self._staging.abandon()
                    return {"error": one, "rank": rank}
            self._commit(said)
        except BaseException as error:
            self._board.announce({"error": packed(error), "rank": 0})
            self._staging.abandon()
            raise
        return None

    def _commit(self, said: Sequence[Mapping[str, Any]]) -> None:
        buffers = [{n: received(b) for n, b in one["buffers"].items()} for one in said]
        rngs = [base64.b64decode(one["rng"]) for one in said]
        whole, more = self._prepared.whole(rngs, buffers)
        folder = self._folder
        wrote = [Wrote(one["chunks"], one["pieces"]) for one in said]
        wrote.append(_write_extras(folder, whole, more, sync=self._sync))
        native.write_metadata(folder, whole, _result(whole, wrote))
        native.check_files(folder, whole.files)
        if self._sync:
            _sync(folder, whole)
        self._staging.commit(sync=False)
        target = self._staging.target
        if self._sync:
            sync_path(target.parent)
        if self._keep_last is not None:
            keep.prune(target, self._keep_last)


def _write_extras(folder: Path, whole: Manifest, more: Extras, *, sync: bool) -> Wrote:
    names = [space.name for space in whole.layout.spaces]
    writer = SliceWriter(folder, whole, 0, sync=sync)
    sources = []
    for space in more.spaces:
        (state,) = space.states
        data = np.frombuffer(more.payload[space.name], np.uint8)
        sources.append(Source(names.index(space.name), state, [(0, data)]))
    return writer.write(sources)


def _result(whole: Manifest, wrote: Sequence[Wrote]) -> Result:
    """Put the ranks' checksums together."""
    of_file = np.zeros(len(whole.files), np.uint64)
    keys = {key: index for index, key in enumerate(whole.tensors)}
    sums = Sums(CRC64NVME, np.array([t.nbytes for t in whole.tensors.values()], np.int64))
    names = [[e.name for e in space.entries] for space in whole.layout.spaces]
    seen = 0
    for one in wrote:
        for file, crc in one.chunks:
            of_file[file] = crc
        seen += len(one.chunks)
        rows = [
            (keys[names[space][entry], state], start, nbytes, crc)
            for space, state, entry, start, nbytes, crc in one.pieces
        ]
        if rows:
            message, start, nbytes = np.array([r[:3] for r in rows], np.int64).T
            sums.add(message, start, nbytes, np.array([r[3] for r in rows], np.uint64))
    assert seen == len(whole.files), (seen, len(whole.files))
    digests = dict(zip(whole.tensors, sums.values().tolist(), strict=True))
    total = sum(f.nbytes for f in whole.files)
    return Result(digests, of_file[whole.regions.files], total, 0)


def _sync(folder: Path, whole: Manifest) -> None:
    """Bring metadata and folders to disk; the chunks are there."""
    for space in whole.layout.spaces:
        for state in space.states:
            array = folder / array_path(space.name, state)
            for path in (array / "zarr.json", array / "c", array):
                sync_path(path)
    for path in (folder / "zarr.json", folder / native.MANIFEST, folder):
        sync_path(path)
