"""Experts are dealt out as DeepSpeed deals them out, at any degree of expert parallelism.

The files are looked at with torch alone (``deepspeed_files``). Besides the real checkpoint there
are made ones, with what a small run doesn't have: layers with different numbers of experts, groups
with and without weight decay, frozen experts, buffers in experts, rotated parameters.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reshard.api import open_manifest
from reshard.builder import Builder, Placed
from reshard.checkpoint import Checkpoint
from reshard.conversion import Wanted, planned
from reshard.dtypes import dtype
from reshard.errors import (
    CorruptError,
    IncompleteError,
    InconsistentError,
    RequestError,
    ReshardError,
    UnsupportedError,
)
from reshard.execute import Options
from reshard.format import Request
from reshard.formats import _deepspeed_write_experts as dealing
from reshard.formats import deepspeed, formats
from reshard.layout import Entry
from reshard.manifest import Manifest, ParamGroup
from reshard.store import File
from tests import deepspeed_truth as real
from tests.deepspeed_files import (
    blocks_of,
    experts_of,
    folder_of,
    models_of,
    optimizers_of,
    real_truth,
    same_bits,
    whole_of,
)
from tests.oracle import MEMORY

torch = pytest.importorskip("torch")

FAST = Options(sync=False, workers=2)
REAL = "moe_z2_p4_ep2_bf16"
STATES = ("master", "exp_avg", "exp_avg_sq")


def convert(source: Manifest | Path, target: Path, **wanted: Any) -> Manifest:
    manifest = open_manifest(source) if isinstance(source, Path) else source
    asked = Wanted(format=wanted.pop("format", "deepspeed"), **wanted)
    planned(manifest, target, asked, FAST, formats()).run()
    return open_manifest(target)


def files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


# -- the real checkpoint -------------------------------------------------------------------------


def check_truth(root: Path, case: Path) -> None:
    """Everything that the live ranks held is there, bit by bit."""
    found, equal = whole_of(folder_of(root)), 0
    for path in sorted(case.glob("truth_rank*.safetensors")):
        for key, expected in real_truth(path):
            name, state = real.key_of(path.stem, key, {})
            kind = {"param": "lp", "master": "fp32"}.get(state, state)
            assert same_bits(found[f"{kind}.{name}"], expected), key
            equal += 1
    assert equal == 4 * 4 * 13


@pytest.mark.parametrize(
    ("world", "stage", "degree"),
    [(2, 2, None), (4, 1, None), (6, 2, None), (12, 1, None), (1, 2, 1), (3, 1, 1), (8, 2, 4),
     (4, 2, 4), (4, 1, 1)],
)  # fmt: skip
def test_other_worlds_and_degrees(
    fixtures_dir: Path, tmp_path: Path, world: int, stage: int, degree: int | None
) -> None:
    case = fixtures_dir / "deepspeed" / REAL
    there = convert(case / "ckpt", tmp_path / "t", world=world, stage=stage, expert_parallel=degree)
    folder = folder_of(tmp_path / "t")
    check_truth(tmp_path / "t", case)
    dealt = degree or 2
    optimizers = optimizers_of(folder)
    assert {tuple(o["partition_count"]) for o in optimizers} == {(world, world // dealt)}
    names = [g["name"] for g in optimizers[0]["base_optimizer_state"]["param_groups"]]
    assert names == ["base", f"ep_size_{dealt}"]
    (model,) = models_of(folder)
    assert model["num_experts"] == [4]
    assert len(model["param_shapes"][1]) == 4 * (4 // dealt)
    assert not any("deepspeed_experts" in name for name in model["module"])
    assert sorted(experts_of(folder)) == [(0, e) for e in range(4)]
    assert there.layout.mesh.get("expert", 1) == dealt
    # and back, through our own reader
    source = open_manifest(case / "ckpt")
    convert(source, tmp_path / "home", world=4, stage=2)
    convert(tmp_path / "t", tmp_path / "back", world=4, stage=2, expert_parallel=2)
    assert files(tmp_path / "back") == files(tmp_path / "home")


def test_through_native(fixtures_dir: Path, tmp_path: Path) -> None:
    source = open_manifest(fixtures_dir / "deepspeed" / REAL / "ckpt")
    convert(source, tmp_path / "home", world=6, stage=1)
    for world in (3, 4, 8):  # 3 ranks can't keep two blocks of experts apart
        convert(source, tmp_path / f"n{world}", format="native", world=world, stage=3)
        convert(tmp_path / f"n{world}", tmp_path / f"{world}", world=6, stage=1)
        assert files(tmp_path / f"{world}") == files(tmp_path / "home")


@pytest.mark.parametrize(
    ("request_", "error", "text"),
    [
        (Request(world=3), RequestError, "degree of 2 doesn't fit 3 rank"),
        (Request(world=4, expert_parallel=3), RequestError, "degree of 3 doesn't fit 4 rank"),
        (Request(world=3, expert_parallel=3), RequestError, "doesn't fit the 4 expert"),
        (Request(world=8, expert_parallel=8), RequestError, "doesn't fit the 4 expert"),
        (Request(expert_parallel=0), RequestError, "degree of 0 doesn't fit"),
        (Request(stage=3), UnsupportedError, "no experts .* at ZeRO stage 3"),
    ],
)
def test_degrees_that_do_not_fit(
    fixtures_dir: Path, tmp_path: Path, request_: Request, error: type[ReshardError], text: str
) -> None:
    source = open_manifest(fixtures_dir / "deepspeed" / REAL / "ckpt")
    with pytest.raises(error, match=text):
        deepspeed.FORMAT.draft(source, request_, tmp_path / "t")


def test_a_degree_without_experts(golden_dir: Path, tmp_path: Path) -> None:
    source = open_manifest(golden_dir / "z2_p4_bf16" / "ckpt")
    with pytest.raises(RequestError, match="there are no experts"):
        deepspeed.FORMAT.draft(source, Request(expert_parallel=2), tmp_path / "t")


@pytest.fixture
def copied(fixtures_dir: Path, tmp_path: Path) -> Path:
    """A copy of the real checkpoint's folder, to be damaged."""
    tag = fixtures_dir / "deepspeed" / REAL / "ckpt" / "global_step3"
    (tmp_path / "c").mkdir()
    for path in tag.glob("*.pt"):
        (tmp_path / "c" / path.name).write_bytes(path.read_bytes())
    return tmp_path / "c"


