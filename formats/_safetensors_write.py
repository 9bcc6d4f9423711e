"""How is a model laid out in safetensors files?

The order of names decides which shard a tensor comes to, and the reference implementation's order
where it lies in it, so that the same state gives the same bytes, whatever the world size, stage
or format that it came from.

The header stands before the payload, and the digests in it are known after: they have a fixed
width, so that the header is laid out at first and written in the end.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.commit import write_file
from reshard.errors import RequestError
from reshard.format import AS_WRITTEN, Draft, Loss, Request
from reshard.formats import _safetensors_header as headers
from reshard.formats import _safetensors_index as indexes
from reshard.formats._safetensors_choose import FRAMEWORK, OBJECTS, Item, choose, losses, notes_of
from reshard.formats._safetensors_header import SUFFIX, Slot
from reshard.formats._safetensors_index import MODEL
from reshard.formats._safetensors_json import is_text
from reshard.formats._safetensors_notes import encode_digests, free_text
from reshard.layout import BUFFER, PARAM, Entry, FlatSpace, Layout, TensorKey
from reshard.manifest import Manifest, Note
from reshard.partition import Replicated
from reshard.ruler import ints
from reshard.store import EntryStore, File, Store
from reshard.stored import brief
from reshard.targets import target_error

if TYPE_CHECKING:
    from reshard.execute import Result


SHARD_BYTES = 5 * 1000**3
"""Bytes of tensors in a shard, where nothing else is asked for: transformers' "5GB"."""


def draft(source: Manifest, request: Request, target: Path) -> Draft:
    """Lay out a source's model as one file or as a folder; see :class:`~reshard.format.Format`.

    Raises
    ------
    RequestError
        If the source lacks weights that are asked for, two tensors would have one name, a name
        or a cast can't be written, or one file is asked for and a limit that it breaks.
    UnsupportedError
        If the format has no such element type.
    """
    items = choose(source, request)
    single = target.name.endswith(SUFFIX)
    shards = _shards(items, request, target, single)
    text, lost = _carried(source)
    files = _files(source, shards, text, single)
    index = _index(files) if len(files) > 1 else None
    manifest = _manifest(source, target, files)
    return Draft(
        manifest=manifest,
        finish=_Finish(files, index),
        origin={i.key: i.source.key for i in items if i.key != i.source.key},
        casts=frozenset(i.key for i in items if i.cast),
        losses=(*losses(source, request, items), *lost),
        single_file=single,
    )


def _carried(source: Manifest) -> tuple[dict[str, str], tuple[Loss, ...]]:
    """The free text of a source that was safetensors too."""
    text: dict[Any, Any] = {}
    for name in (OBJECTS + AS_WRITTEN, OBJECTS):
        found = source.objects.get(name)
        some: Any = found.get("metadata", {}) if isinstance(found, Mapping) else {}
        if not isinstance(some, Mapping) or not all(map(is_text, [*some, *some.values()])):
            return {}, (Loss(OBJECTS, "its metadata isn't text, which it must be"),)
        text |= some
    return free_text(text, ()), ()


# -- where it lies --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OutFile:
    """A file that will be written.

    Parameters
    ----------
    path
        Relative to the target; empty where the target is the file.
    items, slots
        Its tensors and where they lie, in the order of their bytes.
    metadata
        Its free text without the digests.
    """

    path: str
    items: tuple[Item, ...]
    slots: tuple[Slot, ...]
    metadata: Mapping[str, str]

    def header(self, digests: Mapping[TensorKey, int]) -> bytes:
        """Its first bytes; as many as with any other digests."""
        by_label = {i.label: digests.get(i.key, 0) for i in self.items}
        return headers.encode(self.slots, {**self.metadata, **encode_digests(by_label)})


def _shards(
    items: Sequence[Item], request: Request, target: Path, single: bool
) -> list[list[Item]]:
    """Cut the tensors in shards, greedily, as ``transformers`` does."""
    limit = request.max_shard_bytes
    if limit is not None and limit < 1:
        raise RequestError(f"a shard of at most {limit} bytes can't hold anything")
    total = sum(i.nbytes for i in items)
    if single:
        if limit is not None and total > limit:
            raise RequestError(
                f"the tensors take {total} bytes, and a file may hold {limit}",
                where=target,
                hint="name a folder as the target, so that it can hold several files",
            )
        return [list(items)]
    limit = limit or SHARD_BYTES
    shards: list[list[Item]] = []
    filling: list[Item] = []
    filled = 0
    for item in items:
        if item.nbytes > limit:
            shards.append([item])
            continue
        if filled + item.nbytes > limit:
            shards.append(filling)
            filling, filled = [], 0
        filling.append(item)
        filled += item.nbytes
    return [*shards, filling] if filling else shards


