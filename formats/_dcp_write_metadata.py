"""How is ``.metadata`` written so that torch reads it?

As the pickle of a ``Metadata``, put together without torch. It says nothing of when or where the
checkpoint was written, so that the same state gives the same bytes.

Source: torch 2.13, ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from reshard.box import Box, Shape
from reshard.dtypes import DType
from reshard.formats._dcp_metadata import Blob, Path_
from reshard.pickle_write import Call, Global, NewObj, dump_pickle
from reshard.stored import DTypeName, Size

_MODULE = "torch.distributed.checkpoint.metadata"
_CONTIGUOUS = 0  # _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT


@dataclass(frozen=True, slots=True)
class TensorRow:
    """A tensor: its path, shape, element type, and its chunks with their blobs."""

    path: Path_
    shape: Shape
    dtype: DType
    chunks: tuple[tuple[Box, Blob], ...]


@dataclass(frozen=True, slots=True)
class ValueRow:
    """A value that isn't a tensor: its path and blob."""

    path: Path_
    blob: Blob


def metadata(
    rows: Iterable[TensorRow | ValueRow], extra: Mapping[str, object] | None = None
) -> bytes:
    """The content of ``.metadata``; ``extra`` are further fields."""
    described: dict[Any, Any] = {}
    paths: dict[Any, Any] = {}
    storage: dict[Any, Any] = {}
    layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = Call(Global(_MODULE, "_MEM_FORMAT_ENCODING"), (_CONTIGUOUS,))
    for row in rows:
        key = ".".join(map(str, row.path))
        paths[key] = row.path
        if isinstance(row, ValueRow):
            described[key] = _new("BytesStorageMetadata", None)
            storage[_index(key, None, None)] = _info(row.blob)
            continue
        state = (DTypeName(str(row.dtype.torch)), layout, False, contiguous, False)
        chunks = []
        for i, (box, blob) in enumerate(row.chunks):
            where = {"offsets": Size(box.start), "sizes": Size(box.shape)}
            chunks.append(_new("ChunkStorageMetadata", where))
            storage[_index(key, box.start, i)] = _info(blob)
        described[key] = _new(
            "TensorStorageMetadata",
            {
                "properties": _new("TensorProperties", state),
                "size": Size(row.shape),
                "chunks": chunks,
            },
        )
    meta: dict[str, Any] = {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}
    return dump_pickle(
        _new(
            "Metadata",
            {
                "state_dict_metadata": described,
                "planner_data": paths,
                "storage_data": storage,
                "storage_meta": _new("StorageMeta", meta),
                "version": "1.0.0",
                **(extra or {}),
            },
        )
    )


def _new(name: str, state: object) -> NewObj:
    return NewObj(Global(_MODULE, name), state)


def _index(key: str, offset: Shape | None, number: int | None) -> NewObj:
    where = None if offset is None else Size(offset)
    return _new("MetadataIndex", {"fqn": key, "offset": where, "index": number})


def _info(blob: Blob) -> NewObj:
    state = {"relative_path": blob.file, "offset": blob.offset, "length": blob.length}
    return NewObj(Global("torch.distributed.checkpoint.filesystem", "_StorageInfo"), state)
