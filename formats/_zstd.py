"""What do the bytes of a zstd stream become, a little at a time?

Its length when it is decompressed needn't be known, and memory doesn't grow with it.

Source: RFC 8878.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator

_STEP = 1 << 20
_MOST_HEADER = 18  # bytes of a frame's header
_REPEATED = 1  # the kind of block that is one byte, however long it becomes


def decompressed(stream: io.RawIOBase | bytes | memoryview) -> Iterator[bytes]:
    """Yield the decompressed bytes, some at a time.

    Parameters
    ----------
    stream
        One or several frames. It is for the caller to see that a stream which ends early has given
        too few bytes.

    Raises
    ------
    ValueError
        If it is damaged.
    """
    zstandard = importlib.import_module("zstandard")
    try:
        with zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True) as reader:
            while part := reader.read(_STEP):
                yield part
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error


def check_whole(stored: bytes | memoryview) -> None:
    """See that frames end where their bytes do, by the lengths of their blocks.

    Raises
    ------
    ValueError
        If something is missing, or more than frames is there.
    """
    zstandard = importlib.import_module("zstandard")
    at = 0
    try:
        while at < len(stored) or not at:
            head = stored[at : at + _MOST_HEADER]
            checked = zstandard.get_frame_parameters(head).has_checksum
            at = _end_of_blocks(stored, at + zstandard.frame_header_size(head)) + 4 * checked
    except zstandard.ZstdError as error:
        raise ValueError(f"no zstd frame at byte {at}: {error}") from error
    if at != len(stored):
        raise ValueError(f"its zstd frame ends at byte {at}, and there are {len(stored)}")


def _end_of_blocks(stored: bytes | memoryview, at: int) -> int:
    """Where the last of a frame's blocks ends (RFC 8878, 3.1.1.2)."""
    last = False
    while not last:
        if at + 3 > len(stored):
            raise ValueError(f"its {len(stored)} bytes end inside a zstd frame")
        header = int.from_bytes(stored[at : at + 3], "little")
        last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        at += 3 + (1 if kind == _REPEATED else size)
    return at
