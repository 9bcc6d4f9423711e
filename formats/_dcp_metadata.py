"""What does the ``.metadata`` of torch's distributed checkpoint (DCP) say?

It is a pickle of a ``Metadata``: for each key its shape, element type and chunks, and for each
chunk the file, offset and length of its blob. A save without collectives writes one a rank
(``__{rank}.metadata``), with that rank's chunks alone: those are joined here. The pickle is read
safely, and all that is taken from it is checked.

Source: torch 2.13, ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from reshard.box import Box, Shape
from reshard.dtypes import BY_TORCH, DType
from reshard.errors import (
    CorruptError,
    IncompleteError,
    InconsistentError,
    UnsafeError,
    UnsupportedError,
)
from reshard.formats._dcp_names import METADATA, OF_RANK
from reshard.pickle_stubs import Record
from reshard.pickles import load_pickle
from reshard.source import source_error
from reshard.stored import DTypeName, brief

DATA = re.compile(r"__(\d{1,9})_\d+\.distcp")

_INTEGERS = frozenset((int,))

_CHECKPOINT = "torch.distributed.checkpoint."
_METADATA = _CHECKPOINT + "metadata."
_INFO = _CHECKPOINT + "filesystem._StorageInfo"
KNOWN: dict[str, type[Record]] = dict.fromkeys(
    (
        *(
            _METADATA + name
            for name in (
                "Metadata", "TensorStorageMetadata", "BytesStorageMetadata",
                "ChunkStorageMetadata", "TensorProperties", "MetadataIndex", "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        _INFO,
    ),
    Record,
)  # fmt: skip

Path_ = tuple[str | int, ...]
"""Where a value stood in the nested state dict: keys of dicts, indices of lists."""


@dataclass(frozen=True, slots=True)
class Blob:
    """Where a value lies: ``length`` bytes of a file, a whole ``torch.save`` file each.

    Parameters
    ----------
    file
        Relative to the checkpoint.
    offset, length
        In bytes.
    transforms
        What the bytes went through when they were written, such as ``stream.zstd/1``.
    """

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()

    @property
    def rank(self) -> int | None:
        """The rank that wrote it, where the file's name says so."""
        found = DATA.fullmatch(self.file.rpartition("/")[2])
        return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor and the blobs that hold it: one, or one a rank that wrote it."""

    box: Box
    blobs: tuple[Blob, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor: its key, shape, element type and chunks, in the order of their offsets."""

    key: str
    shape: Shape
    dtype: DType
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """All that the metadata of a checkpoint say.

    Parameters
    ----------
    tensors
        Key to tensor.
    values
        Key to the blobs of a value that isn't a tensor: one, or one a rank.
    paths
        Key to its place in the nested state dict.
    per_rank
        Whether each rank wrote metadata of its own.
    flattened
        Key to the shape that a tensor had before Megatron-Core flattened its last dims.
    plans
        How many ranks planned the save, where it is told; else 0.
    """

    tensors: Mapping[str, Stored]
    values: Mapping[str, tuple[Blob, ...]]
    paths: Mapping[str, Path_]
    per_rank: bool
    flattened: Mapping[str, Shape] = field(default_factory=dict)
    plans: int = 0

    def blobs(self) -> Iterator[tuple[str, Blob]]:
        """Every blob with its key."""
        for key, stored in self.tensors.items():
            for chunk in stored.chunks:
                yield from ((key, blob) for blob in chunk.blobs)
        for key, blobs in self.values.items():
            yield from ((key, blob) for blob in blobs)


def metadata_files(root: Path) -> list[Path]:
    """The metadata of a checkpoint: one file, or one a rank in order; none if it is no such folder.

    Raises
    ------
    IncompleteError
        If a rank's is missing.
    """
    if (root / METADATA).is_file():
        return [root / METADATA]
    found = {int(m[1]): p for p in root.iterdir() if (m := OF_RANK.fullmatch(p.name))}
    for rank in range(max(found, default=-1) + 1):
        if rank not in found:
            raise IncompleteError(
                f"__{rank}.metadata is missing: ranks up to {max(found)} wrote theirs",
                where=root,
                hint="copy the checkpoint again; nothing can stand in for it",
            )
    return [found[rank] for rank in sorted(found)]


