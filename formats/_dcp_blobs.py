"""Which bytes of a blob of torch's distributed checkpoint are the tensor's?

A blob is a whole ``torch.save`` file of one tensor. The first of each length and element type is
parsed as such (:mod:`reshard.torchfile`). A checkpoint has thousands that differ from it in their
payload alone: their first bytes are the very same, up to the payload. Those are told by comparing
these bytes, and only the CRC-32 behind the payload is read.
"""

from __future__ import annotations

import os
import struct
from collections import OrderedDict
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.box import Shape
from reshard.digest import CRC32
from reshard.dtypes import DType, dtype
from reshard.errors import CorruptError, IncompleteError, UnsupportedError
from reshard.formats._dcp_metadata import Blob, Index
from reshard.formats._dcp_zstd import ZSTD, decompressed
from reshard.source import Handle, source_error
from reshard.stored import StoredTensor, contiguous_strides
from reshard.torchfile import TorchFile, read_torch_file

OPEN_FILES = 64
_DESCRIPTOR = struct.Struct("<4s3I")  # after a payload below 4 GiB (APPNOTE 4.3.9)
_AHEAD = 4096  # bytes read behind a blob: the next one's first
_TAIL = 98  # both ends of the zip's directory: the same for all blobs of one shape


class Payload(NamedTuple):
    """Where a chunk's elements lie.

    Parameters
    ----------
    dtype, shape
        Of the tensor in the blob.
    offset
        Of its first element in the file, in bytes.
    strides
        In elements; ``None`` for row-major.
    begin, nbytes, crc32
        The storage that it lies in, and what the zip says of it.
    whole
        Bytes of the file that these places count in, where it isn't the blob's own but what comes
        of decompressing the blob; else ``None``.
    """

    dtype: DType
    shape: Shape
    offset: int
    strides: Shape | None
    begin: int
    nbytes: int
    crc32: int
    whole: int | None = None


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A blob that was parsed: what others of its kind begin and end with."""

    head: bytes
    tail: bytes
    payload: Payload  # relative to the blob


class Blobs:
    """Opens the blobs of a checkpoint.

    Parameters
    ----------
    root
        Its folder.
    compressed
        Whether blobs may be compressed (see :attr:`Payload.whole`).
    """

    def __init__(self, root: Path, *, compressed: bool = False) -> None:
        self._root = root
        self._compressed = compressed
        self._handles: OrderedDict[str, Handle] = OrderedDict()
        self._patterns: dict[tuple[int, Shape, DType], _Pattern] = {}
        self._ahead: dict[str, tuple[int, bytes]] = {}  # of each file, what was read last

    def path(self, blob: Blob) -> Path:
        """The file that it lies in."""
        return self._root / blob.file

    def open(self, blob: Blob) -> TorchFile:
        """Parse a blob that lies there as it is.

        Raises
        ------
        ReshardError
            As :func:`~reshard.torchfile.read_torch_file`.
        UnsupportedError
            If it was transformed when it was written.
        """
        if blob.transforms:
            raise UnsupportedError(
                f"was saved through {', '.join(blob.transforms)}, which isn't supported",
                where=self.path(blob),
                hint="load it with torch and save it again without extensions",
            )
        fd = self._handle(blob).fd
        return read_torch_file(fd, self.path(blob), offset=blob.offset, length=blob.length)

    @contextmanager
    def opened(self, blob: Blob) -> Generator[tuple[TorchFile, int | None]]:
        """Parse a blob, and its length if it had to be decompressed; see :meth:`open`."""
        if blob.transforms != ZSTD or not self._compressed:
            yield self.open(blob), None
            return
        with decompressed(self._root, blob) as plain:
            file = read_torch_file(plain.fileno(), self.path(blob))
            # its small tensors are read from there
            yield replace(file, path=Path(plain.name)), os.fstat(plain.fileno()).st_size

    def payload(self, blob: Blob, shape: Shape, kind: DType) -> Payload:
        """Find the elements of a chunk of that shape and type.

        Raises
        ------
        CorruptError
            If the blob holds something else.
        """
        key = (blob.length, shape, kind)
        pattern = None if blob.transforms else self._patterns.get(key)
        if pattern is not None and (crc := self._matches(blob, pattern)) is not None:
            found = pattern.payload
            return found._replace(
                offset=found.offset + blob.offset, begin=found.begin + blob.offset, crc32=crc
            )
        found = self._parsed(blob, shape, kind)
        if 0 < found.nbytes < 1 << 31 and found.whole is None:
            self._learn(blob, key, found)
        return found

    def array(self, blob: Blob, shape: Shape, kind: DType) -> NDArray[Any]:
        """Read a small chunk, and check the CRC-32 of its storage.

        Raises
        ------
        CorruptError
            If it is wrong, or as :meth:`payload`.
        """
        found = self.payload(blob, shape, kind)
        data = self._bytes(blob, found)
        if CRC32.of(data) != found.crc32:
            raise CorruptError(
                f"CRC-32 is {CRC32.of(data):08x}, but the zip says {found.crc32:08x}",
                where=f"{self.path(blob)} at byte {blob.offset}",
                hint="the file was damaged after it was written",
            )
        if not data:
            return np.empty(shape, kind.numpy)
        strides = found.strides or contiguous_strides(shape)
        steps = tuple(stride * kind.itemsize for stride in strides)
        view = np.ndarray(shape, kind.numpy, data, found.offset - found.begin, steps)
        return np.array(view, order="C")

    def _bytes(self, blob: Blob, found: Payload) -> bytes:
        if found.whole is None:
            return self._pread(blob, found.begin, found.nbytes)
        with decompressed(self._root, blob) as file:
            return os.pread(file.fileno(), found.nbytes, found.begin)

    def _parsed(self, blob: Blob, shape: Shape, kind: DType) -> Payload:
        with self.opened(blob) as (file, whole):
            tensor = file.value
            where = f"{self.path(blob)} at byte {blob.offset}"
            if not isinstance(tensor, StoredTensor):
                raise CorruptError("holds no tensor where a chunk of one is due", where=where)
            if tensor.shape != shape or dtype(tensor.dtype) != kind:
                raise CorruptError(
                    f"holds {tensor.dtype} {list(tensor.shape)}; the metadata say {kind} "
                    f"{list(shape)}",
                    where=where,
                    hint="data and metadata are of different saves: one was overwritten, or copied "
                    "without the other",
                )
            extent = file.extent(tensor)
            strides = None if extent.contiguous else tensor.strides
            at, nbytes, crc32 = extent.member.offset, extent.member.nbytes, extent.member.crc32
            return Payload(kind, shape, extent.offset, strides, at, nbytes, crc32, whole)

    def _learn(self, blob: Blob, key: tuple[int, Shape, DType], found: Payload) -> None:
        head = self._pread(blob, blob.offset, found.begin - blob.offset)
        tail = self._pread(blob, blob.offset + blob.length - _TAIL, _TAIL)
        relative = found._replace(
            offset=found.offset - blob.offset, begin=found.begin - blob.offset
        )
        pattern = _Pattern(head, tail, relative)
        if self._matches(blob, pattern) == found.crc32:  # a writer that puts it elsewhere
            self._patterns[key] = pattern

    def _matches(self, blob: Blob, pattern: _Pattern) -> int | None:
        """The CRC-32 of a blob's payload if it is of that pattern."""
        payload = pattern.payload
        if self._first(blob, len(pattern.head)) != pattern.head:
            return None
        end = blob.offset + payload.begin + payload.nbytes
        rest = self._pread(blob, end, blob.offset + blob.length - end + _AHEAD)
        self._ahead[blob.file] = end, rest
        rest = rest[: blob.offset + blob.length - end]
        if len(rest) < _DESCRIPTOR.size or not rest.endswith(pattern.tail):
            return None
        mark, crc, packed, size = _DESCRIPTOR.unpack_from(rest)
        if mark != b"PK\7\10" or packed != payload.nbytes or size != payload.nbytes:
            return None
        return int(crc)

    def _first(self, blob: Blob, nbytes: int) -> bytes:
        """The first bytes of a blob, which often were read already, behind the one before it."""
        begin, ahead = self._ahead.get(blob.file, (0, b""))
        found = ahead[blob.offset - begin :][:nbytes] if begin <= blob.offset else b""
        return found if len(found) == nbytes else self._pread(blob, blob.offset, nbytes)

    def _pread(self, blob: Blob, offset: int, nbytes: int) -> bytes:
        try:
            return os.pread(self._handle(blob).fd, nbytes, offset)
        except OSError as error:
            raise source_error(error, self.path(blob)) from error

    def _handle(self, blob: Blob) -> Handle:
        found = self._handles.get(blob.file)
        if found is None:
            path = self.path(blob)
            try:
                found = self._handles[blob.file] = Handle(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            except OSError as error:
                raise source_error(error, path) from error
            if len(self._handles) > OPEN_FILES:
                self._handles.popitem(last=False)
        return found


def check_files(root: Path, index: Index) -> None:
    """See that every file is there and long enough, and that no two blobs share bytes.

    Raises
    ------
    IncompleteError
        If a file is missing.
    CorruptError
        If one ends too early, or blobs overlap.
    UnsupportedError
        If it was saved as safetensors, whose offsets torch gets wrong.
    """
    of_file: dict[str, list[tuple[int, int, str]]] = {}
    for key, blob in index.blobs():
        of_file.setdefault(blob.file, []).append((blob.offset, blob.length, key))
    for name, blobs in of_file.items():
        path = root / name
        if not path.is_file():
            raise IncompleteError(
                f"is missing; {len(blobs)} values of the checkpoint lie in it",
                where=path,
                hint="copy it too: a rank's part of every tensor is in such a file",
            )
        blobs.sort()
        size, end, last = path.stat().st_size, 0, ""
        for offset, length, key in blobs:
            if offset < end:
                _refuse_overlap(path, last, key, offset)
            end, last = offset + length, key
            if end > size:
                raise CorruptError(
                    f"is truncated: it has {size} bytes, and {key} ends at byte {end}", where=path
                )


def _refuse_overlap(path: Path, first: str, second: str, offset: int) -> None:
    with path.open("rb") as file:
        begin = file.read(9)
    if begin[8:] == b"{" and int.from_bytes(begin[:8], "little") < path.stat().st_size:
        raise UnsupportedError(
            "was saved with SerializationFormat.SAFETENSORS: torch writes one file of many "
            "tensors and gives them all one offset, so that nobody, torch included, can load it",
            where=path,
            hint="save it again in torch's own format, or with HuggingFaceStorageWriter",
        )
    raise CorruptError(
        f"{first} and {second} overlap at byte {offset}: the metadata are of another save",
        where=path,
    )


def orphans(root: Path, index: Index) -> list[str]:
    """Names of data files that the metadata don't speak of."""
    known: Mapping[str, None] = dict.fromkeys(blob.file for _, blob in index.blobs())
    return sorted(p.name for p in root.glob("*.distcp") if p.name not in known)
