"""Is this zip one that every reader reads alike, and where is the payload of its members?

Python's ``zipfile`` parses the directory and checks the CRC-32 of what it reads. What it leaves
open is checked here: nothing stands before or after the archive, every member has one harmless
name inside one folder, is stored as it is, lies inside the file, overlaps no other, and its own
header says what the directory says.

Source: PKWARE's APPNOTE.TXT 4.3 and 4.4, by whose sections things are named below.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from typing import Any, Final

from reshard.errors import CorruptError, UnsafeError, UnsupportedError

_LOCAL: Final = struct.Struct("<4s5H3I2H")  # APPNOTE 4.3.7, up to the name
_END_BYTES: Final = 22  # the end of central directory, without a comment (4.3.16)
_LOCATOR_BYTES: Final = 20  # where its zip64 variant is (4.3.15), which stands before it
_END64_BYTES: Final = 56  # the zip64 end of central directory (4.3.14), before the locator
_HAS_DESCRIPTOR, _ENCRYPTED, _UNKNOWN_SIZE = 0x8, 0x1, 0xFFFFFFFF
#: How files of ``torch.save`` before 1.6 start: a pickled magic number.
_LEGACY: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


class Range(io.RawIOBase):
    """A part of an open file, as a file of its own. Reads leave the descriptor's place alone."""

    def __init__(self, fd: int, offset: int, length: int) -> None:
        super().__init__()
        self.fd = fd
        self.offset = offset
        self.length = length
        self._at = 0

    def readable(self) -> bool:
        """Say yes."""
        return True

    def seekable(self) -> bool:
        """Say yes."""
        return True

    def tell(self) -> int:
        """Give the place of the next read."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move the place of the next read."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise ValueError(f"a place {base + offset} before the start")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer with what comes next; give how much that was."""
        view = memoryview(buffer).cast("B")
        data = self.pread(len(view), self._at)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def readall(self) -> bytes:
        """Read the rest."""
        parts = iter(lambda: self.read(1 << 24) or b"", b"")
        return b"".join(parts)

    def pread(self, count: int, at: int) -> bytes:
        """Read up to ``count`` bytes at a place of this part; nothing outside of it."""
        count = min(count, self.length - at) if at >= 0 else 0
        return os.pread(self.fd, count, self.offset + at) if count > 0 else b""


def check_ends(window: Range, where: str) -> None:
    """Say what a file is that doesn't begin and end as torch's zips do."""
    begin = window.pread(16, 0)
    end = window.pread(_END_BYTES, max(0, window.length - _END_BYTES))
    if window.length == 0:
        raise CorruptError("the file is empty", where=where)
    if begin.startswith(_LEGACY):
        raise UnsupportedError(
            "is in the legacy format of torch.save (before torch 1.6)",
            where=where,
            hint="load it with the program that wrote it, and save it again",
        )
    if not begin.startswith(b"PK\x03\x04"):
        raise CorruptError(f"isn't a file of torch.save: it begins with {begin!r}", where=where)
    if not end.startswith(b"PK\x05\x06") or not end.endswith(b"\0\0"):
        raise CorruptError(
            f"is truncated, or not a file of torch.save: its {window.length} bytes don't end"
            " with a zip's directory",
            where=where,
        )


def check_directory(archive: zipfile.ZipFile, window: Range, where: str) -> None:
    """Check that offsets count from the first byte.

    ``zipfile`` looks for the directory right before the end and moves all offsets if it isn't
    where the end says; other readers would see other members then.
    """
    end = window.length - _END_BYTES
    offset = int.from_bytes(window.pread(4, end + 16), "little")
    locator = window.pread(_LOCATOR_BYTES, end - _LOCATOR_BYTES)
    if locator.startswith(b"PK\x06\x07"):
        record = end - _LOCATOR_BYTES - _END64_BYTES
        if int.from_bytes(locator[8:16], "little") != record:
            raise CorruptError("the zip's end isn't where it says", where=where)
        if offset == _UNKNOWN_SIZE:
            offset = int.from_bytes(window.pread(8, record + 48), "little")
    if offset != archive.start_dir:
        raise CorruptError(
            f"the zip's directory is at byte {archive.start_dir}, not at {offset} as it says",
            where=where,
        )


