"""How is a blob read that was compressed with zstd when it was written?

torch's ``ZStandard`` stream extension makes a zstd stream of each blob, and its length when it is
decompressed isn't stored. To open one it is decompressed once, to a temporary file, and looked at
as any other blob; when its bytes are moved it is decompressed again (:mod:`reshard.decoded`).

Source: torch 2.13, ``torch/distributed/checkpoint/_extension.py``.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from reshard.decoded import Write
from reshard.errors import CorruptError
from reshard.formats import _zstd
from reshard.formats._dcp_metadata import Blob
from reshard.source import source_error

ZSTD = ("stream.zstd/1",)
"""What the metadata say of such a blob."""


@dataclass(frozen=True, slots=True)
class ZstdBlob:
    """Decodes a blob; see :class:`~reshard.decoded.Decoder`."""

    blob: Blob

    @property
    def stored(self) -> tuple[str, ...]:
        """The file that it lies in."""
        return (self.blob.file,)

    def decode(self, root: Path, write: Write) -> None:
        """Hand out the decompressed bytes."""
        with (root / self.blob.file).open("rb") as file:
            for part in _decompressed(file, self.blob):
                write(part)


def decompressed(root: Path, blob: Blob) -> IO[bytes]:
    """A temporary file that holds the decompressed blob, and is gone when it is closed.

    Raises
    ------
    CorruptError
        If it can't be decompressed.
    """
    path = root / blob.file
    # the caller closes it
    found: IO[bytes] = tempfile.NamedTemporaryFile(prefix="zreshard-")  # noqa: SIM115
    try:
        with path.open("rb") as file:
            for part in _decompressed(file, blob):
                found.write(part)
        found.flush()
    except ValueError as error:
        found.close()
        raise CorruptError(
            f"the zstd stream at byte {blob.offset} is damaged: {error}",
            where=path,
            hint="the file was damaged after it was written",
        ) from error
    except OSError as error:
        found.close()
        raise source_error(error, path) from error
    return found


def _decompressed(file: IO[bytes], blob: Blob) -> Iterator[bytes]:
    window = _Window(file, blob.offset, blob.length)
    yield from _zstd.decompressed(window)
    if window.left:
        raise ValueError(f"it ends {window.left} bytes early")


class _Window(io.RawIOBase):
    """Bytes of a file, as a file of their own that is read once."""

    def __init__(self, file: IO[bytes], offset: int, nbytes: int) -> None:
        self._file = file
        self.left = nbytes
        file.seek(offset)

    def readable(self) -> bool:
        """It is."""
        return True

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes."""
        found = self._file.read(self.left if size < 0 else min(size, self.left))
        self.left -= len(found)
        return found
