"""What must hold for every format, whatever it looks like on disk.

:func:`obligations` gives the rules; ``test_format_contract.py`` holds each format that there is
to them, and ``test_docs.py`` the toy of ``docs/add-a-format.md``.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import pytest

from reshard.api import convert, open_manifest
from reshard.checkpoint import Checkpoint
from reshard.conversion import Wanted
from reshard.errors import CorruptError, ReshardError
from reshard.execute import Options
from reshard.format import Format, Request
from reshard.formats import detect
from reshard.layout import key_text
from reshard.manifest import Manifest

FAST = Options(sync=False)


@dataclass(frozen=True, slots=True)
class Case:
    """A format, a checkpoint to write in it, and a folder to work in."""

    format: Format
    source: Manifest
    folder: Path

    def write(self, name: str = "target", world: int | None = None) -> Path:
        """Convert the source; returns where the target stands."""
        path = self.folder / name
        wanted = Wanted(format=self.format.name, world=world, drop=("*",))
        convert(self.source, path, wanted, FAST)
        return path


def says_what_it_is(case: Case) -> None:
    """A name that can be an argument, a title that is one short line."""
    assert re.fullmatch(r"[a-z][a-z0-9-]*", case.format.name)
    assert 0 < len(case.format.title) <= 100
    assert "\n" not in case.format.title
    assert isinstance(case.format.writes, bool)
    assert isinstance(case.format.sharded, bool)


def recognises_no_strangers(case: Case) -> None:
    """Empty folders, foreign files and nothing at all are none of its checkpoints."""
    folder = case.folder / "strangers"
    (folder / "inside").mkdir(parents=True)
    (folder / "empty").touch()
    (folder / "zeros").write_bytes(bytes(4096))
    (folder / "notes.txt").write_text("nothing to see here\n", encoding="utf-8")
    (folder / "data.json").write_text('{"a": 1}\n', encoding="utf-8")
    for path in (folder, *folder.iterdir(), folder / "missing"):
        assert case.format.detect(path) is None, path


def drafts_without_writing(case: Case) -> None:
    """A draft says where everything will lie, and what won't; the disk is untouched."""
    target = case.folder / "target"
    draft = case.format.draft(case.source, Request(), target)
    assert not any(case.folder.iterdir())
    manifest = draft.manifest
    assert manifest.format == case.format.name
    paths = [f.path for f in manifest.files]
    assert len(set(paths)) == len(paths)
    for path in paths:
        assert not PurePosixPath(path).is_absolute()
        assert ".." not in PurePosixPath(path).parts
    held = {draft.origin.get(key, key) for key in manifest.tensors}
    lost = {loss.what for loss in draft.losses}
    assert held <= set(case.source.tensors)
    silent = [k for k in case.source.tensors if k not in held and key_text(k) not in lost]
    assert silent == [], "neither written nor listed as lost"


def gives_back_what_it_was_given(case: Case) -> None:
    """What is written is found again, and each tensor has the bits that it had."""
    worlds = (1, 3, 8) if case.format.sharded else (None,)
    before = Checkpoint(case.source)
    for world in worlds:
        path = case.write(f"world{world}", world)
        found_format, _ = detect(path)
        assert found_format.name == case.format.name
        after = Checkpoint(open_manifest(path))
        assert world is None or after.world == world
        request = Request(world=world)
        draft = case.format.draft(case.source, request, case.folder / "again")
        assert set(after.manifest.tensors) == set(draft.manifest.tensors)
        for key in after.manifest.tensors:
            found, expected = after[key].numpy(), before[draft.origin.get(key, key)].numpy()
            assert found.dtype == expected.dtype, key
            assert found.shape == expected.shape, key
            assert found.tobytes() == expected.tobytes(), key


def writes_the_same_again(case: Case) -> None:
    """The same state gives the same files."""
    first, second = case.write("first"), case.write("second")
    names = sorted(p.relative_to(first) for p in first.rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(second) for p in second.rglob("*") if p.is_file())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def misses_what_is_missing(case: Case) -> None:
    """A payload file that is gone or cut short is an error, and one of ours."""
    whole = case.write()
    manifest = open_manifest(whole)
    some = range(0, len(manifest.files), max(1, len(manifest.files) // 5))
    for path in map(manifest.path, some):
        content = path.read_bytes()
        for damaged in (None, content[:-1], content[: len(content) // 2], b""):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            with pytest.raises(ReshardError):
                open_manifest(whole)
            path.write_bytes(content)
    open_manifest(whole)


def finds_a_flipped_byte(case: Case) -> None:
    """Where checksums are stored, damage to the payload is found when it is read."""
    whole = case.write()
    manifest = open_manifest(whole)
    assert manifest.regions.values is not None or manifest.digests, "keeps no checksums"
    random = np.random.default_rng(7)
    tensors = sorted(manifest.tensors)
    for index in random.choice(len(tensors), 3, replace=False):
        path, offset = _some_byte(manifest, tensors[index])
        content = bytearray(path.read_bytes())
        content[offset] ^= 0x10
        path.write_bytes(content)
        with pytest.raises(CorruptError):
            convert(open_manifest(whole), case.folder / "copy", Wanted(format="native"), FAST)
        assert not (case.folder / "copy").exists()
        content[offset] ^= 0x10
        path.write_bytes(content)
    shutil.rmtree(whole)


def _some_byte(manifest: Manifest, key: tuple[str, str]) -> tuple[Path, int]:
    """The file and offset of the first element of a tensor, as its store says."""
    from reshard.store import ShardStore

    space_index, entry = manifest.tensors[key].places[0]
    space = manifest.space(space_index)
    store = manifest.stores[space.name, key[1]]
    width = space.states[key[1]].itemsize
    if not isinstance(store, ShardStore):
        return manifest.path(int(store.files[entry])), int(store.offsets[entry])
    shard, base, phase = (
        int(column[entry]) for column in (space.ruler.first, space.ruler.base, space.ruler.phase)
    )
    skip, inside = divmod(phase, int(space.ruler.size[entry]))
    at = (shard + skip) * store.part + base + inside
    chunk, element = divmod(at, store.chunk)
    return manifest.path(int(store.files[chunk])), int(store.offsets[chunk]) + element * width


def obligations(writes: bool) -> tuple[Callable[[Case], None], ...]:
    """The rules for a format that can be read, or read and written."""
    reading = (says_what_it_is, recognises_no_strangers)
    writing = (
        drafts_without_writing,
        gives_back_what_it_was_given,
        writes_the_same_again,
        misses_what_is_missing,
        finds_a_flipped_byte,
    )
    return (*reading, *writing) if writes else reading
