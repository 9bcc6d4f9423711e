"""What does a ``torch.save`` file hold, and at which bytes of it do its tensors lie?

The format is a zip whose members are stored, not compressed: ``<name>/data.pkl`` is a pickle with
references to storages, ``<name>/data/<key>`` is a storage's bytes. Opening one reads the zip's
directory, the members' headers and the pickle (safely: :mod:`reshard.pickles`), never the payload.
The file may lie inside a bigger one, as in a ``.distcp`` of torch's distributed checkpoints.

The zip itself is checked by :mod:`reshard.torchzip` and Python's ``zipfile``, the CRC-32 of the
pickle among it. Sources: torch 2.13, ``caffe2/serialize/inline_container.cc`` and
``torch/serialization.py``.
"""

from __future__ import annotations

import io
import os
import stat
import struct
import zipfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from reshard.digest import CRC32
from reshard.dtypes import dtype as dtype_of
from reshard.errors import CorruptError, NotFoundError, ReshardError, UnsupportedError
from reshard.pickles import load_pickle
from reshard.stored import StorageRef, StoredTensor, item_bytes
from reshard.torchzip import Range, check_directory, check_ends, locate_payloads, member_names

_NEWEST_VERSION: Final = 10  # caffe2/serialize/versions.h, kMaxSupportedFileFormatVersion


