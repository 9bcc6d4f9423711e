"""How does any checkpoint become this rank's slices?

Whatever the format and the number of ranks that wrote it: each rank reads the bytes of its own
slices, and no others, into memory of its own. All that can go wrong goes wrong before the engine
is touched: names, shapes and states are compared first (:mod:`.wanted`), what the ranks read is
proved by the tensors' digests where the checkpoint has them, and then everything is put in at once.

**Which wins.** Settings of parameter groups, counters, the loss scale, the scheduler and random
numbers come from the checkpoint; how the optimizer computes on this machine (``foreach``,
``fused``) and the sizes of the job stay the engine's. What wasn't taken is told in
:class:`Loaded`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.api import open_manifest
from reshard.box import Box
from reshard.checkpoint import Checkpoint
from reshard.digest import CRC64NVME, Sums
from reshard.engine import keep, random_state
from reshard.engine.data import Position, Samples
from reshard.engine.loss_scale import deepspeed_scale
from reshard.engine.manifest import ENGINE, RNG
from reshard.engine.state import NotAtSafePoint, Restored
from reshard.engine.together import together
from reshard.engine.values import as_tensor, torch_dtype, unpack
from reshard.engine.wanted import Matching, Reading, Wanted
from reshard.errors import CorruptError, InconsistentError, NotFoundError, RequestError
from reshard.formats import native
from reshard.layout import CLIENT, TensorKey, key_text
from reshard.manifest import Manifest, Tensor
from reshard.read import Reader

if TYPE_CHECKING:
    import torch

    from reshard.engine.state import Stateful

STEP = 1 << 20
"""Bytes of a tensor that are read at once: what stays in a processor's cache."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load did.

    Parameters
    ----------
    path
        The checkpoint.
    step
        The step that it was saved after, where it says so.
    taken, left
        What was loaded and what wasn't, one thing a line.
    client
        The script's own state.
    position
        Which samples have been read, where it says so.
    """

    path: Path
    step: int | None
    taken: tuple[str, ...]
    left: tuple[str, ...]
    client: Any
    position: Position | None


def load(
    engine: Stateful,
    path: str | os.PathLike[str],
    *,
    scheduler: Any = None,
    data: Samples | None = None,
    optimizer: bool = True,
) -> Loaded:
    """Load a checkpoint of any format into an engine, on any number of ranks. All ranks call this.

    Parameters
    ----------
    engine
        The engine, between two steps.
    path
        The checkpoint; of a folder of native ones, the newest whole one.
    scheduler
        Whose ``load_state_dict()`` gets the scheduler's state.
    data
        Goes on behind the samples that have been read.
    optimizer
        Whether the optimizer's state and settings are loaded. If not it begins anew.

    Raises
    ------
    RequestError
        If the checkpoint doesn't fit: with everything that doesn't.
    ReshardError
        If it can't be read or is damaged. Whatever is raised, on every rank, the engine is as it
        was.
    """
    engine.saving.settle()
    job = _Load(engine, scheduler, data)
    said = together(engine, "load: what is there", lambda: job.check(Path(path), optimizer))
    for rank, (*one, _) in enumerate(said):
        if one != said[0][:-1]:
            raise InconsistentError(
                f"the ranks see different checkpoints: {said[0][:-1]} and {one}",
                where=f"ranks 0 and {rank}",
                hint="give the same path everywhere, on a file system that all ranks share",
            )
    job.check_taken([one[-1] for one in said])
    rows = together(engine, "load: read", job.read)
    own = [engine.pipeline[0], engine.replica]
    copies = together(engine, "load: which copy", lambda: own)
    together(
        engine,
        "load: digests",
        lambda: job.prove([r for r, k in zip(rows, copies, strict=True) if k == own]),
    )
    together(engine, "load: scheduler", job.check_scheduler)
    return job.install()


class _Load:
    """One load on one rank."""

    manifest: Manifest
    wanted: Wanted
    restored: Restored
    client: Any = None
    position: Position | None = None
    rng: dict[str, Any] | None = None

    def __init__(self, engine: Stateful, scheduler: Any, data: Samples | None) -> None:
        self._engine, self._scheduler, self._data = engine, scheduler, data

    # -- before anything is read ------------------------------------------------------------------

    def check(self, path: Path, optimizer: bool) -> list[Any]:
        """Open the checkpoint and see whether it fits.

        Returns
        -------
        list
            Which one it is; and last, what a stage of a pipeline leaves to the others.
        """
        why = self._engine.unsafe()
        if why is not None:
            raise NotAtSafePoint(
                f"this is the middle of a step ({why}), so nothing was loaded",
                hint="load between the optimizer's step and the next forward",
            )
        self.manifest = open_manifest(_place(path))
        self._checkpoint = Checkpoint(self.manifest)
        self._optimizer = optimizer
        self.wanted = Matching(self.manifest, self._engine).wanted(optimizer=optimizer)
        own = self.manifest.objects.get(ENGINE)
        self._own: Mapping[str, Any] = own if isinstance(own, Mapping) else {}
        self._check_position()
        step = self.manifest.objects.get("step")
        left = list(self.wanted.strange)
        return [str(self.manifest.root), step, len(self.manifest.tensors), left]

    def check_taken(self, left: list[list[str]]) -> None:
        """See that what a stage of a pipeline leaves is another one's.

        Raises
        ------
        RequestError
            If the checkpoint has what no stage has.
        """
        nobodys = sorted(set(left[0]).intersection(*left[1:]))
        if nobodys:
            raise RequestError(
                f"no stage of the pipeline has {', '.join(nobodys[:10])}"
                + (f" and {len(nobodys) - 10} more" if len(nobodys) > 10 else ""),
                where=self.manifest.root,
                hint="nothing was changed",
            )

    def _check_position(self) -> None:
        kept = self._own.get("data")
        if kept is not None:
            self.position = Position.from_plain(kept)
            if self._data is not None:
                copy.copy(self._data).resume(self.position)
        elif self._data is not None:
            self.wanted.left.append("data position: the checkpoint has none; data begins anew")

    # -- reading ----------------------------------------------------------------------------------

    def read(self) -> list[tuple[str, str, int, int, int]]:
        """Read this rank's slices, and all that every rank takes.

        Returns
        -------
        list
            Of each run the name and state in the engine, and its first byte, bytes and checksum
            in the checkpoint.
        """
        reader = Reader(self.manifest)
        rows: list[tuple[str, str, int, int, int]] = []
        slices: dict[str, dict[str, torch.Tensor]] = {}
        for reading in self.wanted.readings:
            one = self._slice(reader, reading, rows)
            slices.setdefault(reading.flat.name, {})[reading.state] = one
        buffers = {n: as_tensor(self._whole(t.key)) for n, t in self.wanted.buffers.items()}
        current = self._engine.buffers
        self.client = unpack(self.manifest.objects.get("client"), self._whole)
        self.rng = self._random()
        self.restored = Restored(
            slices,
            self.wanted.scalars,
            self.wanted.groups,
            {n: b.to(current[n].dtype) for n, b in buffers.items()},
            self._counters(),
        )
        return rows

    def _slice(
        self, reader: Reader, reading: Reading, rows: list[tuple[str, str, int, int, int]]
    ) -> torch.Tensor:
        import torch

        engine, flat = self._engine, reading.flat
        slice_ = torch.zeros(
            flat.part(engine.shards), dtype=reading.dtype, device=self.wanted.device
        )
        for piece in flat.pieces(engine.shard, engine.shards):
            tensor = reading.tensors[piece.entry]
            if tensor is None:
                continue
            step = max(1, STEP // tensor.dtype.itemsize)
            name = flat.entries[piece.entry].name
            end = piece.start + piece.high - piece.low
            for begin in range(piece.start, end, step):
                stop = min(begin + step, end)
                for at, box in Box.whole(tensor.shape).split(begin, stop):
                    array = reader.region(tensor, box)
                    data = array.reshape(-1).view(np.uint8)
                    width = tensor.dtype.itemsize
                    rows.append((name, reading.state, at * width, data.nbytes, CRC64NVME.of(data)))
                    low = piece.low + at - piece.start
                    kind = torch_dtype(tensor.dtype)
                    slice_[low : low + array.size] = torch.from_numpy(data).view(kind)
        return slice_

    def _whole(self, key: TensorKey) -> np.ndarray[Any, Any]:
        """A small tensor, proved by its digest."""
        found = self._checkpoint[key].numpy()
        digest = self.manifest.digests.get(key)
        crc = CRC64NVME.of(np.ascontiguousarray(found).reshape(-1).view(np.uint8))
        if digest is not None and crc != digest:
            raise _damaged(self.manifest, key)
        return found

    def _random(self) -> dict[str, Any] | None:
        key = (f"{RNG}.{self._engine.rank}", CLIENT)
        if self._own.get("ranks") != self._engine.size or key not in self.manifest.tensors:
            return None
        return random_state.parse(self._whole(key).tobytes())

    def _counters(self) -> dict[str, Any]:
        kept = self._own.get("counters")
        if isinstance(kept, Mapping):
            self.wanted.taken.append(f"counters: {', '.join(map(str, kept))}")
            return dict(kept)
        if not self._optimizer:
            self.wanted.left.append("counters: the optimizer begins anew")
            return {}
        step = self.manifest.objects.get("step")
        found = {"step": step} if isinstance(step, int) else {}
        scale = deepspeed_scale(self.manifest.objects.get("deepspeed"))
        if scale:
            self.wanted.taken.append(f"loss scale: {scale['loss_scale']:g}, DeepSpeed's")
        else:
            self.wanted.left.append("loss scale: the checkpoint has no dynamic one")
        return {**found, **scale}

    # -- proof ------------------------------------------------------------------------------------

    def prove(self, rows: list[list[tuple[str, str, int, int, int]]]) -> None:
        """See that what the ranks read together has the tensors' digests.

        Raises
        ------
        CorruptError
            If a tensor's bytes aren't those that were saved.
        """
        made_of: dict[TensorKey, Tensor] = {
            (entry.name, reading.state): tensor
            for reading in self.wanted.readings
            for entry, tensor in zip(reading.flat.entries, reading.tensors, strict=True)
            if tensor is not None and tensor.key in self.manifest.digests
        }
        known = {key: index for index, key in enumerate(made_of)}
        sums = Sums(CRC64NVME, np.array([t.nbytes for t in made_of.values()], np.int64))
        found = [
            (known[name, state], start, nbytes, crc)
            for rank in rows
            for name, state, start, nbytes, crc in rank
            if (name, state) in known
        ]
        if found:
            message, start, nbytes = np.array([r[:3] for r in found], np.int64).T
            sums.add(message, start, nbytes, np.array([r[3] for r in found], np.uint64))
        for tensor, value in zip(made_of.values(), sums.values().tolist(), strict=True):
            if value != self.manifest.digests[tensor.key]:
                raise _damaged(self.manifest, tensor.key)

    # -- putting it in ----------------------------------------------------------------------------

    def check_scheduler(self) -> None:
        """See that the scheduler's state is one of such a scheduler."""
        self._state = None
        if self._scheduler is None:
            if self.manifest.objects.get("scheduler") is not None:
                self.wanted.left.append("scheduler: none was given")
            return
        state = unpack(self.manifest.objects.get("scheduler"), self._whole)
        if state is None:
            self.wanted.left.append("scheduler: the checkpoint has none")
            return
        kind, wrote = type(self._scheduler).__name__, self._own.get("scheduler")
        expected = self._scheduler.state_dict().keys()
        same = wrote in (None, kind) and isinstance(state, Mapping) and state.keys() == expected
        if not same:
            raise RequestError(
                f"the scheduler that was saved ({wrote or 'another program'}'s: "
                f"{', '.join(map(str, state))}) isn't a {kind} ({', '.join(expected)})",
                where=self.manifest.root,
                hint="give a scheduler of the same kind, or none; nothing was changed",
            )
        trial = copy.copy(self._scheduler)
        trial.load_state_dict(copy.deepcopy(state))
        self._state = state

    def install(self) -> Loaded:
        """Put everything in; nothing here can fail any more."""
        engine, wanted = self._engine, self.wanted
        engine.restore(self.restored)
        if self._state is not None:
            self._scheduler.load_state_dict(self._state)
            wanted.taken.append("scheduler")
        if self._data is not None and self.position is not None:
            self._data.resume(self.position)
            wanted.taken.append(f"data position: {self.position.read} samples")
        self._install_random()
        step = self.manifest.objects.get("step")
        return Loaded(
            self.manifest.root,
            step if isinstance(step, int) else None,
            tuple(wanted.taken),
            tuple(wanted.left),
            self.client,
            self.position,
        )

    def _install_random(self) -> None:
        seed, step = self._own.get("seed"), self.manifest.objects.get("step")
        if self.rng is not None:
            random_state.put(self.rng)
            self.wanted.taken.append("random numbers: they go on where they stood")
        elif isinstance(seed, int) and isinstance(step, int):
            random_state.begin(seed, step, self._engine.rank)
            self.wanted.taken.append(
                f"random numbers: streams that begin anew at (seed {seed}, step {step}, rank), "
                f"since {self._own.get('ranks')} ranks saved and {self._engine.size} load"
            )
        else:
            self.wanted.left.append("random numbers: the checkpoint has none")


def _place(path: Path) -> Path:
    """The newest checkpoint of a folder of native ones; any other path as it is."""
    if (path / native.MANIFEST).is_file() or not path.is_dir():
        return path
    if any((p / native.MANIFEST).is_file() for p in path.iterdir() if p.is_dir()):
        try:
            return keep.latest(path)
        except NotFoundError:
            return path  # converted ones, without a step: the format chooses, or says why not
    return path


def _damaged(manifest: Manifest, key: TensorKey) -> CorruptError:
    return CorruptError(
        f"{key_text(key)} isn't what was saved: its digest differs",
        where=manifest.root,
        hint="copy the checkpoint again, or load another one; nothing was changed",
    )