def read(root: Path) -> Index:
    """Read the metadata of a checkpoint.

    Raises
    ------
    CorruptError, IncompleteError, InconsistentError, UnsafeError, UnsupportedError
        If they are damaged, lack something, disagree, or would run code.
    """
    files = metadata_files(root)
    if not files:
        raise IncompleteError(
            f"has no {METADATA}, which is written last: the save wasn't finished", where=root
        )
    joined = _Joined()
    for path in files:
        _Reading(path, joined).read()
    return joined.index(per_rank=files[0].name != METADATA)


@dataclass(slots=True)
class _Joined:
    """What was read so far, of all ranks."""

    shapes: dict[str, tuple[Shape, DType]] = field(default_factory=dict)
    chunks: dict[str, dict[Box, list[Blob]]] = field(default_factory=dict)
    values: dict[str, list[Blob]] = field(default_factory=dict)
    paths: dict[str, Path_] = field(default_factory=dict)
    flattened: dict[str, Shape] = field(default_factory=dict)
    plans: int = 0

    def index(self, *, per_rank: bool) -> Index:
        tensors = {
            key: Stored(
                key,
                shape,
                dtype,
                tuple(
                    Chunk(box, tuple(blobs))
                    for box, blobs in sorted(self.chunks[key].items(), key=lambda i: i[0].start)
                ),
            )
            for key, (shape, dtype) in self.shapes.items()
        }
        values = {key: tuple(blobs) for key, blobs in self.values.items()}
        paths = {key: self.paths.get(key, (key,)) for key in (*tensors, *values)}
        return Index(tensors, values, paths, per_rank, self.flattened, self.plans)


