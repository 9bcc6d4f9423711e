"""Hugging Face's safetensors: one file, or shards with an index.

A checkpoint is a ``*.safetensors`` file, a folder with one, or a folder with
``model.safetensors.index.json`` and the files that it names. The headers say everything: there is
nothing to unpickle. Everything is whole, on one rank; see :mod:`_safetensors_notes` for states
other than the weights.

What lies where: ``_safetensors_header`` (rules of a file), ``_safetensors_index`` (rules of an
index), ``_safetensors_notes`` (what zreshard adds), ``_safetensors_choose`` (what is written) and
``_safetensors_write`` (where). The safetensors library isn't used: it keeps the last of two
tensors of one name and says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from reshard.builder import Builder, Placed
from reshard.collector import collector_paused
from reshard.errors import IncompleteError, NotFoundError, RequestError, UnsupportedError
from reshard.format import AS_WRITTEN, Draft, Found, Request
from reshard.formats import _safetensors_header as headers
from reshard.formats import _safetensors_index as indexes
from reshard.formats import _safetensors_pieces as pieces
from reshard.formats._safetensors_choose import FRAMEWORK, OBJECTS
from reshard.formats._safetensors_header import SUFFIX, Header, Slot
from reshard.formats._safetensors_index import MODEL
from reshard.formats._safetensors_notes import Notes, free_text, read_digests, read_notes
from reshard.layout import Entry, TensorKey
from reshard.manifest import Manifest
from reshard.source import source_error
from reshard.stored import brief

_NUMBERED = re.compile(r"-\d{5,}-of-(\d{5,})\.safetensors$")


class Safetensors:
    """The safetensors format; see the module."""

    name = "safetensors"
    title = "Hugging Face safetensors: whole tensors in one file, or in shards with an index"
    writes = True
    sharded = False

    def detect(self, path: Path) -> Found | None:
        """A file whose name or first bytes say so, an index, or a folder with one of these."""
        if path.is_dir():
            files, index_files = _inside(path)
            return Found(path) if files or index_files else None
        if path.name.endswith((SUFFIX, indexes.SUFFIX)) or _begins_like_one(path):
            return Found(path)
        return None

    @collector_paused()
    def open(self, root: Path) -> Manifest:
        """Read the headers (and the index), and check all of their rules.

        Raises
        ------
        CorruptError
            If a header or the index breaks a rule; all that is wrong with it is listed.
        IncompleteError
            If a file, a tensor or the index is missing.
        UnsafeError
            If the index names files outside its folder.
        RequestError
            If a folder holds several models.
        UnsupportedError
            If a file holds pieces of tensors, not whole ones.
        """
        if not root.is_dir():
            if root.name.endswith(indexes.SUFFIX):
                return _open_index(root)
            return _open_file(root, root, ())
        return _open_folder(root)

    def draft(self, source: Manifest, request: Request, target: Path) -> Draft:
        """Lay out one file (a target that ends in ``.safetensors``) or a folder of shards."""
        from reshard.formats._safetensors_write import draft

        return draft(source, request, target)


FORMAT = Safetensors()


# -- what there is --------------------------------------------------------------------------------


def _begins_like_one(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return headers.looks_like(file.read(headers.PREFIX + 1), path.stat().st_size)
    except OSError:
        return False


def _inside(folder: Path) -> tuple[list[str], list[str]]:
    """Names of the safetensors files and of the indexes in a folder, sorted."""
    try:
        names = sorted(p.name for p in folder.iterdir() if not p.is_dir())
    except OSError as error:
        raise source_error(error, folder) from error
    return (
        [n for n in names if n.endswith(SUFFIX)],
        [n for n in names if n.endswith(indexes.SUFFIX)],
    )


def _open_folder(folder: Path) -> Manifest:
    files, index_files = _inside(folder)
    if not index_files and any(pieces.NAME.fullmatch(file) for file in files):
        return pieces.open_pieces(FORMAT.name, folder)
    index = MODEL + indexes.SUFFIX if MODEL + indexes.SUFFIX in index_files else None
    if index is None and len(index_files) > 1:
        raise RequestError(
            f"holds several indexes: {', '.join(index_files)}",
            where=folder,
            hint="name the index that you mean instead of the folder",
        )
    if index is None and index_files:
        index = index_files[0]
    if index is not None:
        return _open_index(folder / index)
    if not files:
        raise NotFoundError("there is no safetensors file", where=folder)
    file = _only(folder, files)
    return _open_file(folder, folder / file, [f for f in files if f != file])


def _only(folder: Path, files: list[str]) -> str:
    """The one file of a folder without an index that holds the model."""
    numbered = [f for f in files if (m := _NUMBERED.search(f)) and int(m[1]) > 1]
    if numbered:
        raise IncompleteError(
            f"holds numbered shards ({brief(numbered[0])}) and no index that says what belongs "
            "together",
            where=folder,
            hint=f"copy {MODEL}{indexes.SUFFIX} too, or name one file to read that one alone",
        )
    if len(files) == 1:
        return files[0]
    if MODEL + SUFFIX in files:
        return MODEL + SUFFIX
    raise IncompleteError(
        f"holds {len(files)} safetensors files and no index that says what belongs together: "
        + ", ".join(files[:5]),
        where=folder,
        hint="an index is due; or name one file to read that one alone",
    )


# -- one file -------------------------------------------------------------------------------------


def _open_file(root: Path, path: Path, others: Iterable[str]) -> Manifest:
    reading = _Reading(root)
    reading.add(path, None)
    for other in others:
        reading.builder.note("note", "isn't part of the model that was opened", other)
    found = _NUMBERED.search(path.name)
    if found and int(found[1]) > 1:
        text = f"is one of {int(found[1])} files of a model; the others weren't read"
        reading.builder.note("note", text, path.name)
    return reading.finish()


# -- several files --------------------------------------------------------------------------------


def _open_index(path: Path) -> Manifest:
    index = indexes.read(path)
    folder = path.parent
    reading = _Reading(folder)
    _refuse_second_model(path, index)
    wanted: dict[str, list[str]] = {}
    for label, file in index.files.items():
        wanted.setdefault(file, []).append(label)
    indexes.refuse_missing_files(path, wanted)
    missing: list[str] = []
    for file, labels in sorted(wanted.items()):
        missing += [f"{brief(m)} in {file}" for m in reading.add(folder / file, labels)]
    if missing:
        shown = ", ".join(missing[:20])
        more = f" and {len(missing) - 20} more" if len(missing) > 20 else ""
        raise IncompleteError(
            f"the index promises tensors that the files don't hold: {shown}{more}",
            where=path,
            hint="a file is of another version of the model; copy all files again",
        )
    pieces.refuse_lost_scalars(folder, reading.scalars())
    _note_metadata(reading, path, index)
    for file in sorted({*_inside(folder)[0]} - set(wanted)):
        reading.builder.note("note", "isn't named by the index and wasn't read", file)
    return reading.finish()


def _refuse_second_model(path: Path, index: indexes.Index) -> None:
    """A whole model beside an index: which of the two is stale can't be known."""
    whole = path.name.removesuffix(indexes.SUFFIX) + SUFFIX
    if (path.parent / whole).is_file() and whole not in index.files.values():
        raise RequestError(
            f"there are two models: {whole}, and the shards that {path.name} names",
            where=path.parent,
            hint=f"move the one that is stale away, or name the file {whole} to read that one",
        )