def test_a_missing_expert(copied: Path) -> None:
    (copied / "layer_0_expert_3_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(IncompleteError, match="layer_0_expert_3_mp_rank_00"):
        open_manifest(copied)


def test_an_expert_of_an_earlier_run(copied: Path) -> None:
    data = (copied / "layer_0_expert_1_mp_rank_00_model_states.pt").read_bytes()
    for name in ("layer_0_expert_4", "layer_1_expert_0"):
        left = copied / f"{name}_mp_rank_00_model_states.pt"
        left.write_bytes(data)
        with pytest.raises(InconsistentError, match=rf"{name}.*earlier run|layers have \[4\]"):
            open_manifest(copied)
        left.unlink()


def test_an_expert_in_the_place_of_another(copied: Path) -> None:
    one = copied / "layer_0_expert_1_mp_rank_00_model_states.pt"
    one.write_bytes((copied / "layer_0_expert_3_mp_rank_00_model_states.pt").read_bytes())
    with pytest.raises(CorruptError, match="isn't of expert 1"):
        open_manifest(copied)


@pytest.mark.parametrize(
    "change", [{"num_experts": 4}, {"num_experts": ["4"]}, {"ds_autoep_layers": [{}]}]
)
def test_experts_that_are_kept_in_another_way(copied: Path, change: dict[str, Any]) -> None:
    path = copied / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(path, weights_only=False), **change}, path)
    with pytest.raises(UnsupportedError, match="keeps its experts in a way"):
        open_manifest(copied)