def member_names(archive: zipfile.ZipFile, where: str) -> tuple[str, dict[str, zipfile.ZipInfo]]:
    """Give the archive's one folder, and its members by their names inside it."""
    inside: dict[str, zipfile.ZipInfo] = {}
    roots: set[str] = set()
    for info in archive.infolist():
        name = info.orig_filename
        root, _, rest = name.partition("/")
        steps = name.split("/")
        other = info.filename != name  # cut at a NUL, or renamed by an extra field
        if not root or other or "\\" in name or ".." in steps or ":" in root:
            raise UnsafeError(f"a member's name {name!r:.100} leaves the archive", where=where)
        if not rest:
            raise CorruptError(f"a member {name!r:.100} stands outside a folder", where=where)
        roots.add(root)
        inside[rest] = info
    if "constants.pkl" in inside or any(name.startswith("code/") for name in inside):
        raise UnsupportedError(
            "is a TorchScript program, not a checkpoint",
            where=where,
            hint="save the state_dict of the model instead",
        )
    if len(roots) != 1:
        raise CorruptError(f"the archive has {len(roots)} folders, not one", where=where)
    return roots.pop(), inside


def locate_payloads(archive: zipfile.ZipFile, window: Range, where: str) -> dict[str, int]:
    """Find each member's first payload byte, and check that no two members share bytes."""
    payloads: dict[str, int] = {}
    seen: set[str] = set()  # torch finds members without regard to case
    free = 0  # the first byte that no member has taken
    for info in sorted(archive.infolist(), key=lambda one: one.header_offset):
        place = f"{where}, {info.orig_filename!r:.100}"
        if info.filename.lower() in seen:
            raise CorruptError("two members have this name", where=place)
        if info.flag_bits & _ENCRYPTED:
            raise UnsupportedError("the member is encrypted", where=place)
        if info.compress_type != zipfile.ZIP_STORED:
            raise UnsupportedError(
                f"the member is compressed (method {info.compress_type})",
                where=place,
                hint="torch.save doesn't compress; pack it again without compression",
            )
        if info.compress_size != info.file_size:
            raise CorruptError(
                f"stored in {info.compress_size} bytes, but has {info.file_size}", where=place
            )
        if info.header_offset < free:
            raise CorruptError("the member overlaps another one", where=place)
        begin = _payload_offset(window, info, place)
        free = begin + info.file_size
        if free > archive.start_dir:
            raise CorruptError(f"the member ends at byte {free}, past its file", where=place)
        payloads[info.filename] = begin
        seen.add(info.filename.lower())
    return payloads


def _payload_offset(window: Range, info: zipfile.ZipInfo, place: str) -> int:
    """Read a member's own header, which must say what the directory says."""
    name = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
    header = window.pread(_LOCAL.size + len(name), info.header_offset)
    if len(header) < _LOCAL.size + len(name) or not header.startswith(b"PK\x03\x04"):
        raise CorruptError(f"no header at byte {info.header_offset}", where=place)
    _, _, flags, method, _, _, crc, packed, size, name_bytes, extra_bytes = _LOCAL.unpack(
        header[: _LOCAL.size]
    )
    if name_bytes != len(name) or header[_LOCAL.size :] != name:
        raise CorruptError("the member's own header has another name", where=place)
    if method != info.compress_type or flags & _ENCRYPTED:
        raise CorruptError("the member's own header has another method", where=place)
    later = bool(flags & _HAS_DESCRIPTOR)  # sizes and CRC follow the payload; 0 stands here
    for here, there in ((crc, info.CRC), (packed, info.compress_size), (size, info.file_size)):
        big = here == _UNKNOWN_SIZE and there >= _UNKNOWN_SIZE
        if here != there and not big and not (later and here == 0):
            raise CorruptError(
                f"the member's own header says {here}, the directory {there}", where=place
            )
    return info.header_offset + _LOCAL.size + len(name) + int(extra_bytes)
