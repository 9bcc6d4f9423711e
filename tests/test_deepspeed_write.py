"""DeepSpeed checkpoints are written as DeepSpeed itself would have written them.

Looked at with torch alone (``deepspeed_files``). The truth is what the live engines held when they
saved.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.api import open_manifest
from reshard.conversion import Wanted, planned
from reshard.dtypes import dtype
from reshard.errors import RequestError, UnsupportedError
from reshard.execute import Options
from reshard.format import Casts, Draft, Request
from reshard.formats import _deepspeed_write as writing
from reshard.formats import formats
from reshard.formats._deepspeed_settings import shared_groups
from reshard.formats._deepspeed_write_groups import Rules, lay_out, round_robin, unrotated
from reshard.formats._torch_sheet import Local
from reshard.layout import Entry, TensorKey
from reshard.manifest import Manifest
from reshard.plain import LeftOut
from tests import deepspeed_truth as real
from tests.deepspeed_files import (
    differences,
    folder_of,
    load,
    models_of,
    optimizers_of,
    real_truth,
    same_bits,
    whole_of,
)

torch = pytest.importorskip("torch")

FAST = Options(sync=False, workers=2)
CASES = (
    "z1_p2_bf16_frozen", "z1_p2_bf16opt", "z1_p4_bf16", "z2_p2_bf16_offload", "z2_p2_bf16_tied",
    "z2_p4_fp16", "z3_p2_bf16_frozen_tied", "z3_p2_fp32", "z3_p4_bf16_1group",
    "pp2dp2_z1_bf16", "tp2dp2_z1_bf16", "z1_p2_bf16_sched",
)  # fmt: skip
PLAIN = "z2_p2_bf16_tied"
STAGE3 = "z3_p2_bf16_frozen_tied"


# -- writing -----------------------------------------------------------------------------------


def _convert(source: Manifest | Path, target: Path, world: int, stage: int, **more: Any) -> Draft:
    manifest = open_manifest(source) if isinstance(source, Path) else source
    wanted = Wanted(format="deepspeed", world=world, stage=stage, **more)
    job = planned(manifest, target, wanted, FAST, formats())
    job.run()
    return job.draft


def _with(source: Manifest, **changes: Any) -> Manifest:
    """The source with another configuration of ZeRO, or other objects."""
    zero = changes.pop("zero", {})
    engine = dict(source.objects["deepspeed"])
    config = dict(engine["config"])
    config["zero_optimization"] = {**config["zero_optimization"], **zero}
    engine.update(config=config, **changes.pop("engine", {}))
    return replace(source, objects={**source.objects, "deepspeed": engine, **changes})


def _check_truth(root: Path, case: Path, *, at_least: int) -> None:
    """Everything that the live ranks held is there, bit by bit."""
    folder = folder_of(root)
    found = whole_of(folder)
    stages = sorted(folder.glob("layer_*"))
    aliases = models_of(folder)[0]["shared_params"]
    equal = 0
    for path in sorted(case.glob("truth*.safetensors")):
        number = re.search(r"\d+$", path.stem)
        mine = whole_of(folder, int(number[0])) if number else found
        for layer in stages:
            prefix = str(int(layer.name[6:8]))
            mine |= {f"lp.{prefix}.{k}": v for k, v in load(layer).items()}
        for key, expected in real_truth(path):
            kind, _, name = key.partition(".")
            key = f"{kind}.{aliases.get(name, name)}" if name else key
            if key == "step":
                _check_steps(folder, expected)
            elif key in mine or not _left_out(folder, kind, name):
                assert same_bits(mine[key], expected), key
                equal += 1
    assert equal >= at_least


def _left_out(folder: Path, kind: str, name: str) -> bool:
    """16-bit weights at stage 3, and buffers that aren't saved."""
    if kind == "buffer":
        return name not in models_of(folder)[0]["buffer_names"]
    return kind == "lp" and _stage(folder) == 3


def _stage(folder: Path) -> int:
    return int(models_of(folder)[0]["ds_config"]["zero_optimization"]["stage"])


def _check_steps(folder: Path, expected: Any) -> None:
    for optimizer in optimizers_of(folder):
        base = optimizer.get("base_optimizer_state") or optimizer["optimizer_state_dict"]
        steps = [float(state["step"]) for state in base["state"].values()]
        assert set(steps) == set(expected.tolist())