class _Reading:
    """Reads one file of metadata into what is joined."""

    def __init__(self, path: Path, joined: _Joined) -> None:
        self._path = path
        self._joined = joined
        self._names: dict[str, str] = {}

    def read(self) -> None:
        try:
            data = self._path.read_bytes()
        except OSError as error:
            raise source_error(error, self._path) from error
        found = load_pickle(data, where=str(self._path), known=KNOWN).value
        metadata = self._fields(found, "Metadata")
        if metadata.get("version") not in (None, "1.0.0"):
            raise UnsupportedError(
                f"is of version {brief(metadata['version'])}; this reads 1.0.0", where=self._path
            )
        self._paths(metadata.get("planner_data"))
        self._flattened(metadata.get("mcore_data"))
        plans = metadata.get("all_local_plans")
        self._joined.plans += len(plans) if isinstance(plans, list) else 0
        blobs = self._blobs(metadata.get("storage_data"))
        for key, one in self._dict(metadata.get("state_dict_metadata")).items():
            self._item(key, one, blobs)
        if blobs:
            key, _ = next(iter(blobs))
            raise self._bad(f"places {brief(key)}, which isn't in the state dict")

    def _bad(self, text: str) -> CorruptError:
        return CorruptError(text, where=self._path)

    def _fields(self, value: object, name: str) -> Mapping[str, Any]:
        if not isinstance(value, Record) or value.qualname.rpartition(".")[2] != name:
            raise self._bad(f"has {brief(value)} where a {name} is due")
        return value.fields

    def _dict(self, value: object) -> Mapping[str, Any]:
        if not isinstance(value, dict) or not all(isinstance(k, str) for k in value):
            raise self._bad(f"has {brief(value)} where a dict by key is due")
        return value

    def _paths(self, value: object) -> None:
        for key, path in self._dict(value or {}).items():
            if (
                not isinstance(path, tuple)
                or not path
                or not all(type(p) is int or isinstance(p, str) for p in path)
            ):
                raise self._bad(f"gives {brief(key)} the path {brief(path)}")
            if self._joined.paths.setdefault(key, path) != path:
                raise InconsistentError(f"{key} has another path here", where=self._path)

    def _flattened(self, value: object) -> None:
        """What Megatron-Core 0.8 to 0.12 adds to the metadata."""
        for key, one in self._dict(value or {}).items():
            shape = self._dict(one).get("nd_reformulated_orig_global_shape")
            if shape is not None:
                self._joined.flattened[key] = self._shape(key, shape)

    def _blobs(self, value: object) -> dict[tuple[str, Shape | None], Blob]:
        if not isinstance(value, dict):
            raise self._bad(f"has {brief(value)} where storage_data is due")
        found: dict[tuple[str, Shape | None], Blob] = {}
        for index, info in value.items():
            at = self._fields(index, "MetadataIndex")
            key, offset = at.get("fqn"), at.get("offset")
            if not isinstance(key, str) or not (offset is None or isinstance(offset, tuple)):
                raise self._bad(f"places {brief(key)} at {brief(offset)}")
            place = key, None if offset is None else tuple(offset)
            if place in found:
                raise self._bad(f"places {brief(key)} at {brief(offset)} twice")
            found[place] = self._blob(key, self._fields(info, "_StorageInfo"))
        return found

    def _blob(self, key: str, info: Mapping[str, Any]) -> Blob:
        file, offset, length = (info.get(k) for k in ("relative_path", "offset", "length"))
        transforms = info.get("transform_descriptors") or ()
        if (
            not isinstance(file, str)
            or type(offset) is not int
            or type(length) is not int
            or offset < 0
            or length < 0
            or not isinstance(transforms, (list, tuple))
            or not all(isinstance(t, str) for t in transforms)
        ):
            raise self._bad(f"places {brief(key)} in {brief(file)} at {brief(offset)}")
        if (name := self._names.get(file)) is None:
            name = self._names[file] = self._file(file)
        return Blob(name, offset, length, tuple(transforms))

    def _file(self, name: str) -> str:
        """The path of a file, which lies in the checkpoint's folder."""
        steps = PurePosixPath(name).parts
        if not steps or name.startswith("/") or ".." in steps or "\\" in name or "\0" in name:
            raise UnsafeError(
                f"names a file outside of its folder: {brief(name)}", where=self._path
            )
        return PurePosixPath(name).as_posix()

    def _item(self, key: str, one: object, blobs: dict[tuple[str, Shape | None], Blob]) -> None:
        name = one.qualname.rpartition(".")[2] if isinstance(one, Record) else ""
        if name == "BytesStorageMetadata":
            if key in self._joined.shapes:
                raise self._differs(key)
            self._joined.values.setdefault(key, []).append(self._take(blobs, key, None))
            return
        fields = self._fields(one, "TensorStorageMetadata")
        shape, dtype = self._shape(key, fields.get("size")), self._dtype(key, fields)
        known = self._joined.shapes.setdefault(key, (shape, dtype))
        if known != (shape, dtype) or key in self._joined.values:
            raise self._differs(key)
        chunks = fields.get("chunks")
        if not isinstance(chunks, list):
            raise self._bad(f"gives {brief(key)} the chunks {brief(chunks)}")
        mine: dict[Box, None] = {}
        for chunk in chunks:
            mine[self._box(key, shape, self._fields(chunk, "ChunkStorageMetadata"))] = None
        of_key = self._joined.chunks.setdefault(key, {})
        for box in mine:
            of_key.setdefault(box, []).append(self._take(blobs, key, box.start))

    def _differs(self, key: str) -> InconsistentError:
        return InconsistentError(
            f"{key} has another shape or type here than another rank says", where=self._path
        )

    def _take(
        self, blobs: dict[tuple[str, Shape | None], Blob], key: str, offset: Shape | None
    ) -> Blob:
        found = blobs.pop((key, offset), None)
        if found is None:
            at = "" if offset is None else f" at {list(offset)}"
            raise IncompleteError(
                f"has a hole: {key}{at} was saved, but isn't in any file",
                where=self._path,
                hint="torch would load uninitialised memory there; save the checkpoint again",
            )
        return found

    def _shape(self, key: str, value: object) -> Shape:
        if (
            not isinstance(value, tuple)
            or not _INTEGERS.issuperset(map(type, value))
            or min(value, default=0) < 0
        ):
            raise self._bad(f"gives {brief(key)} the shape {brief(value)}")
        return value

    def _dtype(self, key: str, fields: Mapping[str, Any]) -> DType:
        properties = fields.get("properties")
        state = properties.state if isinstance(properties, Record) else None
        if isinstance(state, tuple) and state:
            name = state[0]
        else:
            name = self._fields(properties, "TensorProperties").get("dtype")
        if not isinstance(name, DTypeName) or str(name) not in BY_TORCH:
            raise UnsupportedError(f"{key} has the element type {brief(name)}", where=self._path)
        return BY_TORCH[str(name)]

    def _box(self, key: str, shape: Shape, chunk: Mapping[str, Any]) -> Box:
        start, sizes = self._shape(key, chunk.get("offsets")), self._shape(key, chunk.get("sizes"))
        stop = tuple(a + n for a, n in zip(start, sizes, strict=False))
        if (
            len(start) != len(shape)
            or len(sizes) != len(shape)
            or any(b > n for b, n in zip(stop, shape, strict=True))
        ):
            raise self._bad(
                f"gives {key} {list(shape)} a chunk of {list(sizes)} at {list(start)}, which "
                "doesn't lie inside"
            )
        return Box(start, stop)
