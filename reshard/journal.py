"""How is something written down so that it counts after a kill or a power cut?

A journal is a file of lines, each with a checksum of its own::

    <CRC-64/NVME of the rest> <head, JSON> <payload, base64>

A line that was torn, and whatever follows it, counts as not written: so a process can be killed at
any moment, and a machine can lose power, without more than the last lines being lost. The first
line says what the others are about.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.digest import CRC64NVME
from reshard.targets import target_error


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is whole.

    Parameters
    ----------
    head
        What it says, as plain JSON data.
    path, at, nbytes
        Where it stands.
    """

    head: Mapping[str, Any]
    path: Path
    at: int
    nbytes: int

    def raw(self) -> bytes:
        """The whole line."""
        with self.path.open("rb") as file:
            file.seek(self.at)
            return file.read(self.nbytes)

    def payload(self) -> bytes:
        """What was written down with it."""
        return base64.b64decode(self.raw().rpartition(b" ")[2])


def read(path: Path) -> Iterator[Line]:
    """The lines of a journal, up to the first one that isn't whole; none if it isn't there."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        at = 0
        for text in file:
            head = _head(text)
            if head is None:
                return
            yield Line(head, path, at, len(text))
            at += len(text)


def _head(text: bytes) -> Mapping[str, Any] | None:
    """What a line says; ``None`` if it isn't whole."""
    crc, _, rest = text.partition(b" ")
    if not text.endswith(b"\n") or crc != _crc(rest[:-1]):
        return None
    head = json.loads(rest[:-1].rpartition(b" ")[0])
    assert isinstance(head, dict), head  # the checksum fits: we wrote it
    return head


def _crc(rest: bytes) -> bytes:
    return CRC64NVME.hex(CRC64NVME.of(rest)).encode()


class Journal:
    """A journal that is written to, by one thread.

    Parameters
    ----------
    path
        The file. What was there is replaced in one step.
    head
        The first line.
    kept
        Lines of an earlier journal that go on to count.
    """

    def __init__(self, path: Path, head: Mapping[str, Any], kept: Sequence[Line] = ()) -> None:
        self._path = path
        new = path.with_name(f"{path.name}.new")
        try:
            self._file = new.open("wb", buffering=0)
            self._write(_line(head, b""))
            for line in kept:
                self._write(line.raw())
            if kept:
                os.fsync(self._file.fileno())
            new.rename(path)
        except OSError as error:
            raise target_error(error, path) from error

    def append(self, head: Mapping[str, Any], payload: bytes = b"") -> None:
        """Write a line down. It survives the process; that it survives the machine isn't promised.

        Raises
        ------
        TargetError
            If it can't be written.
        """
        try:
            self._write(_line(head, payload))
        except OSError as error:
            raise target_error(error, self._path) from error

    def _write(self, text: bytes) -> None:
        view = memoryview(text)
        while view:
            view = view[self._file.write(view) :]

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def _line(head: Mapping[str, Any], payload: bytes) -> bytes:
    text = json.dumps(head, separators=(",", ":"), allow_nan=False).encode("ascii")
    rest = text + b" " + base64.b64encode(payload)
    return _crc(rest) + b" " + rest + b"\n"
