"""Are models read from safetensors as the library reads them, and written as loaders expect them?

The judges are the safetensors library with numpy and torch, and files that torch's own checkpoint
consolidation wrote.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors import deserialize, safe_open
from safetensors.numpy import load_file as load_numpy
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import load_file as load_torch
from safetensors.torch import load_model
from safetensors.torch import save_file as save_torch
from test_safetensors_header import in_order, tensors

from reshard.builder import Builder, Placed
from reshard.digest import CRC64NVME
from reshard.dtypes import BY_SAFETENSORS, dtype, from_numpy
from reshard.errors import (
    CorruptError,
    IncompleteError,
    RequestError,
    UnsupportedError,
)
from reshard.execute import Options, execute
from reshard.format import Casts, Draft, Format, Loss, Request
from reshard.formats import _safetensors_header as headers
from reshard.formats import _safetensors_index as indexes
from reshard.formats import _safetensors_write as writing
from reshard.formats import named
from reshard.formats._safetensors_choose import natural_order
from reshard.formats.safetensors import FORMAT
from reshard.layout import BUFFER, CLIENT, MASTER, PARAM, Entry, TensorKey
from reshard.manifest import Manifest, Note, ParamGroup
from reshard.plan import Plan

INDEX = "model.safetensors.index.json"
Arrays = Mapping[TensorKey, NDArray[Any]]


# -- helpers --------------------------------------------------------------------------------------


def a_source(folder: Path, arrays: Arrays, **more: Any) -> Manifest:
    """A manifest of some tensors, as another format's reader would give it."""
    folder.mkdir(parents=True, exist_ok=True)
    builder = Builder("raw", folder)
    payload = b""
    path = folder / "all.bin"
    placed: dict[str, list[Placed]] = {}
    path.write_bytes(b"".join(a.tobytes() for a in arrays.values()) + b"\0")
    for (name, state), array in arrays.items():
        entry = Entry(name, array.shape)
        kind = from_numpy(array.dtype)
        placed.setdefault(state, []).append(Placed(entry, kind, builder.file(path), len(payload)))
        payload += array.tobytes()
    for state, some in placed.items():
        builder.add_placed(state, state, some)
    return replace(builder.build({"shard": 1}, None), **more)


def write(source: Manifest, target: Path, request: Request | None = None) -> Draft:
    """Draft, plan, execute, finish: what a conversion does."""
    return write_as(FORMAT, source, target, request or Request())


def write_as(wanted: Format, source: Manifest, target: Path, request: Request) -> Draft:
    draft = wanted.draft(source, request, target)
    plan = Plan(source, draft.manifest, origin=draft.origin, casts=draft.casts)
    if not draft.single_file:
        target.mkdir(parents=True)
    result = execute(plan, target, Options(workers=2, sync=False))
    draft.finish(target, result)
    return draft


