"""How is the state of an engine saved, all of it or nothing?

Every rank writes the chunks of its own slices into one staging folder and tells rank 0 their
checksums; rank 0 writes what is small, then the manifest, and renames the folder: the checkpoint
is there. Whatever goes wrong on any rank is raised on all, and the path stays untouched.

The ranks first compare what they are about to write, by the engine's own messages. From then on
they speak only through the store, so that a thread can do the rest while training goes on.
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.array_path import array_path
from reshard.commit import Staging, sync_path
from reshard.digest import CRC64NVME, Sums
from reshard.engine import keep, manifest, random_state
from reshard.engine.data import Position, Samples
from reshard.engine.manifest import ENGINE, Extras, Said
from reshard.engine.snapshot import Running
from reshard.engine.state import NotAtSafePoint
from reshard.engine.together import packed, together, unpacked
from reshard.engine.values import pack, raw
from reshard.engine.writer import SliceWriter, Source, Wrote
from reshard.errors import InconsistentError, ReshardError
from reshard.execute import Result
from reshard.formats import native
from reshard.layout import Layout
from reshard.manifest import Manifest
from reshard.plain import encode

if TYPE_CHECKING:
    from torch import Tensor

    from reshard.engine.state import Stateful

PATIENCE = 600.0
"""Seconds without a sign from a rank after which a save is given up."""


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
    prepared = _prepare(engine, target, client, scheduler, data)
    staging = Staging(target, single_file=False)
    sources: list[Source] = []

    def begin() -> str:
        where = str(staging.begin()) if engine.rank == 0 else ""
        sources.extend(_sources(engine, prepared, copy=not blocking))
        return where

    try:
        folder = Path(together(engine, "save: begin", begin)[0])
    except BaseException:
        if engine.rank == 0:
            staging.abandon()
        raise
    engine.saving.serial += 1
    job = _Job(engine, prepared, staging, folder, sources, sync=sync, keep_last=keep_last)
    running = Running(target, job.run, blocking=blocking)
    engine.saving.running = running
    return running


def _check_safe(engine: Stateful) -> None:
    why = engine.unsafe()
    if why is not None:
        raise NotAtSafePoint(
            f"this is the middle of a step ({why}), so nothing was saved",
            hint="save between the optimizer's step and the next forward",
        )


# -- what is saved --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """What is to be written.

    Parameters
    ----------
    slices
        The manifest of the flats alone, as every rank has it.
    whole
        Rank 0: makes the whole manifest, and what it adds to the slices, of all random states.
    rng
        This rank's random state.
    """

    slices: Manifest
    whole: Callable[[Sequence[bytes]], tuple[Manifest, Extras]]
    rng: bytes


def _prepare(
    engine: Stateful, target: Path, client: Any, scheduler: Any, data: Samples | Position | None
) -> _Prepared:
    """Ask every rank what it has, and see that it all fits."""
    rng = random_state.capture()
    tensors: dict[str, Tensor] = {}
    objects: dict[str, Any] = {}

    def say() -> dict[str, Any]:
        _check_safe(engine)
        plain, found = pack(client, "client")
        tensors.update(found)
        objects.update(_objects(engine, plain, scheduler, data))
        digest = None if client is None else _digest(plain, tensors)
        return asdict(manifest.say(engine, rng, digest))

    said = [Said(**one) for one in together(engine, "save: what is there", say)]
    _check_same(said)
    states = manifest.agreed_states(engine.flats, said)
    scalars, unstepped = manifest.group_scalars(engine.flats, len(engine.groups), said)
    objects[ENGINE]["unstepped"] = unstepped
    groups = manifest.param_groups(engine, scalars)
    aliases = dict(engine.aliases)
    flats = manifest.layout_of(engine, states)
    if engine.rank == 0:  # training goes on, and may change them
        buffers = {name: one.detach().clone() for name, one in engine.buffers.items()}
        tensors = {name: one.detach().clone() for name, one in tensors.items()}
    else:
        buffers = {}

    def whole(rngs: Sequence[bytes]) -> tuple[Manifest, Extras]:
        more = manifest.extras(buffers, tensors, rngs, flats.world)
        layout = Layout((*flats.spaces, *more.spaces), flats.mesh, flats.stage)
        made = native.new_manifest(layout, target, groups=groups, aliases=aliases, objects=objects)
        native.check_fits(made)
        return made, more

    return _Prepared(native.new_manifest(flats, target), whole, rng)


def _objects(
    engine: Stateful, client: Any, scheduler: Any, data: Samples | Position | None
) -> dict[str, Any]:
    import torch

    counters = dict(engine.counters)
    position = data.position if isinstance(data, Samples) else data
    kind = type(engine.optimizer)
    own = {
        "optimizer": f"{kind.__module__}.{kind.__qualname__}",
        "world": engine.shards,
        "ranks": engine.size,
        "counters": counters,
        "seed": torch.initial_seed(),
        "data": None if position is None else position.to_plain(),
        "scheduler": None if scheduler is None else type(scheduler).__name__,
    }
    state = None if scheduler is None else pack(dict(scheduler.state_dict()), "scheduler")[0]
    objects = {"step": counters.get("step"), "scheduler": state, "client": client, ENGINE: own}
    encode(objects)  # raises here what can't be plain data
    return objects


def _digest(plain: Any, tensors: Mapping[str, Tensor]) -> str:
    """Digest of the script's state."""
    crc = CRC64NVME.of(json.dumps(encode(plain), sort_keys=True).encode())
    for name in sorted(tensors):
        crc = CRC64NVME.of(raw(tensors[name]), crc)
    return CRC64NVME.hex(crc)