def test_optimizer_files_of_experts_without_zero(copied: Path) -> None:
    """Without ZeRO they number parameters, and nothing says which."""
    for path in copied.glob("*zero_pp_rank*"):
        path.unlink()
    torch.save({"optimizer": {"state": {}}}, copied / "expp_rank_0_mp_rank_00_optim_states.pt")
    manifest = open_manifest(copied)
    assert {state for _, state in manifest.tensors} == {"param"}
    assert "expp_rank_0_mp_rank_00_optim_states.pt" in [
        n.where for n in manifest.notes if n.kind == "left-out"
    ]


def test_ranks_that_changed_places(copied: Path, tmp_path: Path) -> None:
    """Ranks 1 and 3 hold the same experts: their weights tell."""
    one, three = (
        copied / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (1, 3)
    )
    first, second = one.read_bytes(), three.read_bytes()
    one.write_bytes(second)
    three.write_bytes(first)
    with pytest.raises(InconsistentError):
        convert(copied, tmp_path / "t", world=2)


# -- made checkpoints ----------------------------------------------------------------------------

Arrays = dict[tuple[str, str], NDArray[Any]]
Params = list[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Model:
    """A model with experts.

    Parameters
    ----------
    layers
        How many experts each MoE layer has.
    degree
        Of expert parallelism.
    last
        Degree of the last layer; ``None`` for that of the others.
    frozen, buffers
        Whether experts have a parameter that doesn't train, and a buffer.
    zero, data_first
        Of the configuration.
    """

    layers: tuple[int, ...]
    degree: int
    frozen: bool = False
    buffers: bool = False
    rotated: bool = False
    data_first: bool = False
    last: int | None = None

    def degree_of(self, layer: int) -> int:
        own = self.last is not None and layer == len(self.layers) - 1
        return self.last if own and self.last is not None else self.degree

    def experts(self, layer: int) -> str:
        return f"blocks.{layer}.moe.deepspeed_moe.experts.deepspeed_experts"

    @property
    def config(self) -> dict[str, Any]:
        zero = {"stage": 1, "round_robin_gradients": self.rotated}
        more = {"use_data_before_expert_parallelism": True} if self.data_first else {}
        return {"zero_optimization": zero, "bf16": {"enabled": True}, **more}


def made(root: Path, model: Model, seed: int = 0) -> tuple[Manifest, Arrays]:
    """A checkpoint of one rank with whole tensors, in the order in which DeepSpeed lists them."""
    rng = np.random.default_rng(seed)
    arrays: Arrays = {}
    builder = Builder("test", root)
    path = root / "data"
    path.write_bytes(b"")
    builder.file(path)
    data = bytearray()

    def put(name: str, state: str, array: NDArray[Any]) -> Placed:
        arrays[name, state] = array
        offset = len(data)
        data.extend(array.tobytes())
        return Placed(Entry(name, array.shape), dtype(array.dtype.name), 0, offset)

    matrices: Params = [("head", (5, 3)), ("token", (7, 3))]
    vectors: Params = [("norm", (3,)), ("scale", (1,))]
    dealt = sorted({model.degree_of(layer) for layer in range(len(model.layers))})
    expert_matrices: dict[int, Params] = {degree: [] for degree in dealt}
    expert_vectors: dict[int, Params] = {degree: [] for degree in dealt}
    still: list[str] = []
    for layer, count in enumerate(model.layers):
        for index in range(count):
            at, degree = f"{model.experts(layer)}.{index}", model.degree_of(layer)
            expert_matrices[degree] += [
                (f"{at}.up.weight", (4, 3)),
                (f"{at}.down.weight", (3, 5 + layer)),
            ]
            expert_vectors[degree] += [(f"{at}.up.bias", (4,)), (f"{at}.down.bias", (3,))]
            still += [f"{at}.fixed"] if model.frozen else []
    plain = {"lr": 0.1, "name": "plain", "weight_decay": 0.0}
    decay = {"lr": 0.1, "name": "decay", "weight_decay": 0.5}
    named = [(decay, matrices), (plain, vectors)]
    for base, some in ((decay, expert_matrices), (plain, expert_vectors)):
        for degree, params in some.items():
            named.append(({**base, "name": f"ep_size_{degree}", "moe": True}, params))
    weights = []
    for number, (group, params) in enumerate(named):
        builder.groups.append(ParamGroup(group, {"step": np.array(3, np.float32)}))
        rows: dict[str, list[Placed]] = {s: [] for s in STATES}
        for name, shape in params:
            for state in STATES:
                array = np.asarray(rng.standard_normal(shape), np.float32)
                rows[state].append(put(name, state, array))
            weights.append(put(name, "param", arrays[name, "master"].astype(ml_dtypes.bfloat16)))
        for state, some in rows.items():
            builder.add_placed(f"g{number}.{state}", state, some, group=number)
    weights += [put(n, "param", rng.random(3).astype(ml_dtypes.bfloat16)) for n in still]
    builder.add_placed("weights", "param", weights)
    if model.buffers:
        rows_ = [
            put(f"{model.experts(layer)}.{e}.count", "buffer", np.array(e + 10 * layer, np.int64))
            for layer, count in enumerate(model.layers)
            for e in range(count)
        ]
        builder.add_placed("buffers", "buffer", rows_)
    builder.objects.update(
        step=3,
        deepspeed={
            "config": model.config,
            "dtype": "bfloat16",
            "round_robin": 0,
            "moe_layers": [model.experts(layer) for layer in range(len(model.layers))],
        },
    )
    path.write_bytes(data)
    return replace(builder.build({"shard": 1}, 1), files=(File("data", len(data)),)), arrays


def check(root: Path, arrays: Arrays) -> None:
    """Both torch and our reader find every tensor."""
    found = whole_of(folder_of(root))
    checkpoint = Checkpoint(open_manifest(root))
    assert set(checkpoint.manifest.tensors) == set(arrays)
    for (name, state), array in arrays.items():
        read = checkpoint[name, state].numpy()
        assert read.shape == array.shape
        assert read.tobytes() == array.tobytes(), (name, state)
        if state != "buffer" or "experts" not in name:
            kind = {"param": "lp", "master": "fp32"}.get(state, state)
            same = real.as_numpy(found[f"{kind}.{name}"])
            assert same.shape == array.shape
            assert same.tobytes() == array.tobytes(), (name, state)


degrees = st.sampled_from([1, 2, 3, 6])


@settings(max_examples=max(1, settings().max_examples // 6))
@given(
    degree=degrees,
    layers=st.lists(st.sampled_from([6, 12]), min_size=1, max_size=3),
    way=st.lists(st.tuples(degrees, st.integers(1, 2), st.booleans()), min_size=1, max_size=2),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
)
def test_any_degrees_one_after_the_other(
    degree: int, layers: list[int], way: list[tuple[int, int, bool]], flags: tuple[bool, ...]
) -> None:
    model = Model(tuple(layers), degree, *flags)
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        root = Path(name)
        source, arrays = made(root, model)
        convert(source, root / "home", world=degree * 2, stage=1)
        check(root / "home", arrays)
        place: Path | Manifest = source
        for step, (other, shards, second) in enumerate(way):
            stage = 2 if second and not model.frozen else 1
            convert(
                place, root / f"{step}", world=other * shards, stage=stage, expert_parallel=other
            )
            check(root / f"{step}", arrays)
            place = root / f"{step}"
        convert(place, root / "back", world=degree * 2, stage=1, expert_parallel=degree)
        assert files(root / "back") == files(root / "home")


@pytest.mark.parametrize("data_first", [False, True])
def test_which_rank_holds_which_expert(tmp_path: Path, data_first: bool) -> None:
    source, arrays = made(tmp_path, Model((4,), 2, data_first=data_first))
    convert(source, tmp_path / "t", world=6, stage=2)
    folder = folder_of(tmp_path / "t")
    first = arrays[f"{Model((4,), 2).experts(0)}.0.up.bias", "master"]
    third = arrays[f"{Model((4,), 2).experts(0)}.2.up.bias", "master"]
    begins = {
        rank: optimizer["single_partition_of_fp32_groups"][3][:4].tolist()
        for rank, optimizer in enumerate(optimizers_of(folder))
    }
    holders = {0: first, 3: third} if data_first else {0: first, 1: third}
    for rank, expected in holders.items():
        assert begins[rank] == expected.tolist()
    count = [b for b, _, _ in blocks_of(models_of(folder)[0], optimizers_of(folder), 3)]
    assert count == [0, 1]


def test_buffers_of_experts(tmp_path: Path) -> None:
    model = Model((4, 2), 2, buffers=True)
    source, arrays = made(tmp_path, model)
    convert(source, tmp_path / "t", world=2, stage=2)
    folder = folder_of(tmp_path / "t")
    own = [f"{model.experts(0)}.0.count", f"{model.experts(0)}.1.count"]
    assert models_of(folder)[0]["buffer_names"] == [*own, f"{model.experts(1)}.0.count"]
    assert models_of(folder)[0]["num_experts"] == [4, 2]
    for (layer, expert), file in experts_of(folder).items():
        name = f"{model.experts(layer)}.{expert}.count"
        assert file[name].item() == arrays[name, "buffer"]


def test_frozen_experts(tmp_path: Path) -> None:
    source, arrays = made(tmp_path, Model((4,), 2, frozen=True))
    with pytest.raises(UnsupportedError, match="frozen experts of rank 0"):
        deepspeed.FORMAT.draft(source, Request(world=2, stage=2), tmp_path / "t")
    convert(source, tmp_path / "t", world=2, stage=1)
    check(tmp_path / "t", arrays)


def _changed(source: Manifest, **engine: Any) -> Manifest:
    old = {k: v for k, v in source.objects["deepspeed"].items() if k not in engine}
    new = {k: v for k, v in engine.items() if v is not None}
    return replace(source, objects={**source.objects, "deepspeed": {**old, **new}})


def test_sources_that_say_too_little(tmp_path: Path) -> None:
    source, _ = made(tmp_path, Model((4, 2), 2))
    bare = [ParamGroup({**g.settings, "name": "mine"}, g.scalars) for g in source.groups]
    cases = {
        "in which order": _changed(source, moe_layers=None),
        "isn't marked as a group of experts": replace(source, groups=tuple(bare)),
        "has no trained parameters": replace(source, groups=(*source.groups, source.groups[3])),
        "tensor or pipeline parallelism": replace(
            source, layout=replace(source.layout, mesh={"tensor": 2})
        ),
    }
    for text, case in cases.items():
        with pytest.raises(UnsupportedError, match=text):
            deepspeed.FORMAT.draft(case, Request(world=2), tmp_path / "t")


def test_layers_of_several_degrees(tmp_path: Path) -> None:
    source, arrays = made(tmp_path, Model((4, 4), 2, last=4, rotated=True))
    convert(source, tmp_path / "8", world=8, stage=2)
    check(tmp_path / "8", arrays)
    counts = {tuple(o["partition_count"]) for o in optimizers_of(folder_of(tmp_path / "8"))}
    assert counts == {(8, 8, 4, 2, 4, 2)}
    for world in (2, 4):
        convert(tmp_path / "8", tmp_path / f"n{world}", format="native", world=world, stage=3)
        convert(tmp_path / f"n{world}", tmp_path / f"back{world}", world=8, stage=2)
        assert files(tmp_path / f"back{world}") == files(tmp_path / "8")
    convert(tmp_path / "8", tmp_path / "4", world=4, stage=1)
    check(tmp_path / "4", arrays)
    with pytest.raises(RequestError, match=r"several degrees .*\[2, 4\]"):
        deepspeed.FORMAT.draft(source, Request(world=4, expert_parallel=2), tmp_path / "t")
    with pytest.raises(RequestError, match="degree of 4 doesn't fit 2 rank"):
        deepspeed.FORMAT.draft(source, Request(world=2), tmp_path / "t")


# -- groups that DeepSpeed splits ----------------------------------------------------------------


def as_deepspeed_splits(names: list[str], numel: dict[str, int], most: int) -> list[list[str]]:
    """``split_params_into_different_moe_groups_for_optimizer``, of 0.19.8."""
    current: list[str] = []
    every: list[list[str]] = []
    size = 0
    for name in names:
        if size + numel[name] <= most:
            current.append(name)
            size += numel[name]
        else:
            every.append(current)
            current = [name]
            size = numel[name]
    return [*every, current] if current else every


def test_other_groups_at_another_degree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that holds more experts has more groups of them."""
    monkeypatch.setattr(dealing, "MOST", 90)
    layers = (6, 12)
    source, arrays = made(tmp_path, Model(layers, 6))
    place: Path | Manifest = source
    for step, degree in enumerate((6, 3, 1, 2, 6)):
        root = tmp_path / f"{step}"
        convert(place, root, world=degree * 2, stage=2, expert_parallel=degree)
        check(root, arrays)
        shapes = models_of(folder_of(root))[0]["param_shapes"]
        expected: list[list[str]] = []
        for rests in (("up.weight", "down.weight"), ("up.bias", "down.bias")):
            names, numel = [], {}
            for layer, count in enumerate(layers):
                for index in range(count // degree):
                    for rest in rests:
                        name = f"{Model(layers, 6).experts(layer)}.{index}.{rest}"
                        names.append(name)
                        numel[name] = arrays[name, "master"].size
            expected += as_deepspeed_splits(names, numel, 90)
        assert [list(group) for group in shapes[2:]] == expected
        groups = optimizers_of(folder_of(root))[0]["base_optimizer_state"]["param_groups"]
        assert [g["params"] for g in groups] == [[i] for i in range(len(expected) + 2)]
        place = root
    assert files(tmp_path / "4") == files(tmp_path / "0")


def test_groups_that_were_split_by_another_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, arrays = made(tmp_path, Model((4,), 2))
    monkeypatch.setattr(dealing, "MOST", 20)
    with pytest.raises(UnsupportedError, match="more than 20 elements"):
        deepspeed.FORMAT.draft(source, Request(world=4, expert_parallel=4), tmp_path / "t")
    convert(source, tmp_path / "t", world=4, stage=1)  # at the same degree groups stay as they are
    check(tmp_path / "t", arrays)
    assert len(models_of(folder_of(tmp_path / "t"))[0]["param_shapes"]) == 4


def test_an_order_that_is_not_layer_by_layer(tmp_path: Path) -> None:
    source, arrays = made(tmp_path, Model((4,), 2))
    spaces = [
        replace(s, entries=tuple(sorted(s.entries, key=lambda e: e.name[-9:]))) if s.group == 2
        else s for s in source.layout.spaces
    ]  # fmt: skip
    stores = dict(source.stores)
    for old, new in zip(source.layout.spaces, spaces, strict=True):
        if old.group == 2:
            (state,) = old.states
            store = stores[old.name, state]
            order = [old.entries.index(e) for e in new.entries]
            stores[old.name, state] = replace(
                store, files=store.files[order], offsets=store.offsets[order]
            )
    changed = replace(source, layout=replace(source.layout, spaces=tuple(spaces)), stores=stores)
    convert(changed, tmp_path / "t", world=2, stage=1)
    check(tmp_path / "t", arrays)
    with pytest.raises(UnsupportedError, match="layer by layer"):
        deepspeed.FORMAT.draft(changed, Request(world=4, expert_parallel=4), tmp_path / "u")