# -- as DeepSpeed writes -----------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CASES, "moe_z2_p4_ep2_bf16"])
def test_same_files_as_deepspeed(fixtures_dir: Path, tmp_path: Path, name: str) -> None:
    case = fixtures_dir / "deepspeed" / name
    source = open_manifest(case / "ckpt")
    stage = source.layout.stage
    assert stage is not None
    _convert(source, tmp_path / "t", source.layout.world, stage)
    theirs, mine = folder_of(case / "ckpt"), folder_of(tmp_path / "t")
    names = {p.name for p in theirs.glob("*.pt")}
    assert {p.name for p in mine.iterdir()} == names
    for file in sorted(names):
        found = set(differences(load(theirs / file), load(mine / file)))
        # DeepSpeed leaves the padding of stage 3 as it found the memory
        allowed = re.compile(r"/optimizer_state_dict/fp32_flat_groups/\d+")
        assert not {f for f in found if not allowed.fullmatch(f)}, file
    if stage == 3:
        _check_truth(tmp_path / "t", case, at_least=60)


@pytest.mark.parametrize("name", CASES)
def test_state_at_other_sizes_and_stages(fixtures_dir: Path, tmp_path: Path, name: str) -> None:
    case = fixtures_dir / "deepspeed" / name
    targets = ((1, 1), (3, 1)) if name.startswith("pp") else ((1, 3), (3, 2), (5, 1), (12, 3))
    for world, stage in targets:
        target = tmp_path / f"{world}.{stage}"
        _convert(case / "ckpt", target, world, stage)
        _check_truth(target, case, at_least=60)
        models = models_of(folder_of(target))
        assert {m["dp_world_size"] for m in models} == {world}
        assert len(optimizers_of(folder_of(target))) == world
        # a step that two flat groups share would count double
        for optimizer in optimizers_of(folder_of(target)):
            base = optimizer.get("base_optimizer_state") or optimizer["optimizer_state_dict"]
            steps = [s["step"] for s in base["state"].values() if torch.is_tensor(s["step"])]
            assert len({s.data_ptr() for s in steps}) == len(steps)


@pytest.mark.parametrize("name", ["z1_p4_bf16", "z2_p4_fp16", STAGE3, "z1_p2_bf16opt"])
def test_there_and_back(fixtures_dir: Path, tmp_path: Path, name: str) -> None:
    source = open_manifest(fixtures_dir / "deepspeed" / name / "ckpt")
    stage = source.layout.stage
    assert stage is not None
    _convert(source, tmp_path / "home", source.layout.world, stage)
    expected = _bytes(tmp_path / "home", "optim_states")
    for world, other in ((1, stage), (3, 3), (5, 2), (8, 1), (32, stage)):
        there, back = tmp_path / f"{world}", tmp_path / f"{world}.back"
        _convert(source, there, world, other)
        _convert(there, back, source.layout.world, stage)
        if name != "z1_p2_bf16opt" or other == stage:
            assert _bytes(back, "optim_states") == expected, (world, other)


def _bytes(root: Path, kind: str = "") -> dict[str, bytes]:
    paths = (p for p in root.rglob("*") if p.is_file() and kind in p.name)
    return {str(p.relative_to(root)): p.read_bytes() for p in paths}


def test_files_depend_on_nothing_else(fixtures_dir: Path, tmp_path: Path) -> None:
    source = fixtures_dir / "deepspeed" / STAGE3 / "ckpt"
    for stage in (2, 3):
        for folder in ("one", "two"):
            _convert(source, tmp_path / f"{folder}{stage}", 3, stage)
        assert _bytes(tmp_path / f"one{stage}") == _bytes(tmp_path / f"two{stage}")


# -- settings that change the layout -----------------------------------------------------------