@dataclass(frozen=True, slots=True)
class Member:
    """The bytes of one storage.

    Attributes
    ----------
    name
        Name of the zip's member, ``"<archive>/data/<key>"``.
    offset
        Its first payload byte, counted from the start of the (outer) file.
    nbytes
        Bytes of payload.
    crc32
        What the zip says of the payload. It isn't checked when the file is opened.
    """

    name: str
    offset: int
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a tensor's elements lie in the file.

    Attributes
    ----------
    offset
        First byte of element 0, counted from the start of the (outer) file.
    shape
        Sizes of its dims.
    strides
        Steps between neighbours, in bytes.
    dtype
        Name of the element type.
    nbytes
        Bytes from the first to the last element that it touches (0 if it is empty).
    contiguous
        Whether those are its elements one after the other, row-major.
    member
        The storage that it lies in, with the checksum.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    nbytes: int
    contiguous: bool
    member: Member


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A ``torch.save`` file whose payload hasn't been read.

    Attributes
    ----------
    path
        The (outer) file.
    value
        What was saved, with :class:`~reshard.stored.StoredTensor` for tensors.
    opaque
        The classes in it that nobody knows (see :func:`~reshard.pickles.load_pickle`).
    members
        The storages' bytes, by key.
    """

    path: Path
    value: Any
    opaque: tuple[str, ...]
    members: Mapping[str, Member]

    def extent(self, tensor: StoredTensor) -> Extent:
        """Say where a tensor of this file lies.

        Raises
        ------
        CorruptError
            Its storage isn't in this file, or has another size here.
        """
        member = _member_of(self.members, tensor.storage, str(self.path))
        width = item_bytes(tensor.dtype)
        return Extent(
            offset=member.offset + tensor.offset * width,
            shape=tensor.shape,
            strides=tuple(stride * width for stride in tensor.strides),
            dtype=tensor.dtype,
            nbytes=(tensor.end - tensor.offset) * width,
            contiguous=tensor.contiguous,
            member=member,
        )


def open_torch_file(
    path: str | os.PathLike[str],
    *,
    offset: int = 0,
    length: int | None = None,
    known: Mapping[str, Callable[..., object]] | None = None,
) -> TorchFile:
    """Open a ``torch.save`` file, or one inside a bigger file.

    Parameters
    ----------
    path
        The file.
    offset, length
        The bytes ``[offset, offset + length)`` are the torch file; by default all from ``offset``.
    known
        Further names for the pickle: see :func:`~reshard.pickles.load_pickle`.

    Raises
    ------
    NotFoundError
        There is no such file, or it can't be opened.
    CorruptError
        It isn't a torch file, is truncated, or its parts disagree.
    UnsafeError
        Its pickle names something that can run code, or a member's name leaves the archive.
    UnsupportedError
        A TorchScript program, a file of ``torch.save`` before 1.6, big-endian, compressed.
    """
    path = Path(path)
    with _opened(path) as fd:
        return read_torch_file(fd, path, offset=offset, length=length, known=known)


def read_torch_file(
    fd: int,
    path: Path,
    *,
    offset: int = 0,
    length: int | None = None,
    known: Mapping[str, Callable[..., object]] | None = None,
) -> TorchFile:
    """As :func:`open_torch_file`, over a file that is open already (many blobs in one file)."""
    where = str(path) if offset == 0 and length is None else f"{path} at byte {offset}"
    size = os.fstat(fd).st_size
    if length is None:
        length = size - offset
    if offset < 0 or length < 0 or offset + length > size:
        raise CorruptError(
            f"bytes {offset} to {offset + length} were asked for, but the file has {size}",
            where=path,
        )
    window = Range(fd, offset, length)
    check_ends(window, where)
    try:
        with zipfile.ZipFile(io.BufferedReader(window, 1 << 9)) as archive:
            return _read(archive, window, path, where, known)
    except ReshardError:
        raise
    # zipfile's own errors, and those of struct and of text in a damaged directory
    except (
        zipfile.BadZipFile,
        EOFError,
        LookupError,
        NotImplementedError,
        OSError,
        OverflowError,
        RuntimeError,
        ValueError,
        struct.error,
    ) as error:
        raise CorruptError(f"the zip is damaged: {error}", where=where) from error


def read_tensor(file: TorchFile, tensor: StoredTensor) -> npt.NDArray[Any]:
    """Read a small tensor (a step, an RNG state) and check its storage's CRC-32.

    The whole storage is read: for one tensor in a big storage, use :meth:`TorchFile.extent`.

    Returns
    -------
    numpy.ndarray
        Row-major, in memory of its own.

    Raises
    ------
    CorruptError
        The checksum is wrong, the file is shorter than it was, or as :meth:`TorchFile.extent`.
    """
    extent = file.extent(tensor)
    member = extent.member
    with _opened(file.path) as fd:
        payload = Range(fd, member.offset, member.nbytes).readall()
    where = f"{file.path}, {member.name}"
    if len(payload) != member.nbytes:
        raise CorruptError(f"has {len(payload)} bytes, not {member.nbytes}", where=where)
    found = CRC32.of(payload)
    if found != member.crc32:
        raise CorruptError(
            f"CRC-32 is {found:08x}, but the zip says {member.crc32:08x}",
            where=where,
            hint="the file was damaged after it was written",
        )
    kind = dtype_of(tensor.dtype).numpy
    if tensor.numel == 0:
        return np.empty(tensor.shape, kind)
    begin = extent.offset - member.offset
    view = np.ndarray(tensor.shape, kind, payload, begin, extent.strides)
    return np.array(view, order="C")


@contextmanager
def _opened(path: Path) -> Generator[int, None, None]:
    try:
        # A pipe or device is looked at, not waited for.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise NotFoundError(f"can't be opened: {error.strerror}", where=path) from error
    except ValueError as error:
        raise NotFoundError(f"can't be opened: {error}", where=repr(path)) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CorruptError("isn't a regular file", where=path)
        yield fd
    finally:
        os.close(fd)


def _read(
    archive: zipfile.ZipFile,
    window: Range,
    path: Path,
    where: str,
    known: Mapping[str, Callable[..., object]] | None,
) -> TorchFile:
    check_directory(archive, window, where)
    root, names = member_names(archive, where)
    payloads = locate_payloads(archive, window, where)
    _check_kind(archive, root, names, where)
    data = archive.read(f"{root}/data.pkl")
    loaded = load_pickle(data, where=f"{where}, data.pkl", known=known)
    members = {
        name.removeprefix("data/"): Member(
            info.filename, window.offset + payloads[info.filename], info.file_size, info.CRC
        )
        for name, info in names.items()
        if name.startswith("data/")
    }
    for storage in loaded.storages.values():
        _member_of(members, storage, where)
    return TorchFile(path, loaded.value, loaded.opaque, members)


def _member_of(members: Mapping[str, Member], storage: StorageRef, where: str) -> Member:
    member = members.get(storage.key)
    if member is None:
        raise CorruptError(f"there is no storage {storage.key!r:.80}", where=where)
    if member.nbytes != storage.nbytes:
        raise CorruptError(
            f"storage {storage.key!r:.80} has {member.nbytes} bytes, but the pickle says"
            f" {storage.nbytes}",
            where=where,
        )
    return member


def _check_kind(
    archive: zipfile.ZipFile, root: str, names: Mapping[str, object], where: str
) -> None:
    """Check that this is an archive that we can read."""
    for needed in ("data.pkl", "version"):
        if needed not in names:
            raise CorruptError(f"isn't a file of torch.save: it has no {needed}", where=where)
    version = archive.read(f"{root}/version").strip()
    if not version.isdigit() or not 1 <= int(version) <= _NEWEST_VERSION:
        raise UnsupportedError(f"has the version {version!r:.40}", where=where)
    if "byteorder" in names:
        order = archive.read(f"{root}/byteorder")
        if order == b"big":
            raise UnsupportedError("was saved on a big-endian machine", where=where)
        if order != b"little":
            raise CorruptError(f"has the byte order {order!r:.40}", where=where)
