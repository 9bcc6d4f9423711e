"""Are copies of a tensor that differ found, in moments where they are small, and well named?"""

from __future__ import annotations

import shutil
import zlib
from pathlib import Path

import pytest

import reshard
from reshard import Options, Wanted, replicas
from reshard.commit import Staging
from reshard.errors import CorruptError, InconsistentError
from reshard.layout import BUFFER, TensorKey
from reshard.manifest import Manifest
from reshard.store import EntryStore

WANTED = Wanted(world=3, format="native")
RANK_1 = "zero_pp_rank_1_mp_rank_00_model_states.pt"


@pytest.fixture
def source(golden_dir: Path, tmp_path: Path) -> Path:
    """Two ranks, each of which saved the buffers."""
    return Path(shutil.copytree(golden_dir / "z3_p2_bf16_frozen_tied" / "ckpt", tmp_path / "ckpt"))


def place(manifest: Manifest, key: TensorKey, copy: int) -> tuple[Path, int]:
    """File and first byte of a copy."""
    space, entry = manifest.tensors[key].places[copy]
    store = manifest.stores[manifest.space(space).name, key[1]]
    assert isinstance(store, EntryStore)
    return manifest.path(int(store.files[entry])), int(store.offsets[entry])


def buffers(manifest: Manifest) -> list[TensorKey]:
    return [k for k, t in manifest.tensors.items() if k[1] == BUFFER and len(t.places) == 2]


def change(source: Path, count: int) -> list[TensorKey]:
    """Change a bit of rank 1's copy of some buffers, and the checksums in its file."""
    manifest = reshard.open_manifest(source)
    changed = buffers(manifest)[:count]
    for key in changed:
        path, offset = place(manifest, key, 1)
        assert path.name == RANK_1
        data, nbytes = bytearray(path.read_bytes()), manifest.tensors[key].nbytes
        before = zlib.crc32(data[offset : offset + nbytes]).to_bytes(4, "little")
        data[offset] ^= 1
        after = zlib.crc32(data[offset : offset + nbytes]).to_bytes(4, "little")
        assert before in data
        path.write_bytes(data.replace(before, after))
    return changed


def test_small_copies_are_compared_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((name, _),) = change(source, 1)
    monkeypatch.delattr(Staging, "begin")
    for run in (reshard.prepare, reshard.convert):
        with pytest.raises(InconsistentError) as error:
            run(source, tmp_path / "out", WANTED)
        assert error.value.what == (
            f"buffer:{name} is stored several times, and its copies differ: in "
            f"zero_pp_rank_0_mp_rank_00_model_states.pt it isn't what it is in {RANK_1}"
        )
        assert "--replicas first" in str(error.value)


def test_damage_is_called_damage(source: Path, tmp_path: Path) -> None:
    manifest = reshard.open_manifest(source)
    path, offset = place(manifest, buffers(manifest)[0], 1)
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="was stored with it"):
        reshard.prepare(source, tmp_path / "out", WANTED)


def test_all_that_differ_are_named(source: Path, tmp_path: Path) -> None:
    (first, _), (second, _) = change(source, 2)
    with pytest.raises(InconsistentError) as error:
        reshard.prepare(source, tmp_path / "out", WANTED)
    assert f"buffer:{first} is stored several times" in error.value.what
    assert error.value.what.endswith(f"; so do those of buffer:{second}")


def test_the_first_copies_can_be_taken(source: Path, tmp_path: Path) -> None:
    keys = change(source, 2)
    wanted = Wanted(world=3, format="native", replicas="first")
    reshard.convert(source, tmp_path / "out", wanted, Options(sync=False))
    manifest = reshard.open_manifest(source)
    for name, state in keys:
        path, offset = place(manifest, (name, state), 0)
        array = reshard.open(tmp_path / "out").state(state)[name].numpy()
        assert array.tobytes() == path.read_bytes()[offset : offset + array.nbytes]


def test_large_copies_are_compared_on_the_way(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(source, 1)
    monkeypatch.setattr(replicas, "SMALL", 0)
    job = reshard.prepare(source, tmp_path / "out", WANTED)
    with pytest.raises(InconsistentError, match=f"its copies differ: .* in {RANK_1}"):
        job.run()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt"]


@pytest.mark.parametrize(("limit", "value"), [("BUDGET", 0), ("COPIES", 1)])
def test_little_is_read_first(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    job = reshard.prepare(source, tmp_path / "out", WANTED)
    assert set(replicas._small(job.plan)) == set(buffers(job.source))
    monkeypatch.setattr(replicas, limit, value)
    assert replicas._small(job.plan) == []
