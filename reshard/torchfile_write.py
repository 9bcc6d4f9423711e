"""How is a ``torch.save`` file laid out before its payload is known?

A :class:`TorchZipLayout` computes where every storage's bytes go and how long the file will be.
Whoever has the bytes writes them there, in any order and from any thread; :meth:`~TorchZipLayout.
finish` then writes everything else: members' headers, the pickle, checksums and directory.

The bytes are those that torch 2.13 writes for the same pickle, but for the serialization id (a
hash there too, a different one): the order of members, 64-byte alignment through an extra field
``FB``, data descriptors, and zip64 fields exactly where sizes or offsets reach 2^32 - 1, because
``torch.load`` can be told to compute offsets instead of reading them. Sources:
``caffe2/serialize/inline_container.cc`` (``getPadding``, ``writeRecord``), miniz's
``mz_zip_writer_add_mem_ex_v2``, PKWARE's APPNOTE.TXT 4.3.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from reshard.digest import CRC32
from reshard.dtypes import BY_TORCH
from reshard.errors import TargetError, UnsupportedError
from reshard.pickle_write import dump_pickle
from reshard.stored import StoredTensor
from reshard.targets import write_at

_ALIGNMENT: Final = 64
_MAX32: Final = 0xFFFFFFFF
_LOCAL: Final = struct.Struct("<4s5H3I2H")
_CENTRAL: Final = struct.Struct("<4s6H3I5H2I")
_END64: Final = struct.Struct("<4sQ2H2I4Q4sIQI")  # with its locator
_END: Final = struct.Struct("<4s4H2IH")
_UTF8, _HAS_DESCRIPTOR = 0x800, 0x8
_ID_DIGITS: Final = 40


@dataclass(frozen=True, slots=True)
class _Entry:
    """One member: where its header and its payload begin."""

    name: bytes
    nbytes: int
    header: int
    payload: int

    @classmethod
    def at(cls, header: int, name: bytes, nbytes: int) -> _Entry:
        begin = header + _LOCAL.size + len(name) + len(_zip64(header, nbytes)) + 4
        return cls(name, nbytes, header, begin + -begin % _ALIGNMENT)

    @property
    def flags(self) -> int:
        return _UTF8 | (_HAS_DESCRIPTOR if self.nbytes else 0)

    @property
    def big(self) -> bool:
        return self.header >= _MAX32 or self.nbytes >= _MAX32

    @property
    def end(self) -> int:
        """Where the next member's header begins."""
        return self.payload + self.nbytes + (self.nbytes > 0) * (24 if self.big else 16)

    def local_header(self) -> bytes:
        """Everything before the payload: sizes and checksum follow after it."""
        zip64 = _zip64(self.header, self.nbytes)
        padding = self.payload - self.header - _LOCAL.size - len(self.name) - len(zip64) - 4
        extra = zip64 + b"FB" + struct.pack("<H", padding) + b"Z" * padding
        sizes = (0, 0, 0, len(self.name), len(extra))
        return _LOCAL.pack(b"PK\3\4", 0, self.flags, 0, 0, 0, *sizes) + self.name + extra

    def descriptor(self, crc: int) -> bytes:
        """What follows the payload; nothing after an empty one."""
        if not self.nbytes:
            return b""
        kind = "<4sI2Q" if self.big else "<4s3I"
        return struct.pack(kind, b"PK\7\10", crc, self.nbytes, self.nbytes)

    def central(self, crc: int) -> bytes:
        """Give its record in the directory."""
        size = min(self.nbytes, _MAX32)
        zip64 = _zip64(self.header, self.nbytes)
        lengths = (len(self.name), len(zip64), 0, 0, 0)
        fixed = _CENTRAL.pack(
            b"PK\1\2", 0, 0, self.flags, 0, 0, 0, crc, size, size, *lengths, 0,
            min(self.header, _MAX32),
        )  # fmt: skip
        return fixed + self.name + zip64


