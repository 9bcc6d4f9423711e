"""Any checkpoint with its files encoded, for tests: each compressed, in a file of its own."""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from reshard.decoded import Write
from reshard.manifest import Manifest
from reshard.store import File


@dataclass
class Unzip:
    """A decoder that counts; ``piece`` bytes of the stored file are decoded at a time."""

    path: str
    piece: int = 1000
    calls: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def stored(self) -> tuple[str, ...]:
        return (self.path,)

    def decode(self, root: Path, write: Write) -> None:
        with self.lock:
            self.calls[self.path] += 1
        stream = zlib.decompressobj()
        try:
            with (root / self.path).open("rb") as file:
                while piece := file.read(self.piece):
                    write(stream.decompress(piece))
            write(stream.flush())
        except zlib.error as error:
            raise ValueError(str(error)) from error


def encode(manifest: Manifest, root: Path, calls: Counter[str] | None = None) -> Manifest:
    """The same checkpoint, its files compressed below another root."""
    files = []
    calls = Counter() if calls is None else calls
    for index, file in enumerate(manifest.files):
        path = f"{index}.z"
        root.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(zlib.compress(manifest.path(index).read_bytes(), 1))
        files.append(File(path, file.nbytes, Unzip(path, calls=calls)))
    return replace(manifest, root=root, files=tuple(files))