@pytest.mark.parametrize(
    ("zero", "stage"),
    [
        ({"round_robin_gradients": True}, 2),
        ({"round_robin_gradients": True}, 1),
        ({"parameter_alignment": True}, 1),
        ({"parameter_alignment": True, "round_robin_gradients": True}, 2),
        ({"round_robin_gradients": True, "sub_group_size": 2000}, 3),
        ({"sub_group_size": 600.0}, 3),
    ],
)
def test_layouts(fixtures_dir: Path, tmp_path: Path, zero: dict[str, Any], stage: int) -> None:
    case = fixtures_dir / "deepspeed" / PLAIN
    source = _with(open_manifest(case / "ckpt"), zero=zero, engine={"round_robin": 0})
    before = [list(g) for g in models_of(folder_of(case / "ckpt"))[0]["param_shapes"]]
    for world in (2, 3, 4):
        target = tmp_path / f"{world}"
        _convert(source, target, world, stage)
        _check_truth(target, case, at_least=60)
        after = [list(g) for g in models_of(folder_of(target))[0]["param_shapes"]]
        if stage == 3:
            assert [n for g in after for n in g] == [n for g in before for n in g]
            assert len(after) > len(before)
        elif "round_robin_gradients" in zero:
            assert after == [[g[i] for i in round_robin(len(g), world)] for g in before]
        paddings = [o.get("param_alignment_paddings") for o in optimizers_of(folder_of(target))]
        assert all(p == paddings[0] for p in paddings)
        if "parameter_alignment" in zero:
            assert any(max(p) for p in paddings[0])
            assert all(p[-1] == 0 for p in paddings[0])


def test_round_robin_order_is_found_and_undone(fixtures_dir: Path, tmp_path: Path) -> None:
    case = fixtures_dir / "deepspeed" / PLAIN
    plain = open_manifest(case / "ckpt")
    zero = {"round_robin_gradients": True}
    _convert(_with(plain, zero=zero, engine={"round_robin": 0}), tmp_path / "r", 3, 2)
    _convert(tmp_path / "r", tmp_path / "three", 2, 3)
    _convert(plain, tmp_path / "plain", 2, 3)
    orders = [models_of(folder_of(tmp_path / t))[0]["param_shapes"] for t in ("three", "plain")]
    assert [list(g) for g in orders[0]] == [list(g) for g in orders[1]]
    _check_truth(tmp_path / "three", case, at_least=60)


@pytest.mark.parametrize("stage", [1, 2])
def test_round_robin_order_through_native(fixtures_dir: Path, tmp_path: Path, stage: int) -> None:
    """The order of a native copy is undone, whatever world size it was cut for meanwhile."""
    case = fixtures_dir / "deepspeed" / PLAIN
    plain = open_manifest(case / "ckpt")
    rotated = _with(plain, zero={"round_robin_gradients": True}, engine={"round_robin": 0})
    _convert(rotated, tmp_path / "three", 3, stage)
    _convert(rotated, tmp_path / "five", 5, 2)
    there = Wanted(format="native", world=4, stage=3)
    planned(open_manifest(tmp_path / "three"), tmp_path / "n", there, FAST, formats()).run()
    _convert(tmp_path / "n", tmp_path / "back", 5, 2)
    _check_truth(tmp_path / "back", case, at_least=60)
    assert _bytes(tmp_path / "back") == _bytes(tmp_path / "five")
    engine = open_manifest(tmp_path / "n").objects["deepspeed"]
    old = {k: v for k, v in engine.items() if k != "round_robin"}
    unknown = replace(open_manifest(tmp_path / "n"), objects={"deepspeed": old})
    with pytest.raises(UnsupportedError, match="round_robin"):
        writing.draft(unknown, Request(stage=2), tmp_path / "u")


def test_a_pipeline_through_native(fixtures_dir: Path, tmp_path: Path) -> None:
    case = fixtures_dir / "deepspeed" / "pp2dp2_z1_bf16"
    there = Wanted(format="native", world=3, stage=3)
    planned(open_manifest(case / "ckpt"), tmp_path / "n", there, FAST, formats()).run()
    _convert(tmp_path / "n", tmp_path / "back", 2, 1)
    _convert(case / "ckpt", tmp_path / "home", 2, 1)
    _check_truth(tmp_path / "back", case, at_least=60)
    assert _bytes(tmp_path / "back") == _bytes(tmp_path / "home")
    engine = open_manifest(tmp_path / "n").objects["deepspeed"]
    assert engine["layers"] == list(range(7))
    old = {k: v for k, v in engine.items() if k != "layers"}
    unknown = replace(open_manifest(tmp_path / "n"), objects={"deepspeed": old})
    with pytest.raises(UnsupportedError, match="which layers"):
        writing.draft(unknown, Request(stage=1), tmp_path / "u")