def whole(manifest: Manifest) -> dict[TensorKey, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of a safetensors manifest, read where it says that they lie."""
    found: dict[TensorKey, tuple[str, tuple[int, ...], bytes]] = {}
    for key, tensor in manifest.tensors.items():
        ((space_index, entry),) = tensor.places
        store: Any = manifest.stores[manifest.space(space_index).name, key[1]]
        raw = manifest.path(int(store.files[entry])).read_bytes()
        at = int(store.offsets[entry])
        assert tensor.dtype.safetensors is not None
        found[key] = (tensor.dtype.safetensors, tensor.shape, raw[at : at + tensor.nbytes])
    return found


def texts(notes: tuple[Note, ...]) -> str:
    return "\n".join(f"{n.kind} {n.where}: {n.text}" for n in notes)


def some_arrays(seed: int = 0, layers: int = 12) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(seed)
    arrays: dict[str, NDArray[Any]] = {}
    for i in range(layers):
        arrays[f"layers.{i}.weight"] = rng.standard_normal((5, 7), np.float32)
        arrays[f"layers.{i}.bias"] = rng.standard_normal(5, np.float32).astype(np.float16)
    arrays["scalar"] = np.array(3, np.int64)
    arrays["none"] = np.zeros((0, 4), np.float64)
    return arrays


def put(folder: Path, file: str, arrays: Mapping[str, NDArray[Any]], **metadata: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_numpy(dict(arrays), folder / file, metadata=metadata or None)
    return folder / file


# -- reading and writing, against the library -----------------------------------------------------


@settings(max_examples=30)
@given(made=tensors(tuple(BY_SAFETENSORS)), limit=st.integers(1, 200), data=st.data())
def test_any_tensors_go_through_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory,
    made: dict[str, tuple[str, list[int], bytes]],
    limit: int,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("x")
    slots, payload = in_order(made)
    (folder / "a.safetensors").write_bytes(headers.encode(slots, {}) + payload)
    source = FORMAT.open(folder / "a.safetensors")
    expected = {(n, PARAM): (c, tuple(s), d) for n, (c, s, d) in made.items()}
    assert whole(source) == expected
    if not made:
        with pytest.raises(RequestError, match="no weights"):
            write(source, folder / "b.safetensors")
        return

    write(source, folder / "shards", Request(max_shard_bytes=limit))
    shards = FORMAT.open(folder / "shards")
    assert whole(shards) == expected
    found = [t for f in (folder / "shards").glob("*.safetensors") for t in _library(f)]
    assert sorted(found) == sorted((n, *v) for (n, _), v in expected.items())

    write(shards, folder / "b.safetensors")
    write(source, folder / "c.safetensors")
    assert (folder / "b.safetensors").read_bytes() == (folder / "c.safetensors").read_bytes()
    assert sorted(_library(folder / "b.safetensors")) == sorted(found)


def _library(path: Path) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    return [
        (name, info["dtype"], tuple(info["shape"]), bytes(info["data"]))
        for name, info in deserialize(path.read_bytes())
    ]


def test_every_dtype_of_torch(tmp_path: Path) -> None:
    kinds = [d for d in BY_SAFETENSORS.values() if d.torch is not None]
    raw = torch.arange(64, dtype=torch.uint8) % 2
    made = {d.name: raw.clone().view(getattr(torch, d.torch or "")) for d in kinds}
    save_torch(made, tmp_path / "a.safetensors")
    write(FORMAT.open(tmp_path / "a.safetensors"), tmp_path / "b.safetensors")
    found = load_torch(tmp_path / "b.safetensors")
    assert set(found) == set(made)
    for name, tensor in made.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))


def test_a_file_gets_its_digests_and_loads(tmp_path: Path) -> None:
    arrays = some_arrays()
    source = FORMAT.open(put(tmp_path, "a.safetensors", arrays, format="pt", author="me"))
    assert source.digests == {}
    target = tmp_path / "out" / "b.safetensors"
    draft = write(source, target)
    assert draft.single_file
    assert [f.path for f in draft.manifest.files] == [""]
    assert draft.manifest.files[0].nbytes == target.stat().st_size
    found = load_numpy(target)
    assert set(found) == set(arrays)
    assert all(np.array_equal(found[n], arrays[n]) for n in arrays)
    with safe_open(target, "np") as file:
        metadata = file.metadata()
    assert {**metadata, "zreshard.digests": ""} == {
        "format": "pt", "author": "me", "zreshard.digests": "",
    }  # fmt: skip
    again = FORMAT.open(target)
    assert again.digests == {(n, PARAM): CRC64NVME.of(a.tobytes()) for n, a in arrays.items()}
    assert again.objects == {
        "safetensors": {"metadata": {"author": "me"}},
        "safetensors.as_written": {"metadata": {"format": "pt"}},
    }


def test_a_flipped_bit_is_noticed_by_the_digest(tmp_path: Path) -> None:
    write(FORMAT.open(put(tmp_path, "a.safetensors", some_arrays())), tmp_path / "b.safetensors")
    raw = bytearray((tmp_path / "b.safetensors").read_bytes())
    raw[-40] ^= 4
    (tmp_path / "b.safetensors").write_bytes(raw)
    with pytest.raises(CorruptError, match=r"param:layers\.\d+\.bias.*digest"):
        write(FORMAT.open(tmp_path / "b.safetensors"), tmp_path / "c.safetensors")


def test_the_payload_is_aligned(tmp_path: Path) -> None:
    arrays = {
        "a": np.ones(3, np.int8), "b": np.ones(3, np.float64), "c": np.ones(3, np.float16)
    }  # fmt: skip
    draft = write(
        a_source(tmp_path / "s", {(n, PARAM): a for n, a in arrays.items()}), tmp_path / "out"
    )
    for tensor in draft.manifest.tensors.values():
        ((space, _),) = tensor.places
        store: Any = draft.manifest.stores[draft.manifest.space(space).name, PARAM]
        assert int(store.offsets[0]) % tensor.dtype.itemsize == 0


# -- shards ---------------------------------------------------------------------------------------


def test_shards_are_cut_as_transformers_cuts_them(tmp_path: Path) -> None:
    sizes = {"a": 6, "b": 5, "big": 30, "c": 4, "d": 1, "e": 10, "f": 1}
    arrays = {(n, PARAM): np.full(s, i, np.uint8) for i, (n, s) in enumerate(sizes.items())}
    draft = write(a_source(tmp_path / "s", arrays), tmp_path / "out", Request(max_shard_bytes=10))
    # greedy in order; what is too large stands alone, before the shard that was being filled
    expected = [["a"], ["big"], ["b", "c", "d"], ["e"], ["f"]]
    where = {
        name: f"model-{number:05d}-of-00005.safetensors"
        for number, names in enumerate(expected, start=1)
        for name in names
    }
    assert not draft.single_file
    raw = (tmp_path / "out" / INDEX).read_text()
    content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
    assert raw == json.dumps(content, indent=2, sort_keys=True) + "\n"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted({*where.values(), INDEX})
    for name, file in where.items():
        assert name in load_numpy(tmp_path / "out" / file)
    manifest = FORMAT.open(tmp_path / "out")
    assert manifest.notes == ()
    assert set(manifest.tensors) == set(arrays)


def test_one_shard_has_no_index(tmp_path: Path) -> None:
    source = FORMAT.open(put(tmp_path, "a.safetensors", some_arrays()))
    write(source, tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert whole(FORMAT.open(tmp_path / "out")) == whole(source)


def test_names_are_ordered_by_their_numbers() -> None:
    names = ["a.10.x", "a.2.x", "a", "", "a.02.x", "b", "10", "9", "a.2", "é1", "a.2.x1"]
    ordered = sorted(names, key=natural_order)
    assert ordered == ["", "9", "10", "a", "a.2", "a.02.x", "a.2.x", "a.2.x1", "a.10.x", "b", "é1"]


def test_one_file_can_not_break_the_limit(tmp_path: Path) -> None:
    source = FORMAT.open(put(tmp_path, "a.safetensors", some_arrays()))
    total = sum(a.nbytes for a in some_arrays().values())
    with pytest.raises(RequestError, match=r"name a folder"):
        FORMAT.draft(source, Request(max_shard_bytes=total - 1), tmp_path / "b.safetensors")
    FORMAT.draft(source, Request(max_shard_bytes=total), tmp_path / "b.safetensors")
    with pytest.raises(RequestError, match="at most 0 bytes"):
        FORMAT.draft(source, Request(max_shard_bytes=0), tmp_path / "b")


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    """Through the native format at other world sizes and stages, and from another order."""
    arrays: dict[TensorKey, NDArray[Any]] = {
        (n, PARAM): a for n, a in some_arrays().items() if a.size
    }
    source = a_source(tmp_path / "s", arrays)
    write(source, tmp_path / "first", Request(max_shard_bytes=400))
    backwards = a_source(tmp_path / "r", dict(reversed(arrays.items())))
    write(backwards, tmp_path / "second", Request(max_shard_bytes=400))
    for world, stage in ((3, 1), (4, 3)):
        native = tmp_path / f"native{stage}"
        write_as(named("native"), source, native, Request(world=world, stage=stage))
        again = named("native").open(native)
        write(again, tmp_path / f"third{stage}", Request(max_shard_bytes=400))
    trees = [_hashes(tmp_path / n) for n in ("first", "second", "third1", "third3")]
    assert len(trees[0]) > 3
    assert all(t == trees[0] for t in trees)


def _hashes(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_the_index_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FORMAT.open(put(tmp_path, "a.safetensors", some_arrays()))

    def full(path: Path, data: bytes) -> None:
        raise OSError("no space")

    monkeypatch.setattr(writing, "_write_at_start", full)
    with pytest.raises(OSError, match="no space"):
        write(source, tmp_path / "out", Request(max_shard_bytes=400))
    assert not (tmp_path / "out" / INDEX).exists()


# -- tied weights ---------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(3))


def test_tied_weights_are_noted_as_the_library_does(tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = Tied()
    weight = model.embed.weight.detach().numpy()
    arrays: Arrays = {("embed.weight", PARAM): weight, ("steps", BUFFER): np.arange(3)}
    aliases = {"head.weight": "embed.weight"}
    source = a_source(tmp_path / "s", arrays, aliases=aliases)
    draft = write(source, tmp_path / "tied.safetensors")
    assert draft.manifest.aliases == aliases
    with safe_open(tmp_path / "tied.safetensors", "np") as file:
        assert file.metadata()["head.weight"] == "embed.weight"
        assert file.metadata()["format"] == "pt"
        assert sorted(file.keys()) == ["embed.weight", "steps"]
    torch.manual_seed(6)
    other = Tied()
    assert load_model(other, tmp_path / "tied.safetensors") == (set(), [])
    assert torch.equal(other.head.weight, model.head.weight)
    assert torch.equal(other.embed.weight, model.embed.weight)

    again = FORMAT.open(tmp_path / "tied.safetensors")
    assert again.aliases == aliases
    assert again.objects == {"safetensors.as_written": {"metadata": {"format": "pt"}}}
    assert set(again.tensors) == set(arrays)
    write(again, tmp_path / "shards", Request(max_shard_bytes=30))
    assert FORMAT.open(tmp_path / "shards").aliases == aliases


def test_an_alias_never_takes_the_place_of_other_text(tmp_path: Path) -> None:
    arrays: Arrays = {("w", PARAM): np.ones(2)}
    aliases = dict.fromkeys(("format", "zreshard", "zreshard.digests", "v"), "w")
    write(a_source(tmp_path / "s", arrays, aliases=aliases), tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", "np") as file:
        assert file.metadata()["format"] == "pt"
        assert file.metadata()["v"] == "w"
    again = FORMAT.open(tmp_path / "a.safetensors")
    assert again.aliases == aliases
    assert again.digests == {("w", PARAM): CRC64NVME.of(np.ones(2).tobytes())}


def test_what_the_library_says_of_dropped_names_is_carried_as_text(tmp_path: Path) -> None:
    # its note doesn't say whether the dropped tensor was the whole of the kept one
    path = put(tmp_path, "a.safetensors", {"embed.weight": np.ones(3)}, head="embed.weight")
    source = FORMAT.open(path)
    assert source.aliases == {}
    write(source, tmp_path / "b.safetensors")
    with safe_open(tmp_path / "b.safetensors", "np") as file:
        assert file.metadata()["head"] == "embed.weight"


# -- which tensors are written --------------------------------------------------------------------


def training(folder: Path, **more: Any) -> tuple[Manifest, dict[TensorKey, NDArray[Any]]]:
    """16-bit weights with masters and moments, a frozen weight, a buffer and client state."""
    rng = np.random.default_rng(3)
    arrays: dict[TensorKey, NDArray[Any]] = {}
    for name in ("w1", "w2"):
        master = rng.standard_normal((4, 3), np.float32)
        arrays[name, MASTER] = master
        arrays[name, PARAM] = master.astype(np.float16)
        arrays[name, "exp_avg"] = rng.standard_normal((4, 3), np.float32)
    arrays["frozen", PARAM] = rng.standard_normal(5, np.float32).astype(np.float16)
    arrays["running", BUFFER] = rng.standard_normal(2)
    arrays["seen", CLIENT] = np.arange(4)
    groups = (ParamGroup({"lr": 0.1}),)
    objects = {"scheduler": {"step": 3}, "safetensors": {"metadata": {"author": "me"}}}
    source = a_source(folder, arrays, groups=groups, objects=objects, **more)
    return source, arrays


def read(path: Path) -> dict[str, NDArray[Any]]:
    return dict(load_numpy(path))


def test_masters_are_written_as_the_weights(tmp_path: Path) -> None:
    source, arrays = training(tmp_path / "s")
    draft = write(source, tmp_path / "a.safetensors")
    found = read(tmp_path / "a.safetensors")
    expected = {
        "w1": arrays["w1", MASTER],
        "w2": arrays["w2", MASTER],
        "frozen": arrays["frozen", PARAM],
        "running": arrays["running", BUFFER],
    }
    _same(found, expected)
    assert draft.origin == {("w1", PARAM): ("w1", MASTER), ("w2", PARAM): ("w2", MASTER)}
    assert draft.casts == frozenset()
    lost = {loss.what: loss.harmless for loss in draft.losses}
    assert lost == dict.fromkeys(
        ["param:w1", "param:w2", "exp_avg:w1", "exp_avg:w2", "client:seen", "groups", "scheduler"],
        True,
    )
    again = FORMAT.open(tmp_path / "a.safetensors")
    assert set(again.tensors) == {
        ("w1", PARAM), ("w2", PARAM), ("frozen", PARAM), ("running", BUFFER)
    }  # fmt: skip
    assert again.objects["safetensors"]["metadata"] == {"author": "me"}
    assert again.objects["safetensors.as_written"]["metadata"] == {"format": "pt"}


def _same(found: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]]) -> None:
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].tobytes() == array.tobytes(), name


def test_the_state_of_the_weights_can_be_chosen(tmp_path: Path) -> None:
    source, arrays = training(tmp_path / "s")
    write(source, tmp_path / "a.safetensors", Request(state=PARAM))
    found = read(tmp_path / "a.safetensors")
    _same(
        {n: a for n, a in found.items() if n != "running"},
        {n: a for (n, s), a in arrays.items() if s == PARAM},
    )
    write(source, tmp_path / "b.safetensors", Request(state="exp_avg"))
    assert np.array_equal(read(tmp_path / "b.safetensors")["w1"], arrays["w1", "exp_avg"])


def test_weights_that_lack_the_state_are_named(tmp_path: Path) -> None:
    source, arrays = training(tmp_path / "s")
    target = tmp_path / "a.safetensors"
    with pytest.raises(RequestError, match=r"no state 'ema'.*\n.*states: master, param, exp_avg"):
        FORMAT.draft(source, Request(state="ema"), target)
    del arrays["w2", MASTER]
    some = a_source(tmp_path / "t", arrays)
    with pytest.raises(RequestError, match=r"1 trained parameters have no state 'master'.*'w2'"):
        FORMAT.draft(some, Request(state=MASTER), target)
    # without a wish, what has no master is trained in the precision that it has
    write(some, target)
    assert np.array_equal(read(target)["w2"], arrays["w2", PARAM])
    del arrays["w2", PARAM]
    with pytest.raises(RequestError, match=r"'w2'.*\n.*stored elsewhere"):
        FORMAT.draft(a_source(tmp_path / "u", arrays), Request(), target)
    for state in (BUFFER, CLIENT):
        with pytest.raises(RequestError, match="can't be written as the weights"):
            FORMAT.draft(source, Request(state=state), target)


def test_optimizer_state_comes_back_as_what_it_was(tmp_path: Path) -> None:
    source, arrays = training(tmp_path / "s")
    draft = write(source, tmp_path / "out", Request(optimizer=True, max_shard_bytes=60))
    assert Loss("groups", draft.losses[-2].why, harmless=False) in draft.losses
    again = FORMAT.open(tmp_path / "out")
    expected = {
        (n, PARAM if s == MASTER else s): a.tobytes()
        for (n, s), a in arrays.items()
        if s in (MASTER, "exp_avg", BUFFER) or n == "frozen"
    }
    assert {k: v[2] for k, v in whole(again).items()} == expected
    labels = {n for f in (tmp_path / "out").glob("*.safetensors") for n in load_numpy(f)}
    assert {"optimizer.exp_avg.w1", "w1", "running"} < labels


@pytest.mark.parametrize(
    "request_",
    [
        Request(optimizer=True, state=PARAM),
        Request(optimizer=True, casts=Casts(dtype("bf16"))),
    ],
    ids=["params", "cast"],
)
def test_masters_that_are_not_the_weights_are_optimizer_state(
    tmp_path: Path, request_: Request
) -> None:
    source, arrays = training(tmp_path / "s")
    write(source, tmp_path / "a.safetensors", request_)
    found = whole(FORMAT.open(tmp_path / "a.safetensors"))
    for name in ("w1", "w2"):
        assert found[name, MASTER][2] == arrays[name, MASTER].tobytes()


def test_states_with_dots_and_names_like_states(tmp_path: Path) -> None:
    arrays = {
        ("w", PARAM): np.ones(1),
        ("w", "a.b"): np.ones(2),
        ("optimizer.zzz.w", PARAM): np.ones(3),
        ("optimizer.a.b.buffer", BUFFER): np.ones(4),
    }
    write(a_source(tmp_path / "s", arrays), tmp_path / "x.safetensors", Request(optimizer=True))
    again = FORMAT.open(tmp_path / "x.safetensors")
    assert {k: t.shape for k, t in again.tensors.items()} == {k: a.shape for k, a in arrays.items()}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {("w", PARAM): 1, ("w", "m"): 1, ("optimizer.m.w", PARAM): 1},
            r"param:optimizer\.m\.w.*would both be called|m:w and param:optimizer",
        ),
        ({("w", PARAM): 1, ("w", "m"): 1, ("optimizer.m.v", PARAM): 1}, "would be read as m:v"),
        (
            {("w", PARAM): 1, ("w", "a"): 1, ("b.w", PARAM): 1, ("w", "a.b"): 1},
            r"name 'optimizer\.a\.b\.w' of a\.b:w would be read as a:b\.w",
        ),
        ({("w", PARAM): 1, ("w", BUFFER): 1}, "param:w and buffer:w would both be called 'w'"),
        ({("__metadata__", PARAM): 1}, "can't hold a tensor named '__metadata__'"),
        ({("\ud800", PARAM): 1}, "can't hold a tensor named"),
    ],
    ids=["same label", "read as state", "two states", "buffer", "reserved", "no text"],
)
def test_names_that_clash(tmp_path: Path, arrays: dict[TensorKey, int], message: str) -> None:
    source = a_source(tmp_path / "s", {k: np.ones(n) for k, n in arrays.items()})
    with pytest.raises(RequestError, match=message):
        FORMAT.draft(source, Request(optimizer=True), tmp_path / "x.safetensors")


def test_odd_names_never_become_paths(tmp_path: Path) -> None:
    names = ["", "../../x", "/tmp/x", "a\0b", "C:\\x", "é\u2028😀", "model.safetensors"]
    arrays = {(n, PARAM): np.full(3, i, np.int16) for i, n in enumerate(names)}
    write(a_source(tmp_path / "s", arrays), tmp_path / "out", Request(max_shard_bytes=6))
    assert len(list((tmp_path / "out").iterdir())) == len(names) + 1
    found = FORMAT.open(tmp_path / "out")
    assert {k: v[2] for k, v in whole(found).items()} == {k: a.tobytes() for k, a in arrays.items()}
    assert {p.name for p in tmp_path.iterdir()} == {"s", "out"}


# -- element types --------------------------------------------------------------------------------


def test_casts_round_as_torch_does(tmp_path: Path) -> None:
    source, arrays = training(tmp_path / "s")
    request = Request(casts=Casts(dtype("bf16"), keep=("w2",)))
    draft = write(source, tmp_path / "a.safetensors", request)
    assert draft.casts == {("w1", PARAM), ("frozen", PARAM)}
    found = load_torch(tmp_path / "a.safetensors")
    for name, state in (("w1", MASTER), ("frozen", PARAM)):
        expected = torch.from_numpy(arrays[name, state]).to(torch.bfloat16)
        assert torch.equal(found[name].view(torch.int16), expected.view(torch.int16))
    assert found["w2"].numpy().tobytes() == arrays["w2", MASTER].tobytes()
    assert found["running"].dtype == torch.float64
    # the digest is that of what was written
    again = FORMAT.open(tmp_path / "a.safetensors")
    raw = found["w1"].view(torch.uint8).numpy()
    assert again.digests["w1", PARAM] == CRC64NVME.of(raw.tobytes())


def test_a_cast_from_a_payload_that_is_not_aligned(tmp_path: Path) -> None:
    values = np.linspace(-3, 3, 11, dtype=np.float32)
    info = {"dtype": "F32", "shape": [11], "data_offsets": [0, 44]}
    raw = json.dumps({"x": info}).encode()
    raw += b" " * ((3 - len(raw)) % 8)
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + values.tobytes())
    request = Request(casts=Casts(dtype("fp16")))
    write(FORMAT.open(path), tmp_path / "b.safetensors", request)
    assert np.array_equal(read(tmp_path / "b.safetensors")["x"], values.astype(np.float16))


def test_types_that_can_not_be_written(tmp_path: Path) -> None:
    target = tmp_path / "b.safetensors"
    wide = a_source(tmp_path / "s", {("w", PARAM): np.ones(2, np.complex128)})
    with pytest.raises(UnsupportedError, match="param:w is complex128"):
        FORMAT.draft(wide, Request(), target)
    info = {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}
    raw = json.dumps({"q": info}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + b"\x12\x34")
    narrow = FORMAT.open(tmp_path / "a.safetensors")
    with pytest.raises(RequestError, match="only copied"):
        FORMAT.draft(narrow, Request(casts=Casts(dtype("bf16"))), target)
    write(narrow, target, Request(casts=Casts(dtype("bf16"), keep=("q*",))))
    assert whole(FORMAT.open(target))["q", PARAM] == ("F4", (4,), b"\x12\x34")
    floats = a_source(tmp_path / "f", {("w", PARAM): np.ones(2)})
    with pytest.raises(RequestError, match="can't be cast to int8"):
        FORMAT.draft(floats, Request(casts=Casts(dtype("int8"))), target)


# -- limits ---------------------------------------------------------------------------------------


def test_limits_of_headers_and_indexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FORMAT.open(put(tmp_path, "a.safetensors", some_arrays()))
    target = tmp_path / "b.safetensors"
    assert FORMAT.draft(source, Request(), target).manifest.notes == ()
    monkeypatch.setattr(headers, "HUB_LIMIT", 1000)
    assert "more than the hub reads" in texts(
        FORMAT.draft(source, Request(), target).manifest.notes
    )
    monkeypatch.setattr(headers, "HEADER_LIMIT", 1000)
    with pytest.raises(RequestError, match="1000 is the most that can be read"):
        FORMAT.draft(source, Request(), target)
    monkeypatch.setattr(indexes, "INDEX_LIMIT", 1000)
    with pytest.raises(RequestError, match="loaders refuse more than 1000"):
        FORMAT.draft(source, Request(max_shard_bytes=200), tmp_path / "b")


# -- the notes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "x", "[]", "{}", '{"version":true}', '{"version":0}', '{"version":"1"}',
        '{"version":1,"states":"x"}', '{"version":1,"states":[1]}', '{"version":1,"states":[{}]}',
        '{"version":1,"states":["param"]}', '{"version":1,"buffers":[null]}',
        '{"version":1,"aliases":[]}', '{"version":1,"aliases":{"a":1}}',
        '{"version":1,"aliases":{"a":"w","a":"w"}}', '{"version":1,"version":1}',
        '{"version":1,"buffers":["\\ud800"]}',
    ],
)  # fmt: skip
def test_broken_notes_are_refused(tmp_path: Path, text: str) -> None:
    path = put(tmp_path, "a.safetensors", {"w": np.ones(2)}, zreshard=text)
    with pytest.raises(CorruptError, match="metadata 'zreshard'"):
        FORMAT.open(path)


def test_notes_of_a_newer_release_are_refused(tmp_path: Path) -> None:
    path = put(tmp_path, "a.safetensors", {"w": np.ones(2)}, zreshard='{"version":2,"x":1}')
    with pytest.raises(UnsupportedError, match="newer"):
        FORMAT.open(path)


@pytest.mark.parametrize(
    "text", ["x", "{}", '{"crc64nvme":[]}', '{"crc64nvme":{"w":"12"}}', '{"crc64nvme":{"w":5}}',
             '{"crc64nvme":{"w":"0123456789ABCDEF"}}']
)  # fmt: skip
def test_broken_digests_are_refused(tmp_path: Path, text: str) -> None:
    path = put(tmp_path, "a.safetensors", {"w": np.ones(2)}, **{"zreshard.digests": text})
    with pytest.raises(CorruptError, match=r"metadata 'zreshard\.digests'"):
        FORMAT.open(path)


def test_notes_on_tensors_that_are_gone_mean_nothing(tmp_path: Path) -> None:
    notes = {"version": 1, "buffers": ["gone"], "aliases": {"a": "gone", "w": "v", "b": "v"}}
    digests = json.dumps({"crc64nvme": {"gone": "0" * 16}})
    arrays = {"w": np.ones(2), "v": np.ones(2)}
    metadata = {"zreshard": json.dumps(notes), "zreshard.digests": digests}
    manifest = FORMAT.open(put(tmp_path, "a.safetensors", arrays, **metadata))
    assert manifest.aliases == {"b": "v"}
    assert manifest.digests == {}


def test_empty_tensors_among_the_weights_are_pointed_out(tmp_path: Path) -> None:
    arrays = {"w": np.ones(2), "zero3": np.ones(0, np.float32), "fine": np.ones((0, 3))}
    notes = FORMAT.open(put(tmp_path, "a.safetensors", arrays)).notes
    assert "shape [0]" in texts(notes)
    assert "'zero3'" in texts(notes)
    assert "fine" not in texts(notes)


@pytest.mark.parametrize(
    ("name", "config"), [("adapter_model.safetensors", False), ("model.safetensors", True)]
)
@pytest.mark.parametrize("folder", [True, False])
def test_an_adapter_without_its_weights_is_refused(
    tmp_path: Path, name: str, config: bool, folder: bool
) -> None:
    arrays = {"q.lora_A.weight": np.ones(0, np.float32), "q.lora_B.weight": np.ones((4, 2))}
    path = put(tmp_path, name, arrays)
    if config:
        (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(IncompleteError, match=r"adapter whose weights weren't saved.*lora_A"):
        FORMAT.open(tmp_path if folder else path)


def test_text_of_another_source_must_be_text(tmp_path: Path) -> None:
    objects = {"safetensors": {"metadata": {"a": 1}}}
    source = a_source(tmp_path / "s", {("w", PARAM): np.ones(1)}, objects=objects)
    draft = FORMAT.draft(source, Request(), tmp_path / "x.safetensors")
    assert [(loss.what, loss.harmless) for loss in draft.losses] == [("safetensors", False)]


# -- what torch wrote -----------------------------------------------------------------------------


def test_a_model_that_torch_consolidated(fixtures_dir: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "copied"  # without the pieces, beside which its lost scalar is seen
    whole = fixtures_dir / "dcp" / "hf_p4_consol_float" / "ckpt"
    shutil.copytree(whole, checkpoint / "ckpt", ignore=shutil.ignore_patterns("sharded"))
    source = FORMAT.open(checkpoint / "ckpt")
    write(source, tmp_path / "all.safetensors")
    found = load_torch(tmp_path / "all.safetensors")
    expected = {
        n: t for f in (checkpoint / "ckpt").glob("*.safetensors") for n, t in load_torch(f).items()
    }
    assert set(found) == set(expected)
    assert len(found) == len(source.tensors) > 40
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert sum(math.prod(t.shape) for t in source.tensors.values()) == sum(
        t.numel() for t in expected.values()
    )
