"""What do the calls alone take that move the same bytes, with the same checksums?

Reads, sums and writes in two threads and nothing else: no plan, no metadata, no proof. What a
reshard takes over this is the library's own.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

STEP = 1 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``[offset, offset + nbytes)`` of a source, to the place ``at`` of a target."""

    source: Path
    offset: int
    nbytes: int
    at: int


def pieces(files: list[Path], count: int) -> list[list[Piece]]:
    """The bytes of files, one after the other, cut into ``count`` targets of equal size."""
    sizes = [file.stat().st_size for file in files]
    each = -(-sum(sizes) // count)
    found: list[list[Piece]] = [[] for _ in range(count)]
    begin = 0
    for file, size in zip(files, sizes, strict=True):
        done = 0
        while done < size:
            target, at = divmod(begin + done, each)
            part = min(size - done, each - at)
            found[target].append(Piece(file, done, part, at))
            done += part
        begin += size
    return [some for some in found if some]


def move(source: Path, after: int, target: Path) -> float:
    """Cut each array of a native checkpoint into ``after`` files; returns processor seconds."""
    target.mkdir()
    waiting: deque[tuple[Path, list[Piece]]] = deque()
    for folder in sorted({file.parent for file in source.rglob("c/*")}):
        files = sorted(folder.iterdir(), key=lambda file: int(file.name))
        for number, some in enumerate(pieces(files, after)):
            waiting.append((target / f"{folder.parent.name}.{number}", some))
    before = time.process_time()
    threads = [threading.Thread(target=_work, args=(waiting,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.process_time() - before


def _work(waiting: deque[tuple[Path, list[Piece]]]) -> None:
    crc64 = importlib.import_module("awscrt.checksums").crc64nvme
    buffer = memoryview(bytearray(STEP))
    while True:
        try:
            path, some = waiting.popleft()
        except IndexError:  # the other thread took the last
            return
        to = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.posix_fallocate(to, 0, sum(piece.nbytes for piece in some))
        for piece in some:
            fd = os.open(piece.source, os.O_RDONLY)
            for done in range(0, piece.nbytes, STEP):
                part = buffer[: min(STEP, piece.nbytes - done)]
                assert os.preadv(fd, [part], piece.offset + done) == len(part)
                crc64(part)
                assert os.pwrite(to, part, piece.at + done) == len(part)
            os.close(fd)
        os.close(to)