def _check_same(said: Sequence[Said]) -> None:
    for rank, one in enumerate(said):
        if one.about != said[0].about:
            raise InconsistentError(
                "the ranks don't save the same: parameters, groups, stage or step differ",
                where=f"ranks 0 and {rank}",
            )
        if one.client is not None and one.client != said[0].client:
            raise InconsistentError(
                "the client state differs between ranks, and one of them would be lost",
                where=f"ranks 0 and {rank}",
                hint="give what is the same everywhere, or gather it on rank 0 and give it there",
            )


def _sources(engine: Stateful, prepared: _Prepared, *, copy: bool) -> list[Source]:
    """The slices as bytes, copied where they may change or aren't in this memory."""
    if engine.replica:
        return []
    rows: list[tuple[int, str, list[tuple[int, Tensor]]]] = []
    flats = [flat for flat in engine.flats if flat.entries]
    for index, flat in enumerate(flats):
        for state in prepared.slices.space(index).states:
            held = engine.states(flat)
            parts = list(engine.parts(flat, state)) if state in held else []
            rows.append((index, state, parts))
    tensors = [tensor for _, _, parts in rows for _, tensor in parts]
    away = any(t.device.type != "cpu" for t in tensors)
    found = iter(engine.saving.area.copy(tensors) if copy or away else [raw(t) for t in tensors])
    return [
        Source(index, state, [(begin, next(found)) for begin, _ in parts])
        for index, state, parts in rows
    ]


# -- writing --------------------------------------------------------------------------------------


class _Job:
    """Writes a checkpoint: what a thread does, or the caller itself."""

    def __init__(
        self,
        engine: Stateful,
        prepared: _Prepared,
        staging: Staging,
        folder: Path,
        sources: list[Source],
        *,
        sync: bool,
        keep_last: int | None,
    ) -> None:
        self._prepared, self._staging, self._sources = prepared, staging, sources
        self._folder = folder  # of rank 0's staging, which other ranks only write into
        self._sync, self._keep_last = sync, keep_last
        self._rank, self._shard, self._replica = engine.rank, engine.shard, engine.replica
        self._board = _Board(engine)

    def run(self) -> None:
        """Write, and wait until the checkpoint is there.

        Raises
        ------
        ReshardError
            What went wrong, on any rank.
        """
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
        writer = SliceWriter(
            self._folder,
            self._prepared.slices,
            self._shard,
            sync=self._sync,
            alive=self._board.alive,
        )
        wrote = Wrote((), ()) if self._replica else writer.write(self._sources)
        rng = base64.b64encode(self._prepared.rng).decode("ascii")
        return {"chunks": wrote.chunks, "pieces": wrote.pieces, "rng": rng}

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
        whole, more = self._prepared.whole([base64.b64decode(one["rng"]) for one in said])
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


# -- what ranks tell each other while they write --------------------------------------------------


class _Board:
    """Small messages of one save, in the store that all ranks share."""

    def __init__(self, engine: Stateful) -> None:
        self._store = engine.store
        self._rank, self._size = engine.rank, engine.size
        self._at = f"save/{engine.saving.serial}"
        self._signs = 0

    def tell(self, what: Mapping[str, Any]) -> None:
        """Tell rank 0 how this rank's writing ended."""
        self._put(f"{self._at}/{self._rank}", what)

    def alive(self) -> None:
        """Give a sign."""
        self._signs += 1
        if self._signs % 16 == 1:
            self._put(f"{self._at}/{self._rank}/sign", self._signs)

    def announce(self, error: Mapping[str, Any] | None) -> None:
        """Rank 0: tell all how the save ended."""
        self._put(f"{self._at}/outcome", error)

    def told(self) -> Iterator[Any]:
        """Rank 0: what each rank told, in rank order."""
        for rank in range(self._size):
            yield self._get(f"{self._at}/{rank}", rank)

    def outcome(self) -> Any:
        """How the save ended."""
        return self._get(f"{self._at}/outcome", 0)

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _get(self, key: str, rank: int) -> Any:
        pause, sign = 0.001, b""
        until = time.monotonic() + PATIENCE
        while not self._store.check([key]):
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
            if pause == 0.1 and self._store.check([f"{self._at}/{rank}/sign"]):
                new = self._store.get(f"{self._at}/{rank}/sign")
                if new != sign:
                    sign, until = new, time.monotonic() + PATIENCE
            if time.monotonic() > until:
                raise ReshardError(
                    f"no sign of rank {rank} for {PATIENCE:g} s while a checkpoint was written",
                    hint="see what became of that rank; the checkpoint doesn't exist",
                )
        return json.loads(self._store.get(key))