def _zip64(header: int, nbytes: int) -> bytes:
    """Give the zip64 extra field of a member, the same in its header and in the directory."""
    values = [nbytes, nbytes] if nbytes >= _MAX32 else []
    values += [header] if header >= _MAX32 else []
    if not values:
        return b""
    return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values)


class TorchZipLayout:
    """The layout of a ``torch.save`` file.

    Parameters
    ----------
    value
        What is saved: see :func:`~reshard.pickle_write.dump_pickle`.
    storages
        ``(key, nbytes)`` of the storages that its tensors lie in, in the order of the file.
        torch numbers them ``"0"``, ``"1"``, ... in the order of the value.
    name
        The folder inside the archive: torch takes the file's name without its suffix.

    Raises
    ------
    TypeError, ValueError
        The value can't be pickled, or a tensor's storage isn't listed with its size.

    Attributes
    ----------
    nbytes
        Length of the whole file.
    """

    def __init__(
        self, value: object, storages: Iterable[tuple[str, int]], *, name: str = "archive"
    ) -> None:
        if not _is_name(name):
            raise ValueError(f"an archive can't be named {name!r}")
        sizes = dict(_checked(storages))
        pickled = dump_pickle(value, storages=sizes)
        self._small: dict[str, bytes] = {
            "data.pkl": pickled,
            ".format_version": b"1",
            ".storage_alignment": str(_ALIGNMENT).encode(),
            "byteorder": b"little",
            "version": b"3\n",
        }
        members = [(inside, len(data)) for inside, data in self._small.items()]
        members[-1:-1] = [(f"data/{key}", nbytes) for key, nbytes in sizes.items()]
        members.append((".data/serialization_id", _ID_DIGITS))
        self._entries: dict[str, _Entry] = {}
        at = 0
        for inside, nbytes in members:
            entry = _Entry.at(at, f"{name}/{inside}".encode(), nbytes)
            self._entries[inside] = entry
            at = entry.end
        self._directory = at
        directory = sum(len(entry.central(0)) for entry in self._entries.values())
        self.nbytes = at + directory + _END64.size + _END.size

    def offset(self, key: str) -> int:
        """First payload byte of a storage, counted from the start of the archive."""
        return self._entries[f"data/{key}"].payload

    def finish(self, fd: int, crcs: Mapping[str, int], *, at: int = 0) -> None:
        """Write everything but the payload.

        Parameters
        ----------
        fd
            The file, open for writing.
        crcs
            CRC-32 of each storage's payload, by key. An empty storage may be left out.
        at
            Where in the file the archive begins.

        Raises
        ------
        KeyError
            A checksum is missing.
        OSError
            The file can't be written.
        """
        found = {name: CRC32.of(data) for name, data in self._small.items()}
        for name, entry in self._entries.items():
            if name.startswith("data/"):
                found[name] = crcs[name[5:]] if entry.nbytes else 0
        small = {**self._small, ".data/serialization_id": self._serialization_id(found)}
        found[".data/serialization_id"] = CRC32.of(small[".data/serialization_id"])
        directory = bytearray()
        for name, entry in self._entries.items():
            crc = found[name]
            if name in small:
                write_at(fd, entry.local_header() + small[name] + entry.descriptor(crc),
                        at + entry.header)  # fmt: skip
            else:
                write_at(fd, entry.local_header(), at + entry.header)
                write_at(fd, entry.descriptor(crc), at + entry.payload + entry.nbytes)
            directory += entry.central(crc)
        write_at(fd, bytes(directory) + self._end(len(directory)), at + self._directory)

    def _serialization_id(self, crcs: Mapping[str, int]) -> bytes:
        """Digits that depend on all the contents, and on nothing else."""
        digest = hashlib.sha256()
        for name, entry in self._entries.items():
            digest.update(f"{name}\0{entry.nbytes}\0{crcs.get(name, 0)}\0".encode())
        number = int.from_bytes(digest.digest(), "big") % 10**_ID_DIGITS
        return f"{number:0{_ID_DIGITS}}".encode()

    def _end(self, nbytes: int) -> bytes:
        """Give what follows the directory. torch writes the zip64 end always."""
        count, begin = len(self._entries), self._directory
        end64 = _END64.pack(
            b"PK\6\6", 44, 0x31E, 45, 0, 0, count, count, nbytes, begin,
            b"PK\6\7", 0, begin + nbytes, 1,
        )  # fmt: skip
        few = min(count, 0xFFFF)
        sizes = (min(nbytes, _MAX32), min(begin, _MAX32))
        return end64 + _END.pack(b"PK\5\6", 0, 0, few, few, *sizes, 0)


