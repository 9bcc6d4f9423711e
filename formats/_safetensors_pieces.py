"""How are safetensors files put together that hold pieces of tensors?

torch's ``HuggingFaceStorageWriter`` writes ``shard-00001-model-00001-of-00002.safetensors``: for
each rank (from 1) and each file of the model the rank's boxes, whose offsets stand in the free text
under ``DCP_SHARDING_INFO``. **No file says how large a whole tensor is.** It is taken to end where
its last box ends, so that everything depends on all files being there: a rank's file that lacks is
an error, and boxes must cover their tensors. (torch itself fills holes with zeros.)

Source: torch 2.13, ``torch/distributed/checkpoint/hf_storage.py`` and ``_hf_utils.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from reshard.box import Box, Shape
from reshard.builder import Builder, Placed
from reshard.errors import CorruptError, IncompleteError, InconsistentError
from reshard.formats import _safetensors_header as headers
from reshard.formats._safetensors_header import Header, Slot
from reshard.formats._safetensors_json import JsonObject, parse_json
from reshard.layout import PARAM, Entry
from reshard.manifest import Manifest
from reshard.source import source_error
from reshard.stored import brief

INFO = "DCP_SHARDING_INFO"
"""Key of the free text under which the offsets stand."""

FOLDER = "sharded"
"""Where torch leaves the pieces when it also writes whole tensors."""

NAME = re.compile(r"shard-(\d{5})-model-(\d{5})-of-(\d{5})\.safetensors")


def pieces_in(folder: Path) -> list[Path]:
    """The files of pieces in a folder, by rank and number."""
    try:
        return sorted(p for p in folder.iterdir() if NAME.fullmatch(p.name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise source_error(error, folder) from error


def open_pieces(name: str, folder: Path) -> Manifest:
    """Put the pieces of a folder together.

    Parameters
    ----------
    name
        Of the format.
    folder
        It holds files of pieces.

    Raises
    ------
    IncompleteError
        If a rank's file lacks.
    CorruptError, InconsistentError
        If the offsets don't fit the tensors, or files don't agree.
    """
    files = pieces_in(folder)
    _check_complete(folder, files)
    builder = Builder(name, folder)
    boxes: dict[str, list[tuple[Slot, Shape, int, int]]] = {}
    for path in files:
        header = headers.read(path)
        offsets = _offsets(header, path)
        index = builder.file(path)
        for slot in header.slots:
            start = offsets.get(slot.name)
            if start is None or len(start) != len(slot.shape):
                raise CorruptError(
                    f"has no offsets of {brief(slot.name)} {list(slot.shape)}", where=path
                )
            at = header.payload + slot.start
            boxes.setdefault(slot.name, []).append((slot, start, index, at))
    placed = [one for tensor, some in boxes.items() for one in _placed(folder, tensor, some)]
    builder.add_placed(PARAM, PARAM, placed)
    builder.note(
        "note",
        "no file says how large the whole tensors are: each is taken to end where its last piece "
        "does",
        folder.name,
    )
    return builder.build({"shard": 1}, None)


def _check_complete(folder: Path, files: Iterable[Path]) -> None:
    found: dict[tuple[int, int], str] = {}
    counts = set()
    for path in files:
        parts = NAME.fullmatch(path.name)
        assert parts is not None, path
        rank, number, count = map(int, parts.groups())
        found[rank, number] = path.name
        counts.add(count)
    if len(counts) != 1:
        raise InconsistentError(
            f"holds pieces of models of {' and '.join(map(str, sorted(counts)))} files",
            where=folder,
        )
    (count,) = counts
    for rank in range(1, max(rank for rank, _ in found) + 1):
        for number in range(1, count + 1):
            if (rank, number) not in found:
                name = f"shard-{rank:05d}-model-{number:05d}-of-{count:05d}.safetensors"
                raise IncompleteError(
                    f"{name} is missing",
                    where=folder,
                    hint="without all ranks' files the tensors' shapes aren't known; copy it too",
                )


def _offsets(header: Header, path: Path) -> Mapping[str, Shape]:
    text = header.metadata.get(INFO)
    if text is None:
        raise CorruptError(f"is named as a rank's pieces and has no {INFO}", where=path)
    content = parse_json(text.encode(), path, INFO)
    if not isinstance(content, JsonObject) or content.repeated:
        raise CorruptError(f"{INFO} isn't an object with distinct keys", where=path)
    return {name: _offset(value, name, path) for name, value in content}


def _offset(value: object, name: str, path: Path) -> Shape:
    found = value.fields.get("saved_offsets") if isinstance(value, JsonObject) else None
    if not isinstance(found, list) or not all(type(i) is int and i >= 0 for i in found):
        raise CorruptError(f"{INFO} has {brief(found)} as the offsets of {brief(name)}", where=path)
    return tuple(found)


def _placed(
    folder: Path, name: str, boxes: Iterable[tuple[Slot, Shape, int, int]]
) -> Iterable[Placed]:
    rows = list(boxes)
    first = rows[0][0]
    for slot, _, _, _ in rows:
        if slot.dtype != first.dtype or len(slot.shape) != len(first.shape):
            raise InconsistentError(
                f"{name} is {first.dtype} {list(first.shape)} in one file and {slot.dtype} "
                f"{list(slot.shape)} in another",
                where=folder,
            )
    ends = [[o + n for o, n in zip(start, slot.shape, strict=True)] for slot, start, _, _ in rows]
    shape = tuple(max(dims) for dims in zip(*ends, strict=True))
    for slot, start, file, at in rows:
        stop = tuple(o + n for o, n in zip(start, slot.shape, strict=True))
        yield Placed(Entry(name, shape, Box(start, stop)), slot.dtype, file, at)


def refuse_lost_scalars(folder: Path, whole: Iterable[tuple[str, bytes]]) -> None:
    """Compare 0-d tensors of a whole model with the pieces beside it.

    torch's own consolidation writes them as 0.0.

    Raises
    ------
    InconsistentError
        If one differs.
    """
    files = pieces_in(folder / FOLDER)
    values = dict(whole) if files else {}
    for path in files if values else ():
        header = headers.read(path)
        for slot in header.slots:
            if slot.shape == () and slot.name in values:
                own = read_at(path, header.payload + slot.start, slot.stop - slot.start)
                if own != values[slot.name]:
                    raise InconsistentError(
                        f"the 0-d {brief(slot.name)} isn't what it is in {FOLDER}/{path.name}: "
                        "torch's consolidation loses such tensors",
                        where=folder,
                        hint=f"open {folder / FOLDER} instead: it has all tensors right",
                    )


def read_at(path: Path, offset: int, nbytes: int) -> bytes:
    """A few bytes of a file."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(nbytes)
    except OSError as error:
        raise source_error(error, path) from error