def _note_metadata(reading: _Reading, path: Path, index: indexes.Index) -> None:
    total = index.metadata.get("total_size")
    if "total_size" in index.metadata and total != reading.nbytes:
        text = f"total_size is {brief(total)}, but the tensors take {reading.nbytes} bytes"
        reading.builder.note("note", text, path.name)
    others = sorted({*index.metadata} - {"total_size", "total_parameters"})
    if others:
        text = f"metadata of the index isn't carried: {', '.join(map(brief, others))}"
        reading.builder.note("left-out", text, path.name)


# -- the manifest ---------------------------------------------------------------------------------


class _Reading:
    """A manifest in the making."""

    def __init__(self, root: Path) -> None:
        self.builder = Builder(FORMAT.name, root)
        self.nbytes = 0
        self._placed: dict[str, list[Placed]] = {}
        self._digests: dict[TensorKey, int] = {}
        self._texts: list[dict[str, str]] = []
        self._empty: list[str] = []
        self._scalars: list[tuple[str, Path, int, int]] = []

    def scalars(self) -> Iterator[tuple[str, bytes]]:
        """The 0-d tensors that were added, and their bytes."""
        for label, path, offset, nbytes in self._scalars:
            yield label, pieces.read_at(path, offset, nbytes)

    def add(self, path: Path, labels: Iterable[str] | None) -> list[str]:
        """Take tensors of a file (``None``: all of them); returns the labels that it lacks."""
        header = headers.read(path)
        if pieces.INFO in header.metadata:
            raise UnsupportedError(
                "holds pieces of tensors, as torch's distributed checkpoint writes them, and "
                "doesn't say how large the whole ones are",
                where=path,
                hint="it is one file of a sharded checkpoint: open that checkpoint's folder",
            )
        notes = read_notes(header.metadata, path)
        digests = read_digests(header.metadata, path)
        there = {slot.name for slot in header.slots}
        chosen = there if labels is None else set(labels)
        if stale := sorted(there - chosen):
            text = f"holds tensors that the index doesn't assign to it: {_some(stale)}"
            self.builder.note("note", text, path.name)
        taken = there & chosen
        self._take((slot for slot in header.slots if slot.name in taken), header, path, notes)
        for label, digest in digests.items():
            if label in taken:
                self._digests[notes.key(label)] = digest
        for alias, name in notes.aliases.items():
            if name in taken and alias not in chosen:
                self.builder.aliases[alias] = name
        self._texts.append(free_text(header.metadata, notes.aliases))
        return sorted(chosen - there)

    def _take(self, slots: Iterable[Slot], header: Header, path: Path, notes: Notes) -> None:
        file, begin, nbytes = self.builder.file(path), header.payload, 0
        for label, dtype, shape, start, stop in slots:
            name, state = notes.key(label)
            placed = Placed(Entry(name, shape), dtype, file, begin + start)
            self._placed.setdefault(state, []).append(placed)
            nbytes += stop - start
            if shape == (0,):
                self._empty.append(label)
            elif shape == ():
                self._scalars.append((label, path, begin + start, stop - start))
        self.nbytes += nbytes

    def finish(self) -> Manifest:
        """The manifest of everything that was added."""
        if self._empty and self._is_adapter():
            raise IncompleteError(
                "is an adapter whose weights weren't saved: tensors of shape [0], which is what "
                f"saving under ZeRO-3 leaves of a parameter: {_some(self._empty)}",
                where=self.builder.root,
                hint="save it again with its parameters gathered, or take the training checkpoint",
            )
        if self._empty:
            text = (
                "tensors of shape [0], which is what saving under ZeRO-3 leaves of a parameter: "
                + _some(self._empty)
            )
            self.builder.note("note", text, self.builder.root.name)
        for state, placed in self._placed.items():
            self.builder.add_placed(state, state, placed)
        free = self._text()
        framework = free.pop(FRAMEWORK, None)
        if free:
            self.builder.objects[OBJECTS] = {"metadata": free}
        if framework is not None:
            self.builder.objects[OBJECTS + AS_WRITTEN] = {"metadata": {FRAMEWORK: framework}}
        return replace(self.builder.build({"shard": 1}, None), digests=self._digests)

    def _is_adapter(self) -> bool:
        """Whether these are the weights of an adapter, as PEFT names its files."""
        root = self.builder.root
        folder = root if root.is_dir() else root.parent
        names = [root.name] if root.is_file() else [path.name for path in root.iterdir()]
        named = any(name.startswith("adapter_model") for name in names)
        return named or (folder / "adapter_config.json").is_file()

    def _text(self) -> dict[str, str]:
        """The free text that all files agree on."""
        merged: dict[str, str] = {}
        differ: set[str] = set()
        for text in self._texts:
            for key, value in text.items():
                if merged.setdefault(key, value) != value:
                    differ.add(key)
        if differ:
            text_ = f"the files' metadata disagree on {_some(sorted(differ))}"
            self.builder.note("left-out", text_, self.builder.root.name)
        return {key: value for key, value in merged.items() if key not in differ}


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(brief, names[:5])) + more