def _is_name(name: str) -> bool:
    return name not in ("", ".", "..") and not set(name) & set("/\\:\0")


def _checked(storages: Iterable[tuple[str, int]]) -> Iterable[tuple[str, int]]:
    seen: set[str] = set()
    for key, nbytes in storages:
        if key in seen:
            raise ValueError(f"storage {key!r} is listed twice")
        if not key or nbytes < 0 or ".." in key.split("/") or set(key) & set("\\\0"):
            raise ValueError(f"there is no storage {key!r} of {nbytes} bytes")
        seen.add(key)
        yield key, nbytes


# ---------------------------------------------------------------------------- small files


def write_torch_file(
    path: str | os.PathLike[str], value: object, *, name: str | None = None
) -> None:
    """Write a small file: numpy arrays in the value become tensors.

    Parameters
    ----------
    path
        Written under a temporary name beside it, then renamed.
    value
        Dicts, lists and tuples are looked through for arrays (also of ``ml_dtypes``). One array
        object becomes one storage, however often it occurs. Everything else as in
        :func:`~reshard.pickle_write.dump_pickle`.
    name
        The folder inside the archive; by default the file's name without its suffix.

    Raises
    ------
    TypeError, UnsupportedError
        The value can't be written: an object of an unknown class, an array of an unknown type.
    TargetError
        The file can't be written.
    """
    path = Path(path)
    arrays = _Arrays()
    layout = TorchZipLayout(
        arrays.replace(value),
        [(key, array.nbytes) for key, array in arrays.payload.items()],
        name=name or (path.stem if _is_name(path.stem) else "archive"),
    )
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            crcs: dict[str, int] = {}
            for key, array in arrays.payload.items():
                data = array.tobytes()
                crcs[key] = CRC32.of(data)
                write_at(fd, data, layout.offset(key))
            layout.finish(fd, crcs)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise TargetError(f"can't be written: {error.strerror}", where=path) from error


@dataclass(slots=True)
class _Arrays:
    """Takes the arrays out of a value."""

    payload: dict[str, npt.NDArray[Any]] = field(default_factory=dict[str, npt.NDArray[Any]])
    _tensors: dict[int, StoredTensor] = field(default_factory=dict[int, StoredTensor])
    _alive: list[object] = field(default_factory=list[object])

    def replace(self, value: object) -> object:
        """Give the value with tensors in place of arrays."""
        if isinstance(value, np.ndarray):
            return self._tensor(value)
        if type(value) is dict or isinstance(value, OrderedDict):
            pairs = ((key, self.replace(one)) for key, one in value.items())
            return OrderedDict(pairs) if isinstance(value, OrderedDict) else dict(pairs)
        if type(value) is list:
            return [self.replace(one) for one in value]
        if type(value) is tuple:
            return tuple(self.replace(one) for one in value)
        return value

    def _tensor(self, array: npt.NDArray[Any]) -> StoredTensor:
        found = self._tensors.get(id(array))
        if found is None:
            dtype = array.dtype.name
            if dtype not in BY_TORCH:
                raise UnsupportedError(f"torch has no element type {dtype}")
            key = str(len(self.payload))
            found = StoredTensor.whole(key, dtype, array.shape)
            self.payload[key] = array.astype(BY_TORCH[dtype].numpy, order="C", copy=False)
            self._tensors[id(array)] = found
            self._alive.append(array)  # its id must not be used again
        return found