def test_groups_that_are_alike_stay_apart(fixtures_dir: Path, tmp_path: Path) -> None:
    """An optimizer gets back as many groups as it had, each with its own parameters."""
    source = open_manifest(fixtures_dir / "deepspeed" / "pp2dp2_z1_bf16" / "ckpt")
    alike = replace(source, groups=tuple(source.groups[0] for _ in source.groups))
    assert len(alike.groups) == 2
    _convert(alike, tmp_path / "one", 3, 1)
    found = open_manifest(tmp_path / "one")
    assert [dict(g.settings) for g in found.groups] == [dict(g.settings) for g in alike.groups]
    for mp in range(2):
        shapes = [list(g) for g in models_of(folder_of(tmp_path / "one"), mp)[0]["param_shapes"]]
        expected = [
            list(g) for g in models_of(folder_of(source.root.parent), mp)[0]["param_shapes"]
        ]
        assert shapes == expected
    there = Wanted(format="native", world=4, stage=3)
    planned(found, tmp_path / "n", there, FAST, formats()).run()
    _convert(tmp_path / "n", tmp_path / "two", 3, 1)
    assert _bytes(tmp_path / "two") == _bytes(tmp_path / "one")


def test_groups_that_model_ranks_share() -> None:
    a, b = {"lr": 0.1, "betas": (0.9, 0.95)}, {"lr": 0.2}
    for ranks, groups, numbers in (
        ([[a, b], [a, b]], [a, b], [[0, 1], [0, 1]]),
        ([[a, a], [a, a]], [a, a], [[0, 1], [0, 1]]),
        ([[a, a, b], [a, b]], [a, a, b], [[0, 1, 2], [0, 2]]),
        ([[b], [a, b], [a]], [a, b], [[1], [0, 1], [0]]),
        ([[a, b], [b, a]], [a, b, a], [[0, 1], [1, 2]]),
        ([[a], [a, a]], [a, a], [[0], [0, 1]]),
        ([[{}, {}]], [{}, {}], [[0, 1]]),
    ):
        assert shared_groups(ranks) == (groups, numbers)


def test_slices_say_where_parameters_lie(fixtures_dir: Path, tmp_path: Path) -> None:
    case = fixtures_dir / "deepspeed" / PLAIN
    zero = {"parameter_alignment": True, "round_robin_gradients": True}
    source = _with(open_manifest(case / "ckpt"), zero=zero, engine={"round_robin": 0})
    _convert(source, tmp_path / "t", 3, 2)
    whole = whole_of(folder_of(tmp_path / "t"))
    parts: dict[str, list[Any]] = {}
    for optimizer in optimizers_of(folder_of(tmp_path / "t")):
        groups = zip(
            optimizer["single_partition_of_fp32_groups"],
            optimizer["param_slice_mappings"],
            optimizer["group_paddings"],
            strict=True,
        )
        for flat, slices, padding in groups:
            assert 0 <= padding <= len(flat) + padding
            for name, where in slices.items():
                parts.setdefault(name, []).append(flat[where.start : where.start + where.numel])
    for name, some in parts.items():
        assert same_bits(torch.cat(some).detach(), whole[f"fp32.{name}"].reshape(-1)), name


