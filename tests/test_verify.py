"""Does reading a checkpoint find all that is wrong with it, and prove two of them the same?"""

from __future__ import annotations

import random
import shutil
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import MEMORY, Side
from test_reshard_random import cramped, crc, make_case, prepare

from reshard.api import consolidate, convert, open_manifest
from reshard.conversion import Wanted
from reshard.digests import survey, survey_nbytes
from reshard.dtypes import dtype
from reshard.errors import CorruptError, InconsistentError
from reshard.execute import Options
from reshard.layout import Entry, FlatSpace, Layout
from reshard.manifest import Manifest
from reshard.pairs import pairs
from reshard.partition import Replicated
from reshard.store import EntryStore
from reshard.verification import verify, verify_against

FAST = Options(sync=False)
F32, BF16 = dtype("float32"), dtype("bfloat16")
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def deepspeed(golden_dir: Path) -> Path:
    return golden_dir / "z2_p4_bf16" / "ckpt"


@pytest.fixture(scope="module")
def native(deepspeed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verify") / "native"
    convert(deepspeed, path, Wanted(format="native", world=3, stage=3), FAST)
    return path


def copy_of(path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(path, tmp_path / "copy"))


def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


# -- all bytes, whatever the layout ---------------------------------------------------------------


@given(seeds, st.sampled_from([1, 4, 64]), st.booleans())
def test_a_survey_digests_every_replica(seed, most, small):
    rng = random.Random(seed)
    case = make_case(rng, most, casts=False)
    told: list[int] = []
    with tempfile.TemporaryDirectory(dir=MEMORY) as name, cramped(rng) if small else nullcontext():
        source, _ = prepare(rng, case, Path(name))
        ways: list[Literal["map", "read"] | None] = ["map", "read", None]
        options = Options(rng.randint(1, 3), read=rng.choice(ways), progress=told.append)
        found = survey(source, options)
    assert {k: set(v) for k, v in found.digests.items()} == {
        k: {crc(a)} for k, a in case.given.items()
    }
    assert not found.damaged
    assert found.nbytes == sum(told) == survey_nbytes(source)
    assert found.regions_checked == (0 if source.regions.values is None else len(source.regions))


@given(seeds)
def test_a_survey_names_the_damaged_regions_and_no_others(seed):
    """Also where no tensor lies: padding, and gaps between tensors."""
    rng = random.Random(seed)
    case = make_case(rng, 4, casts=False)
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        source, contents = prepare(rng, case, Path(name))
        regions = source.regions
        some = [r for r in range(len(regions)) if regions.sizes[r]]
        bad = sorted(rng.sample(some, min(2, len(some))))
        for region in bad:
            at = int(regions.offsets[region]) + rng.randrange(int(regions.sizes[region]))
            file = int(regions.files[region])
            contents[file][at] ^= 0x10
            source.path(file).write_bytes(contents[file])
        found = survey(source, Options(workers=2))
    labels = [str(e.what).partition(" has the checksum")[0] for e in found.damaged]
    assert labels == [regions.labels[r] for r in bad]


# -- one checkpoint -------------------------------------------------------------------------------


def test_a_whole_native_checkpoint(native: Path) -> None:
    manifest = open_manifest(native)
    found = verify(manifest, FAST)
    assert found.ok
    assert found.tensors == found.digests == len(manifest.tensors)
    assert found.checksums == len(manifest.files)
    assert found.roundings == sum(s == "master" for _, s in manifest.tensors)
    assert found.unproved == 0


def test_a_whole_deepspeed_checkpoint(deepspeed: Path) -> None:
    found = verify(open_manifest(deepspeed), FAST)
    assert found.ok
    assert (found.checksums, found.roundings, found.digests, found.unproved) == (28, 31, 0, 0)


def test_a_flipped_bit_is_named_with_its_chunk_and_tensor(native: Path, tmp_path: Path) -> None:
    path = copy_of(native, tmp_path)
    flip(path / "group0.master" / "c" / "1", 5)
    found = verify(open_manifest(path), FAST)
    assert not found.ok
    assert all(isinstance(p, CorruptError) for p in found.problems[:2])
    assert found.problems[0].where == str(path / "group0.master" / "c" / "1")
    assert "master:tok.weight has the digest" in found.problems[1].what


def test_a_flipped_bit_of_the_padding_is_found(native: Path, tmp_path: Path) -> None:
    path = copy_of(native, tmp_path)
    manifest = open_manifest(path)
    space = manifest.layout.space("group1")
    last = space.shards - 1
    kept, part = int(space.kept()[last]), space.ruler.part
    assert kept < part, "this shard has no padding"
    pieces = space.ruler.shard(last)
    held = {
        int(x) for a, n in zip(pieces.local, pieces.count, strict=True) for x in range(a, a + n)
    }
    free = next(x for x in range(part) if x not in held)
    chunk = path / "group1.exp_avg" / "c" / str(last)
    flip(chunk, 4 * free)
    (problem,) = verify(open_manifest(path), FAST).problems
    assert problem.where == str(chunk)


def test_a_flipped_bit_in_a_torch_file_is_found(deepspeed: Path, tmp_path: Path) -> None:
    path = copy_of(deepspeed, tmp_path)
    manifest = open_manifest(path)
    regions = manifest.regions
    region = int(regions.sizes.argmax())
    file = manifest.path(int(regions.files[region]))
    flip(file, int(regions.offsets[region]) + 17)
    found = verify(open_manifest(path), FAST)
    assert found.problems[0].where == str(file)
    assert isinstance(found.problems[0], CorruptError)


def test_a_file_of_another_rank_is_found_by_the_weights(deepspeed: Path, tmp_path: Path) -> None:
    path = copy_of(deepspeed, tmp_path)
    first, second = sorted(path.glob("*/*optim_states.pt"))[:2]
    shutil.copy(first, second)
    problems = verify(open_manifest(path), FAST).problems
    assert problems
    assert all(isinstance(p, InconsistentError) for p in problems)
    assert all("rounded to its type" in p.what for p in problems)


def test_copies_that_differ_are_found(tmp_path: Path) -> None:
    manifest = made(tmp_path, {"w": (3, 4)}, F32, copies=3)
    assert verify(manifest, FAST).replicas == 1
    flip(manifest.path(1), 3)
    (problem,) = verify(manifest, FAST).problems
    assert isinstance(problem, InconsistentError)
    assert "param:w is stored 3 times" in problem.what


def test_what_nothing_is_recorded_of_is_said(tmp_path: Path) -> None:
    found = verify(made(tmp_path, {"a": (2,), "b": (3,)}, F32), FAST)
    assert (found.ok, found.unproved, found.checksums, found.digests) == (True, 2, 0, 0)


def test_a_file_that_shrank_since_it_was_opened(tmp_path: Path) -> None:
    manifest = made(tmp_path, {"a": (20,)}, F32)
    manifest.path(0).write_bytes(b"short")
    with pytest.raises(CorruptError, match="has 5 bytes"):
        verify(manifest, FAST)


def made(
    root: Path, shapes: dict[str, tuple[int, ...]], kind, *, state: str = "param", copies: int = 1
) -> Manifest:
    """A small checkpoint with a file a copy, element i of each tensor being i."""
    entries = tuple(Entry(name, shape) for name, shape in shapes.items())
    spaces = tuple(
        FlatSpace(f"s{i}", entries, Replicated(1), {state: kind}, {"replicate": i})
        for i in range(copies)
    )
    side = Side(Layout(spaces, {"shard": 1})).lay_plainly()
    arrays = {
        (name, state): np.arange(np.prod(shape)).astype(kind.numpy).reshape(shape)
        for name, shape in shapes.items()
    }
    side.write(root, arrays, random.Random(0))
    return side.manifest(root)


# -- two checkpoints ------------------------------------------------------------------------------


def test_a_conversion_is_proved_against_its_source(native: Path, deepspeed: Path) -> None:
    here, there, proof = verify_against(open_manifest(native), open_manifest(deepspeed), FAST)
    assert here.ok
    assert there.ok
    assert proof.same
    assert proof.equal == 126


def test_recorded_digests_are_not_believed(native: Path, deepspeed: Path, tmp_path: Path) -> None:
    """A flipped bit shows as damage and as a difference, though the record is as it was."""
    path = copy_of(native, tmp_path)
    flip(path / "group0.master" / "c" / "1", 5)
    here, there, proof = verify_against(open_manifest(path), open_manifest(deepspeed), FAST)
    assert not here.ok
    assert there.ok
    assert [name for name, _ in proof.different] == ["master:tok.weight"]


def test_whole_weights_are_proved_against_masters(native: Path, tmp_path: Path) -> None:
    consolidate(native, tmp_path / "model.safetensors", Wanted(), FAST)
    weights, shards = open_manifest(tmp_path / "model.safetensors"), open_manifest(native)
    _, _, proof = verify_against(weights, shards, FAST, weights=True)
    assert proof.same
    assert proof.equal == 33
    _, _, proof = verify_against(weights, shards, FAST)
    assert len(proof.different) == 31  # param is float32 here and bfloat16 there
    assert not proof.only_here
    assert {key.partition(":")[0] for key in proof.only_there} == {
        "master",
        "exp_avg",
        "exp_avg_sq",
    }


def test_rounded_weights_are_proved_against_the_parameters(native: Path, tmp_path: Path) -> None:
    consolidate(native, tmp_path / "model", Wanted(state="param"), FAST)
    weights = open_manifest(tmp_path / "model")
    _, _, proof = verify_against(weights, open_manifest(native), FAST, weights=True)
    assert proof.same


def test_a_missing_tensor_is_a_difference(tmp_path: Path) -> None:
    both = made(tmp_path / "both", {"a": (2,), "b": (3,)}, F32)
    one = made(tmp_path / "one", {"a": (2,)}, F32)
    _, _, proof = verify_against(one, both, FAST)
    assert (proof.same, proof.only_here, proof.only_there) == (False, (), ("param:b",))
    _, _, proof = verify_against(both, one, FAST)
    assert (proof.same, proof.only_here, proof.only_there) == (False, ("param:b",), ())


# -- names ----------------------------------------------------------------------------------------


def keys_of(root: Path, *names: str, ties: dict[str, str] | None = None, state: str = "param"):
    manifest = made(root, dict.fromkeys(names, (2,)), F32, state=state)
    return replace(manifest, aliases=ties or {})


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(
    ("names_a", "ties_a", "names_b", "ties_b", "expected"),
    [
        (["e"], {"h": "e"}, ["e"], {"h": "e"}, [("e", "e")]),
        (["e"], {"h": "e"}, ["h"], {"e": "h"}, [("e", "h")]),
        (["e"], {"h": "e"}, ["h"], {}, [("e", "h")]),
        (["e"], {"h": "e"}, ["e", "h"], {}, [("e", "e"), ("e", "h")]),
        (["e", "x"], {}, ["e", "x"], {}, [("e", "e"), ("x", "x")]),
    ],
)
def test_a_tied_name_stands_for_the_stored_one(
    tmp_path: Path, weights, names_a, ties_a, names_b, ties_b, expected
) -> None:
    a = keys_of(tmp_path / "a", *names_a, ties=ties_a)
    b = keys_of(tmp_path / "b", *names_b, ties=ties_b)
    for first, second, turned in ((a, b, False), (b, a, True)):
        found = pairs(first, second, weights=weights)
        names = {(p.a.name, p.b.name) for p in found.both}
        assert names == {(y, x) if turned else (x, y) for x, y in expected}
        assert (found.only_a, found.only_b) == ((), ())


def test_weights_leave_optimizer_state_out(tmp_path: Path) -> None:
    a = keys_of(tmp_path / "a", "w", state="exp_avg")
    b = keys_of(tmp_path / "b", "w", state="master")
    found = pairs(a, b, weights=True)
    assert (found.both, found.only_a, found.only_b) == ((), (), (("w", "master"),))


def test_replicas_with_and_without_strides_are_both_read(tmp_path: Path) -> None:
    """A tensor that lies with strides in one space and without in another is read in both."""
    manifest = made(tmp_path, {"w": (4, 6)}, F32, copies=2)
    (store,) = [manifest.stores["s1", "param"]]
    turned = np.arange(24, dtype="<f4").reshape(4, 6).T.copy()
    manifest.path(1).write_bytes(turned.tobytes())
    strided = EntryStore(store.files[:1], store.offsets[:1], ((1, 4),))
    manifest = replace(manifest, stores={**manifest.stores, ("s1", "param"): strided})
    (values,) = survey(manifest, FAST).digests.values()
    assert len(values) == 2
    assert set(values) == {crc(np.arange(24, dtype="<f4"))}
