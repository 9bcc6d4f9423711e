"""How does ``dcp.save`` write a native checkpoint?

The coordinator lays it out from all ranks' plans in a staging folder; each rank writes its pieces
into the chunks and sends checksums, and small values, back; the coordinator puts the checksums
together, writes the manifest and renames the folder. Until then there is nothing at the path.

Source: torch 2.13, ``torch/distributed/checkpoint/storage.py``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from reshard.box import Box
from reshard.commit import Staging, check_target
from reshard.dcp.saved import manifest_of
from reshard.dcp.sheet import Place, Sheet, box_of, named, sheet
from reshard.digest import CRC64NVME, Sums
from reshard.engine.values import as_array, raw
from reshard.errors import InconsistentError
from reshard.execute import Result
from reshard.formats import native
from reshard.layout import TensorKey
from reshard.read import rows
from reshard.ruler import ints
from reshard.targets import target_error


@dataclass(frozen=True, slots=True)
class _Task:
    """What a rank is told: the staging folder, its files, and where its items lie in them."""

    folder: str
    files: Sequence[str]
    places: Sequence[Sequence[Place] | None]


@dataclass(frozen=True, slots=True)
class _Written:
    """What a rank says of an item: a value that it sends, or the checksums of what it wrote.

    Parameters
    ----------
    value
        An array, or the bytes of a ``torch.save`` file.
    box
        The box of the tensor.
    pieces
        (file, byte, bytes, CRC) of each part of a file.
    runs
        CRC of each run that the box makes of the whole tensor.
    """

    value: Any = None
    box: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    pieces: Sequence[tuple[int, int, int, int]] = ()
    runs: Sequence[int] = ()


class ZWriter(StorageWriter):
    """Writes a native checkpoint for ``torch.distributed.checkpoint.save``.

    Parameters
    ----------
    path
        Where it will stand; nothing may be there. All ranks see the same folder.
    sync
        Whether everything is on the disk when ``save`` returns.

    Notes
    -----
    What ``save`` is given is kept as :class:`~reshard.dcp.ZReader` gives it back. Objects of
    classes of your own are an error: nothing in a native checkpoint is a pickle.
    """

    def __init__(self, path: str | os.PathLike[str], *, sync: bool = True) -> None:
        super().__init__()
        self.path = Path(path)
        self._sync = sync
        self._sheet: Sheet | None = None
        self._staging: Staging | None = None

    # -- what torch calls, in this order ----------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, perhaps at another path."""
        self._give_up()
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)

    def _give_up(self) -> None:
        """Remove what a save has staged that wasn't finished."""
        if self._staging is not None:
            self._staging.abandon()
        self._sheet = self._staging = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse a save without collectives, and a path where something is.

        Raises
        ------
        InconsistentError
            If the ranks don't plan together.
        TargetError
            If something is at the path.
        """
        self._give_up()  # of an earlier save, in which another rank failed
        if not kwargs.get("use_collectives", True):
            raise InconsistentError(
                "a native checkpoint is planned by all ranks together",
                where=self.path,
                hint="save with use_collectives=True",
            )
        if is_coordinator:
            check_target(self.path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Take the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Lay the checkpoint out, make its files, and tell each rank its places.

        Raises
        ------
        TargetError
            If the files can't be made.
        """
        found = sheet(plans, self.path)
        native.check_fits(found.manifest)
        staging = Staging(self.path, single_file=False)
        folder = staging.begin()
        self._sheet, self._staging = found, staging
        try:
            for file in found.manifest.files:
                _make(folder / file.path, file.nbytes)
        except BaseException:
            self._give_up()
            raise
        places = found.places()
        files = [file.path for file in found.manifest.files]

        def of(item: WriteItem) -> Sequence[Place] | None:
            if item.index.fqn in found.sent:
                return None
            box = box_of(item)
            return places[item.index.fqn, box] if box.numel else ()

        tasks = (_Task(str(folder), files, [of(item) for item in plan.items]) for plan in plans)
        return [replace(p, storage_data=task) for p, task in zip(plans, tasks, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's pieces.

        Raises
        ------
        TargetError
            If a file can't be written.
        """
        task = plan.storage_data
        assert isinstance(task, _Task)
        with _Files(task, sync=self._sync) as files:
            results = [
                _result(item, self._write(files, planner.resolve_data(item), item, places))
                for item, places in zip(plan.items, task.places, strict=True)
            ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest, and rename the folder to its path."""
        assert self._sheet is not None
        assert self._staging is not None
        written = [(r.index.fqn, r.storage_data) for some in results for r in some]
        sent = {key: one.value for key, one in written if one.value is not None}
        try:
            manifest = manifest_of(self._sheet, sent)
            native.check_fits(manifest)
            native.write_metadata(self._staging.path, manifest, _summed(self._sheet, written))
            self._staging.commit(sync=self._sync)
            self._sheet = self._staging = None
        finally:
            self._give_up()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it can be a path."""
        return bool(os.fspath(checkpoint_id))

    # -- a piece ----------------------------------------------------------------------------------

    def _write(
        self, files: _Files, data: Any, item: WriteItem, places: Sequence[Place] | None
    ) -> _Written:
        if item.type == WriteItemType.BYTE_IO:
            return _Written(value=data.getvalue())
        assert isinstance(data, Tensor)
        assert item.tensor_data is not None
        box, whole = box_of(item), Box.whole(tuple(item.tensor_data.size))
        if not box.numel and whole.numel:
            return _Written()  # an empty shard
        if places is None:
            return _Written(value=as_array(data))
        found = raw(data)
        pieces = []
        for file, begin, at, nbytes in places:
            view = found[at : at + nbytes].data
            files.write(file, view, begin)
            pieces.append((file, begin, nbytes, CRC64NVME.of(view)))
        starts, _ = rows(box, whole) if box.numel else (ints([]), 0)
        runs = found.reshape(max(len(starts), 1), -1)
        crcs = [CRC64NVME.of(run.data) for run in runs] if box.numel else []
        return _Written(box=(box.start, box.stop), pieces=pieces, runs=crcs)


def _result(item: WriteItem, written: _Written) -> WriteResult:
    index: MetadataIndex = item.index
    return WriteResult(index, sum(p[2] for p in written.pieces), written)


def _make(path: Path, nbytes: int) -> None:
    """A file of zeros: padding stays as it is."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            os.truncate(file.fileno(), nbytes)
    except OSError as error:
        raise target_error(error, path) from error


class _Files:
    """The files that a rank writes to, open one at a time: its items come in any order."""

    def __init__(self, task: _Task, *, sync: bool) -> None:
        self._task = task
        self._sync = sync
        self._fds: dict[int, int] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for file, fd in self._fds.items():
            try:
                if self._sync:
                    os.fsync(fd)
            except OSError as error:
                raise target_error(error, self._path(file)) from error
            finally:
                os.close(fd)
        self._fds = {}

    def _path(self, file: int) -> Path:
        return Path(self._task.folder, self._task.files[file])

    def write(self, file: int, view: memoryview, at: int) -> None:
        """Write bytes at a place of a file."""
        try:
            fd = self._fds.get(file)
            if fd is None:
                fd = self._fds[file] = os.open(self._path(file), os.O_WRONLY | os.O_CLOEXEC)
            while view:
                done = os.pwrite(fd, view, at)
                view, at = view[done:], at + done
        except OSError as error:
            raise target_error(error, self._path(file)) from error


# -- checksums ------------------------------------------------------------------------------------


def _summed(found: Sheet, written: Sequence[tuple[str, _Written]]) -> Result:
    """The checksums of all chunks and tensors, put together from those of pieces."""
    manifest = found.manifest
    sizes = ints([file.nbytes for file in manifest.files])
    regions = Sums(CRC64NVME, sizes)
    tensors = list(manifest.tensors.values())
    number = {tensor.key: i for i, tensor in enumerate(tensors)}
    messages = Sums(CRC64NVME, ints([tensor.nbytes for tensor in tensors]))
    keys = _tensor_keys(found)
    ends: dict[int, list[tuple[int, int]]] = {}
    for key, one in written:
        for file, begin, nbytes, crc in one.pieces:
            regions.add_one(file, begin, nbytes, crc)
            ends.setdefault(file, []).append((begin, nbytes))
        if one.box is not None and one.runs:
            tensor = tensors[number[keys[key]]]
            starts, run = rows(Box(*one.box), Box.whole(tensor.shape))
            width = tensor.dtype.itemsize
            messages.add(
                np.full(len(starts), number[tensor.key], np.int64),
                starts * width,
                np.full(len(starts), run * width, np.int64),
                np.array(one.runs, np.uint64),
            )
    for file, nbytes in enumerate(sizes.tolist()):
        _add_padding(regions, file, nbytes, sorted(ends.get(file, [])))
    digests = {tensor.key: messages.value(i) for i, tensor in enumerate(tensors)}
    of_region: NDArray[np.uint64] = regions.values()[manifest.regions.files]
    return Result(digests, of_region, int(sizes.sum()), 0)


def _add_padding(regions: Sums, file: int, nbytes: int, pieces: list[tuple[int, int]]) -> None:
    at = 0
    gaps: list[tuple[int, int]] = []
    for begin, length in (*pieces, (nbytes, 0)):
        if begin > at:
            gaps.append((at, begin - at))
        at = max(at, begin + length)
    if gaps:
        where = np.full(len(gaps), file, np.int64)
        regions.add_zeros(where, ints([g[0] for g in gaps]), ints([g[1] for g in gaps]))


def _tensor_keys(found: Sheet) -> dict[str, TensorKey]:
    return {key: (name, state) for key, name, state in named(found.keys)}