def _files(
    source: Manifest, shards: Sequence[Sequence[Item]], text: Mapping[str, str], single: bool
) -> list[OutFile]:
    files = []
    everywhere = {i.label for shard in shards for i in shard}
    for number, shard in enumerate(shards, start=1):
        if single:
            path = ""
        elif len(shards) == 1:
            path = MODEL + SUFFIX
        else:
            path = f"{MODEL}-{number:05d}-of-{len(shards):05d}{SUFFIX}"
        inside = _in_reference_order(shard)
        aliases = _aliases(source, shard, everywhere)
        notes = notes_of(shard, aliases)
        # an alias stands in the text as safetensors.torch.save_model notes it
        metadata = {**aliases, FRAMEWORK: "pt", **text, **notes.encode()}
        ordered = dict(sorted(metadata.items()))
        file = OutFile(path, inside, _slots(inside), ordered)
        _refuse_long(file)
        files.append(file)
    return files


def _in_reference_order(items: Iterable[Item]) -> tuple[Item, ...]:
    def order(item: Item) -> tuple[int, bytes]:
        assert item.dtype.safetensors is not None
        return headers.reference_order(item.dtype.safetensors, item.label)

    return tuple(sorted(items, key=order))


def _slots(items: Iterable[Item]) -> tuple[Slot, ...]:
    slots, at = [], 0
    for item in items:
        slots.append(Slot(item.label, item.dtype, item.shape, at, at + item.nbytes))
        at += item.nbytes
    return tuple(slots)


def _aliases(source: Manifest, items: Iterable[Item], everywhere: set[str]) -> dict[str, str]:
    """Tied names whose stored name is among these tensors."""
    here = {i.key[0] for i in items if i.key[1] in (PARAM, BUFFER)}
    found = {a: n for a, n in source.aliases.items() if n in here and a not in everywhere}
    for alias in found:
        if not is_text(alias):
            raise RequestError(f"the tied name {brief(alias)} can't be written as text")
    return found


def _refuse_long(file: OutFile) -> None:
    length = len(file.header({})) - headers.PREFIX
    if length > headers.HEADER_LIMIT:
        raise RequestError(
            f"the header of {file.path or 'the file'} would have {length} bytes; "
            f"{headers.HEADER_LIMIT} is the most that can be read",
            hint="cut the model in more files (--max-shard-size)",
        )


def _index(files: Iterable[OutFile]) -> bytes:
    where = {i.label: f.path for f in files for i in f.items}
    content = indexes.encode(where, sum(i.nbytes for f in files for i in f.items))
    if len(content) > indexes.INDEX_LIMIT:
        raise RequestError(
            f"the index would have {len(content)} bytes; loaders refuse more than "
            f"{indexes.INDEX_LIMIT}",
            hint="write one file (a target that ends in .safetensors)",
        )
    return content


# -- the manifest and the end ---------------------------------------------------------------------


def _manifest(source: Manifest, target: Path, files: Sequence[OutFile]) -> Manifest:
    """Spaces of tensors with the same states and element types, in source and target."""
    members: dict[str, list[tuple[Item, int, int]]] = {}
    sizes, notes = [], []
    for number, file in enumerate(files):
        payload = len(file.header({}))
        sizes.append(File(file.path, payload + (file.slots[-1].stop if file.slots else 0)))
        if payload - headers.PREFIX > headers.HUB_LIMIT:
            text = f"its header has {payload - headers.PREFIX} bytes, more than the hub reads"
            notes.append(Note("note", text, file.path))
        for item, slot in zip(file.items, file.slots, strict=True):
            members.setdefault(_space_name(item), []).append((item, number, payload + slot.start))
    spaces: list[FlatSpace] = []
    stores: dict[tuple[str, str], Store] = {}
    for name, rows in members.items():
        state, dtype = rows[0][0].key[1], rows[0][0].dtype
        entries = tuple(Entry(i.key[0], i.shape) for i, _, _ in rows)
        spaces.append(FlatSpace(name, entries, Replicated(1), {state: dtype}))
        stores[name, state] = EntryStore(ints([f for _, f, _ in rows]), ints([o for *_, o in rows]))
    aliases: dict[str, str] = {}
    everywhere = {i.label for f in files for i in f.items}
    for file in files:
        aliases.update(_aliases(source, file.items, everywhere))
    return Manifest(
        format=OBJECTS,
        root=target,
        layout=Layout(tuple(spaces), {"shard": 1}),
        files=tuple(sizes),
        stores=stores,
        aliases=aliases,
        notes=tuple(notes),
    )


def _space_name(item: Item) -> str:
    name = f"{item.key[1]}.{item.dtype}"
    if item.key == item.source.key and not item.cast:
        return name
    return f"{name}-from-{item.source.state}.{item.source.dtype}"


@dataclass(frozen=True, slots=True)
class _Finish:
    """Writes the headers, with the digests, and the index last."""

    files: Sequence[OutFile]
    index: bytes | None

    def __call__(self, folder: Path, result: Result) -> None:
        for file in self.files:
            path = folder / file.path if file.path else folder
            header = file.header(result.digests)
            assert len(header) == len(file.header({})), "digests have a fixed width"
            _write_at_start(path, header)
        if self.index is not None:
            write_file(folder / f"{MODEL}{indexes.SUFFIX}", self.index)


def _write_at_start(path: Path, data: bytes) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(fd, data[done:], done)
        finally:
            os.close(fd)
    except OSError as error:
        raise target_error(error, path) from error