@given(
    numel=st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any),
    world=st.integers(1, 9),
    align=st.sampled_from([1, 4, 8]),
    rotated=st.booleans(),
    limit=st.integers(1, 60),
)
def test_flat_groups_as_deepspeed_makes_them(
    numel: list[int], world: int, align: int, rotated: bool, limit: int
) -> None:
    params = [Local(f"p{i}", (n,), (Entry(f"p{i}", (n,)),)) for i, n in enumerate(numel)]
    states = {"master": dtype("float32")}
    rules = Rules(2, world, round_robin=rotated, align=align)
    (flat,) = lay_out(rules, 0, params, states, {})
    # stage_1_and_2.py: reorder, pad all but the last parameter, then the whole to 2 x world
    order = list(range(len(numel)))
    if rotated:
        order = [i for w in range(world) for i in order if i % world == w]
    assert unrotated(flat.params, world if rotated else 1) == tuple(params)
    line: list[tuple[int, int]] = []
    paddings = []
    for index in order:
        line += [(index, x) for x in range(numel[index])]
        paddings.append(-len(line) % align if index != order[-1] else 0)
        line += [(-1, 0)] * paddings[-1]
    end = len(line)
    line += [(-1, 0)] * (-len(line) % (2 * world))
    assert flat.alignment_paddings == paddings
    assert flat.part * world == len(line)
    for rank in range(world):
        mine = line[rank * flat.part : (rank + 1) * flat.part]
        expected = {
            f"p{i}": ([p for p, _ in mine].index(i), sum(p == i for p, _ in mine))
            for i in range(len(numel))
            if any(p == i for p, _ in mine)
        }
        assert flat.slices(rank) == expected
        assert list(flat.slices(rank)) == list(expected)
        beyond = len(range(max(end, rank * flat.part), (rank + 1) * flat.part))
        assert flat.padding(rank, tail_on_last=False) == beyond
    subs = lay_out(Rules(3, world, sub_group_size=limit), 0, params, states, {})
    sizes = [[-(-p.numel // world) for p in sub.params] for sub in subs]
    assert [p for sub in subs for p in sub.params] == params
    assert [sub.part for sub in subs] == [sum(s) for s in sizes]
    if len(subs) > 1:
        assert sum(sum(s) for s in sizes) > limit
        assert all(sum(s[:-1]) < limit <= sum(s) for s in sizes[:-1])


# -- state that isn't tensors ------------------------------------------------------------------


def test_values_of_each_rank(fixtures_dir: Path, tmp_path: Path) -> None:
    source = open_manifest(fixtures_dir / "deepspeed" / STAGE3 / "ckpt")
    rng = [np.arange(4, dtype=np.uint8) + r for r in range(2)]
    client = {"epoch": 3, "rng": rng[0], "odd": (1, b"x", {2}, frozenset((4,)), {"n": None})}
    source = _with(source, client=client, per_rank={"client": {"rng": rng}})
    draft = _convert(source, tmp_path / "five", 5, 3)
    assert not [loss for loss in draft.losses if loss.what.startswith("client")]
    for rank, model in enumerate(models_of(folder_of(tmp_path / "five"))):
        assert torch.equal(model["rng"], torch.from_numpy(rng[rank % 2]))
        assert (model["epoch"], model["odd"]) == (3, client["odd"])
        assert model["shared_params"] == ({} if rank else dict(source.aliases))
    for world, stage in ((1, 3), (4, 2)):
        draft = _convert(source, tmp_path / f"{world}", world, stage)
        lost = [loss for loss in draft.losses if loss.what == "client:rng"]
        assert [loss.harmless for loss in lost] == [True]
        assert "ranks 1 to 1" in lost[0].why


def test_what_cannot_be_carried(fixtures_dir: Path, tmp_path: Path) -> None:
    source = open_manifest(fixtures_dir / "deepspeed" / PLAIN / "ckpt")
    client = {"kept": 1, "mine": LeftOut("x.Y"), "deep": [1, {"z": LeftOut("x.Z"), "w": 2}]}
    source = _with(source, client=client, other={"a": 1})
    draft = writing.draft(source, Request(), tmp_path / "t")
    hard = {loss.what for loss in draft.losses if not loss.harmless}
    assert hard == {"client:mine", "client:deep/1/z", "other"}
    with pytest.raises(RequestError, match="client:mine"):
        _convert(source, tmp_path / "t", 2, 2)
    _convert(source, tmp_path / "t", 2, 2, drop=("*",))
    model = models_of(folder_of(tmp_path / "t"))[0]
    assert "mine" not in model
    assert (model["kept"], model["deep"]) == (1, [1, {"w": 2}])


def test_weights_that_stage_3_leaves_out(fixtures_dir: Path, tmp_path: Path) -> None:
    source = open_manifest(fixtures_dir / "deepspeed" / PLAIN / "ckpt")
    draft = writing.draft(source, Request(stage=3), tmp_path / "t")
    names = {n for n, state in source.tensors if state == "param"}
    assert {loss.what for loss in draft.losses} == {f"param:{n}" for n in names}
    assert all(loss.harmless for loss in draft.losses)
    assert set(draft.proofs) == {((n, "param"), (n, "master")) for n in names}
    target = writing.draft(source, Request(stage=2), tmp_path / "t")
    assert not target.losses
    assert not target.proofs


def test_weights_made_of_masters(fixtures_dir: Path, tmp_path: Path) -> None:
    source = open_manifest(fixtures_dir / "deepspeed" / STAGE3 / "ckpt")
    draft = writing.draft(source, Request(stage=1), tmp_path / "t")
    trained = {n for n, state in source.tensors if state == "master"}
    assert draft.origin == {(n, "param"): (n, "master") for n in trained}
    assert draft.casts == {(n, "param") for n in trained}
    half = Casts(dtype("float16"), keep=("pos.*",))
    _convert(source, tmp_path / "half", 3, 2, dtype="float16", keep=("pos.*",))
    folder = folder_of(tmp_path / "half")
    module = models_of(folder)[0]["module"]
    kinds = {n: t.dtype for n, t in module.items() if n not in ("seen", "ema")}
    assert kinds.pop("pos.weight") == torch.bfloat16
    assert set(kinds.values()) == {torch.float16}
    assert half.dtype is not None
    masters = whole_of(folder)
    assert all(torch.equal(module[n], masters[f"fp32.{n}"].to(torch.float16)) for n in trained)
    # the engine looks for files by the element type of its configuration
    assert not list(folder.glob("bf16_*"))
    config = models_of(folder)[0]["ds_config"]
    assert (config["bf16"]["enabled"], config["fp16"]["enabled"]) == (False, True)


def test_tied_names_share_storage(fixtures_dir: Path, tmp_path: Path) -> None:
    source = open_manifest(fixtures_dir / "deepspeed" / PLAIN / "ckpt")
    _convert(source, tmp_path / "t", 3, 1)
    module = models_of(folder_of(tmp_path / "t"))[0]["module"]
    ((alias, name),) = source.aliases.items()
    assert module[alias].data_ptr() == module[name].data_ptr()


def test_source_without_anything_of_deepspeed(fixtures_dir: Path, tmp_path: Path) -> None:
    full = open_manifest(fixtures_dir / "deepspeed" / "z1_p2_fp32" / "ckpt")
    source = replace(full, objects={}, format="other")
    for stage in (1, 3):
        _convert(source, tmp_path / f"{stage}", 3, stage)
        root = tmp_path / f"{stage}"
        assert (root / "latest").read_bytes() == b"global_step0"
        _check_truth(root, fixtures_dir / "deepspeed" / "z1_p2_fp32", at_least=60)
        model, optimizer = models_of(folder_of(root))[0], optimizers_of(folder_of(root))[0]
        assert (model["global_steps"], model["skipped_steps"]) == (0, 0)
        assert vars(optimizer["loss_scaler"]) == {"cur_scale": 1.0, "dynamic": False}


def test_engine_that_accumulates_in_fp32(fixtures_dir: Path, tmp_path: Path) -> None:
    source = open_manifest(fixtures_dir / "deepspeed" / "z1_p2_bf16opt" / "ckpt")
    for stage, keys in ((1, False), (2, True)):
        _convert(source, tmp_path / f"{stage}", 3, stage)
        for rank, optimizer in enumerate(optimizers_of(folder_of(tmp_path / f"{stage}"))):
            assert ("zero_stage" in optimizer) is keys
            assert ("param_alignment_paddings" in optimizer) is keys
            states = optimizer["base_optimizer_state"]["state"]
            masters = optimizer["single_partition_of_fp32_groups"]
            missing = [len(states[g]["exp_avg"]) - len(m) for g, m in enumerate(masters)]
            assert missing == (optimizer["group_paddings"] if keys else [0] * len(masters))
            assert keys or rank == 2 or not any(optimizer["group_paddings"])


# -- what is asked for -------------------------------------------------------------------------


@pytest.mark.parametrize("tag", ["", ".", "..", "a/b", "/a", "a\\b", "a\n", "[a]", "latest", "é"])
def test_tags_that_are_no_names(fixtures_dir: Path, tmp_path: Path, tag: str) -> None:
    source = open_manifest(fixtures_dir / "deepspeed" / PLAIN / "ckpt")
    with pytest.raises(RequestError, match="tag"):
        writing.draft(source, Request(tag=tag), tmp_path / "t")


def test_tag(fixtures_dir: Path, tmp_path: Path) -> None:
    source = open_manifest(fixtures_dir / "deepspeed" / PLAIN / "ckpt")
    _convert(source, tmp_path / "t", 2, 2, tag="step-7.b")
    assert {p.name for p in (tmp_path / "t").iterdir()} == {"latest", "step-7.b"}
    assert (tmp_path / "t" / "latest").read_bytes() == b"step-7.b"
    odd = _with(source, engine={"tag": "../up"})
    assert writing.tag_of(odd, Request()) == "global_step3"
    assert writing.tag_of(_with(source, engine={"tag": "a_universal"}), Request()) == "a"


@pytest.mark.parametrize(
    ("name", "request_", "text"),
    [
        ("pp2dp2_z1_bf16", Request(stage=2), "pipelines"),
        ("z2_p4_bf16_elastic", Request(), "learning rate"),
        (PLAIN, Request(stage=0), "stage 0"),
    ],
)
def test_refused(
    fixtures_dir: Path, tmp_path: Path, name: str, request_: Request, text: str
) -> None:
    source = open_manifest(fixtures_dir / "deepspeed" / name / "ckpt")
    with pytest.raises(UnsupportedError, match=text):
        writing.draft(source, request_, tmp_path / "t")


def _without(source: Manifest, keys: set[TensorKey]) -> Manifest:
    spaces = [
        replace(s, states={k: d for k, d in s.states.items() if (s.name, k) not in keys})
        for s in source.layout.spaces
        if any((s.name, k) not in keys for k in s.states)
    ]
    return replace(source, layout=replace(source.layout, spaces=tuple(spaces)))


def test_refused_sources(fixtures_dir: Path, tmp_path: Path) -> None:
    source = open_manifest(fixtures_dir / "deepspeed" / PLAIN / "ckpt")
    grouped = [s for s in source.layout.spaces if s.group is not None]
    bare = _without(source, {(s.name, k) for s in grouped for k in s.states})
    cases = {
        "no optimizer state": bare,
        "NVMe": _with(source, zero={"offload_optimizer": {"device": "nvme"}}),
        "several": replace(source, groups=(replace(source.groups[0], optimizer=1),)),
        "no trained parameters": replace(source, groups=(*source.groups, source.groups[0])),
    }
    for text, case in cases.items():
        with pytest.raises(UnsupportedError, match=text):
            writing.draft(case, Request(stage=2), tmp_path / "t")
    hpz = _with(source, zero={"zero_hpz_partition_size": 2})
    with pytest.raises(UnsupportedError, match="hpz"):
        writing.draft(hpz, Request(stage=3), tmp_path / "t")


def test_no_moments_yet(fixtures_dir: Path, tmp_path: Path) -> None:
    source = open_manifest(fixtures_dir / "deepspeed" / PLAIN / "ckpt")
    grouped = [s for s in source.layout.spaces if s.group is not None]
    keys = {(s.name, k) for s in grouped for k in s.states if k != "master"}
    young = replace(
        _without(source, keys), groups=tuple(replace(g, scalars={}) for g in source.groups)
    )
    for stage in (2, 3):
        _convert(young, tmp_path / f"{stage}", 3, stage)
        for optimizer in optimizers_of(folder_of(tmp_path / f"{stage}")):
            base = optimizer.get("base_optimizer_state") or optimizer["optimizer_state_dict"]
            assert base["state"] == {}
            assert len(base["param_groups"]) == 2


def test_truth_is_there(fixtures_dir: Path) -> None:
    """The cases that are compared are among the real checkpoints."""
    assert set(CASES) <= set(real.cases(fixtures_dir))


def test_large_values_of_each_rank(fixtures_dir: Path, tmp_path: Path) -> None:
    source = open_manifest(fixtures_dir / "deepspeed" / STAGE3 / "ckpt")
    big = [np.arange(30_000, dtype=np.float32) + r for r in range(2)]
    source = _with(source, client={"big": big[0]}, per_rank={"client": {"big": big}})
    _convert(source, tmp_path / "two", 2, 3)
    stored = open_manifest(tmp_path / "two")
    assert "client" in stored.states  # too large to be kept with the plain data
    for world, stage in ((3, 3), (1, 3), (3, 2)):
        draft = _convert(stored, tmp_path / f"{world}.{stage}", world, stage)
        assert all(loss.harmless for loss in draft.losses)
        for rank, model in enumerate(models_of(folder_of(tmp_path / f"{world}.{stage}"))):
            assert torch.equal(model["big"], torch.from_numpy(big[rank % 2]))
