"""How does ``dcp.load`` read a checkpoint of any format?

Each rank opens the checkpoint, which reads no payload, and tells torch of one chunk a tensor: the
whole. What torch then asks for are the boxes that the rank's own shards need; these and nothing
else are read, wherever they lie.

Source: torch 2.13, ``torch/distributed/checkpoint/storage.py``.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from reshard.api import open_manifest
from reshard.box import Box
from reshard.dcp.catalog import Catalog
from reshard.dtypes import FLOATS
from reshard.engine.values import as_tensor, dtype_of_torch, torch_dtype, unpack
from reshard.errors import RequestError
from reshard.layout import TensorKey
from reshard.manifest import Manifest
from reshard.read import Reader

PIECE = 64 << 20
"""Bytes that are read at a time: what a shard needs beyond its own memory."""


class ZReader(StorageReader):
    """Reads a checkpoint of any format for ``torch.distributed.checkpoint.load``.

    Parameters
    ----------
    path
        The checkpoint, or a folder that holds it.
    format
        Which one is meant, where a folder holds checkpoints of several formats.
    model, optimizer
        What the state dict calls the model and the optimizer. ``model=""`` is for a state dict
        that is the model's own.
    strict
        Whether it is an error that the checkpoint has tensors that the state dict doesn't ask for.

    Attributes
    ----------
    unread
        Keys of the checkpoint's tensors that no rank asked for; known on the coordinator.

    Notes
    -----
    Weights are the masters where the checkpoint has any. A float tensor may be loaded into one of
    another float type, unless a value overflows; no other type is converted.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        format: str | None = None,
        model: str = "model",
        optimizer: str = "optim",
        strict: bool = False,
    ) -> None:
        super().__init__()
        self.path = Path(path)
        self.unread: tuple[str, ...] = ()
        self._format = format
        self._names = model, optimizer
        self._strict = strict
        self._manifest: Manifest | None = None
        self._catalog = Catalog({}, {})
        self._reader: Reader | None = None

    @property
    def nbytes_read(self) -> int:
        """Bytes of tensors that this rank has read so far."""
        return 0 if self._reader is None else self._reader.nbytes_read

    # -- what torch calls, in this order ----------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, perhaps with another checkpoint."""
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)
        self._manifest, self._reader, self.unread = None, None, ()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Open the checkpoint.

        Raises
        ------
        ReshardError
            If there is none, or it is damaged or incomplete.
        """
        manifest = open_manifest(self.path, self._format)
        self._manifest, self._reader = manifest, Reader(manifest)
        self._catalog = Catalog.of(manifest, *self._names)
        described: dict[str, Any] = {key: BytesStorageMetadata() for key in self._catalog.values}
        for key, found in self._catalog.tensors.items():
            size = torch.Size(found.shape)
            described[key] = TensorStorageMetadata(
                properties=TensorProperties(dtype=torch_dtype(found.dtype)),
                size=size,
                chunks=[ChunkStorageMetadata(torch.Size([0] * len(size)), size)],
            )
        return Metadata(state_dict_metadata=described, storage_data={})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: the checkpoint is open."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Take the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See what no rank asks for.

        Raises
        ------
        RequestError
            If there is anything, and the reader is strict.
        """
        asked = {item.storage_index.fqn for plan in plans for item in plan.items}
        empty = {key for key, found in self._catalog.tensors.items() if 0 in found.shape}
        self.unread = tuple(k for k in self._catalog.tensors if k not in asked | empty)
        if self._strict and self.unread:
            more = f" and {len(self.unread) - 5} more" if len(self.unread) > 5 else ""
            raise RequestError(
                f"the state dict doesn't ask for {', '.join(self.unread[:5])}{more}",
                where=self.path,
                hint="ask for them, or load without strict",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank asks for into its tensors.

        Raises
        ------
        RequestError
            If a tensor's element type can't be converted, or a value overflows.
        """
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._value(item.storage_index.fqn))
            else:
                target = planner.resolve_tensor(item).detach()
                self._tensor(item, target)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether there is something at that path."""
        return Path(checkpoint_id).exists()

    # -- reading ----------------------------------------------------------------------------------

    def _value(self, key: str) -> io.BytesIO:
        stream = io.BytesIO()
        torch.save(unpack(self._catalog.values[key], self._whole), stream)
        stream.seek(0)
        return stream

    def _whole(self, key: TensorKey) -> Any:
        assert self._manifest is not None
        assert self._reader is not None
        tensor = self._manifest.tensors[key]
        return self._reader.region(tensor, Box.whole(tensor.shape))

    def _tensor(self, item: ReadItem, target: torch.Tensor) -> None:
        index: MetadataIndex = item.storage_index
        found = self._catalog.tensors[index.fqn]
        self._check_type(index.fqn, target)
        start, sizes = tuple(item.storage_offsets), tuple(item.lengths)
        box = Box(start, tuple(a + n for a, n in zip(start, sizes, strict=True)))
        if found.array is not None:
            where = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
            _put(index.fqn, target, as_tensor(np.asarray(found.array[where])))
            return
        assert self._manifest is not None
        assert self._reader is not None
        assert found.tensor is not None
        tensor = self._manifest.tensors[found.tensor]
        for piece in pieces(box, tensor.dtype.itemsize):
            part = target
            if box.shape and piece != box:
                first = piece.start[0] - box.start[0]
                part = target[first : first + piece.shape[0]]
            _put(index.fqn, part, as_tensor(self._reader.region(tensor, piece)))

    def _check_type(self, key: str, target: torch.Tensor) -> None:
        own, wanted = self._catalog.tensors[key].dtype, dtype_of_torch(target.dtype)
        if own != wanted and not {own.name, wanted.name} <= FLOATS:
            raise RequestError(
                f"{key} is {own} in the checkpoint and {wanted} in the state dict",
                where=self.path,
                hint="only floats are loaded into another float type",
            )


def pieces(box: Box, itemsize: int) -> Iterator[Box]:
    """A box in parts along dim 0 of at most about :data:`PIECE` bytes."""
    rows = box.shape[0] if box.shape else 0
    if rows < 2 or box.numel * itemsize <= PIECE:
        yield box
        return
    step = max(1, PIECE * rows // (box.numel * itemsize))
    for begin in range(box.start[0], box.stop[0], step):
        end = min(begin + step, box.stop[0])
        yield Box((begin, *box.start[1:]), (end, *box.stop[1:]))


def _put(key: str, target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy, and see that no value became infinite or lost itself on the way."""
    target.copy_(value)
    if target.dtype == value.dtype or not value.numel():
        return
    found = target.to(value.device, torch.float64)
    lost = torch.isfinite(value.to(torch.float64)) & ~torch.isfinite(found)
    if bool(lost.any()):
        example = float(value[lost].reshape(-1)[0]) if value.dim() else float(value)
        raise RequestError(
            f"{key}: {int(lost.sum())} values don't fit {str(target.dtype)[6:]}, {example:g} for "
            "one",
            hint="load it into a type with a larger range",
        )
