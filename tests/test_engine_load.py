"""Does a checkpoint of any format become the engine's state, or leave it as it was?"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed_truth
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from standin import SHAPES, Meeting, Standin, good, on_ranks, value, wholes
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

import reshard
from reshard.engine.data import Position, Samples
from reshard.engine.load import Loaded, load
from reshard.engine.save import save
from reshard.engine.state import NotAtSafePoint
from reshard.errors import CorruptError, InconsistentError, RequestError, ReshardError
from reshard.read import Reader


def put(folder: Path, P: int = 3, *, steps: int = 2, **made: Any) -> list[Standin]:
    def run(rank: int, meeting: Meeting) -> Standin:
        engine = Standin(rank, meeting, **made)
        for _ in range(steps):
            engine.step()
        save(engine, folder, client={"t": torch.arange(40_000), "at": (1, torch.ones(2))})
        return engine

    return good(on_ranks(P, run))


def take(folder: Path, P: int, **made: Any) -> tuple[list[Standin], list[Loaded]]:
    """Load on P ranks into engines that hold something else."""

    def run(rank: int, meeting: Meeting) -> tuple[Standin, Loaded]:
        engine = Standin(rank, meeting, seed=9, **made)
        engine.step()
        return engine, load(engine, folder)

    pairs = good(on_ranks(P, run))
    return [p[0] for p in pairs], [p[1] for p in pairs]


def same(a: list[Standin], b: list[Standin]) -> None:
    first, second = wholes(a), wholes(b)
    assert first.keys() == second.keys()
    for state, tensors in first.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, second[state][name]), (state, name)


@pytest.mark.parametrize("P", [1, 2, 4, 9])
def test_another_number_of_ranks(tmp_path: Path, P: int) -> None:
    first = put(tmp_path / "ck", frozen=("head",), buffers={"b": torch.arange(3.0)})
    # other flats too: the checkpoint's tensors are found by name
    second, loaded = take(
        tmp_path / "ck", P, frozen=("head",), per_flat=2, buffers={"b": torch.zeros(3)}
    )
    same(first, second)
    assert all(e.counters == first[0].counters for e in second)
    assert all(torch.equal(e.buffers["b"], torch.arange(3.0)) for e in second)
    assert torch.equal(loaded[0].client["t"], torch.arange(40_000))
    assert loaded[0].client["at"][0] == 1
    assert torch.equal(loaded[0].client["at"][1], torch.ones(2))
    assert loaded[0].left == ()
    for engine in (*first, *second):
        engine.step()
    same(first, second)


@settings(max_examples=15)
@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_any_shapes(
    tmp_path_factory: pytest.TempPathFactory,
    P: int,
    Q: int,
    shapes: list[tuple[int, ...]],
    before: int,
    after: int,
) -> None:
    folder = tmp_path_factory.mktemp("any") / "ck"
    named = {f"p{i}": shape for i, shape in enumerate(shapes)}
    first = put(folder, P, shapes=named, per_flat=before)
    second, _ = take(folder, Q, shapes=named, per_flat=after)
    same(first, second)
    shutil.rmtree(folder)


def test_converted_and_other_layouts(tmp_path: Path) -> None:
    """Stage 3's rule, and a replicated one."""
    first = put(tmp_path / "ck", frozen=("head",))
    for name, stage, world in (("three", 3, 5), ("one", 1, 4), ("none", 0, 2)):
        wanted = reshard.Wanted(world=world, stage=stage)
        reshard.convert(tmp_path / "ck", tmp_path / name, wanted)
        second, _ = take(tmp_path / name, 2, frozen=("head",))
        same(first, second)


def test_only_the_bytes_of_the_slices_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {f"w{i}": (61, 67) for i in range(6)}
    put(tmp_path / "ck", 4, shapes=shapes)
    read: list[int] = []
    plain = Reader._fetch

    def counted(self: Reader, file: int, offset: int, nbytes: int) -> memoryview:
        read.append(nbytes)
        return plain(self, file, offset, nbytes)

    monkeypatch.setattr(Reader, "_fetch", counted)
    for P in (1, 3, 8):
        read.clear()
        take(tmp_path / "ck", P, shapes=shapes)
        extra = (40_000 * 8 + 12_000) * P  # the client's tensor, and one random state
        needed = 3 * 4 * sum(a * b for a, b in shapes.values())
        assert needed <= sum(read) <= 1.02 * needed + extra


def test_parameters_that_were_never_stepped(tmp_path: Path) -> None:
    def run(rank: int, meeting: Meeting) -> Standin:
        engine = Standin(rank, meeting)
        engine.step(skip=("layers.0.b",))
        engine.step(skip=("layers.0.b", "embed"))
        save(engine, tmp_path / "ck")
        return engine

    first = good(on_ranks(3, run))
    second, loaded = take(tmp_path / "ck", 2)
    assert all(e.scalars("layers.0.b") is None for e in second)
    assert {float(s["step"]) for e in second if (s := e.scalars("embed"))} == {1.0}
    assert "optimizer state of 1 parameters: never stepped" in loaded[0].left
    same(first, second)


# -- other formats --------------------------------------------------------------------------------


def test_weights_alone(tmp_path: Path) -> None:
    tensors = {n: value(n, s).to(torch.bfloat16) for n, s in SHAPES.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    engines, loaded = take(tmp_path / "model.safetensors", 2)
    found = wholes(engines)
    assert found.keys() == {"master"}, "the optimizer begins anew"
    for name, tensor in tensors.items():
        if tensor.numel():
            assert torch.equal(found["master"][name], tensor.float().reshape(-1))
    assert "7 masters from param, widened from bfloat16 to float32" in loaded[0].taken
    assert any(line.startswith("optimizer state") for line in loaded[0].left)


def deepspeed_engine(case: Path) -> dict[str, Any]:
    """How to make an engine of the parameters of a fixture."""
    manifest = reshard.open_manifest(case / "ckpt")
    trained = [n for n, s in manifest.tensors if s == "master"]
    frozen = [n for n, s in manifest.tensors if s == "param" and n not in trained]
    shapes = {n: t.shape for (n, s), t in manifest.tensors.items() if s in ("master", "param")}
    kinds = {t.dtype.name for (_, s), t in manifest.tensors.items() if s == "buffer"}
    assert kinds <= {"float32", "int64", "bfloat16", "bool", "float16"}
    buffers = {
        n: torch.zeros(t.shape, dtype=getattr(torch, t.dtype.name))
        for (n, s), t in manifest.tensors.items()
        if s == "buffer"
    }
    second = [
        e.name for s in manifest.layout.spaces for g, es in s.in_groups().items() if g for e in es
    ]
    return {"shapes": shapes, "frozen": frozen, "buffers": buffers, "no_decay": second}


@pytest.mark.parametrize("P", [1, 3])
@pytest.mark.parametrize("name", ["z2_p4_bf16", "z3_p2_bf16_frozen_tied", "z1_p2_fp32"])
def test_deepspeed(fixtures_dir: Path, name: str, P: int) -> None:
    case = fixtures_dir / "deepspeed" / name
    made = deepspeed_engine(case)
    engines, loaded = take(case / "ckpt", P, **made)
    found = wholes(engines)
    aliases = reshard.open_manifest(case / "ckpt").aliases
    compared = 0
    for stem, key, expected in deepspeed_truth.truth(case):
        if key == "step":
            held = [e.scalars(name) for e in engines for name in made["shapes"]]
            steps = {float(one["step"]) for one in held if one}
            assert steps == set(expected.tolist())
            continue
        tensor, state = deepspeed_truth.key_of(stem, key, aliases)
        if state in found and tensor in found[state] and state != "param":
            ours = found[state][tensor].numpy()
            assert ours.tobytes() == expected.astype(np.float32).tobytes(), key
            compared += 1
    assert compared >= 3 * (len(made["shapes"]) - len(made["frozen"]))
    assert loaded[0].step == engines[0].counters["step"]
    for ours, theirs in zip(engines[0].groups, reshard.open(case / "ckpt").groups, strict=False):
        assert ours["lr"] == theirs.settings["lr"]
        assert ours["weight_decay"] == theirs.settings["weight_decay"]


# -- settings -------------------------------------------------------------------------------------


def test_settings_are_the_checkpoints_and_how_to_compute_is_ours(tmp_path: Path) -> None:
    def make(lr: float, fused: bool) -> Callable[..., Any]:
        return lambda groups: AdamW(groups, lr=lr, betas=(0.8, 0.99), fused=fused)

    put(tmp_path / "ck", optimizer=make(0.25, False))
    engines, _ = take(tmp_path / "ck", 2, optimizer=make(0.5, True))
    for group, decay in zip(engines[0].groups, (0.1, 0.0), strict=True):
        assert (group["lr"], group["betas"], group["fused"]) == (0.25, (0.8, 0.99), True)
        assert group["weight_decay"] == decay


def test_scheduler_and_position(tmp_path: Path) -> None:
    def write(rank: int, meeting: Meeting) -> Any:
        engine = Standin(rank, meeting)
        scheduler = StepLR(engine.optimizer, 2, gamma=0.5)
        samples = Samples(30, 2, rank=rank, world=2)
        for _ in range(3):
            samples.take()
            engine.step()
            scheduler.step()
        save(engine, tmp_path / "ck", scheduler=scheduler, data=samples)
        return scheduler.state_dict(), engine.groups

    def read(rank: int, meeting: Meeting) -> Any:
        engine = Standin(rank, meeting)
        scheduler = StepLR(engine.optimizer, 5, gamma=0.1)
        samples = Samples(30, 2, rank=rank, world=3)
        loaded = load(engine, tmp_path / "ck", scheduler=scheduler, data=samples)
        return scheduler.state_dict(), engine.groups, samples.position, loaded.position

    first = good(on_ranks(2, write))
    for state, groups, position, told in good(on_ranks(3, read)):
        assert state == first[0][0]
        assert groups == first[0][1]
        assert position == told == Position(12, 30)


# -- what doesn't fit -----------------------------------------------------------------------------


def refused(folder: Path, P: int = 2, *, kind: type[Exception] = RequestError, **made: Any) -> str:
    """Load on P ranks, which must fail and change nothing; the message."""
    settings = {k: made.pop(k) for k in ("scheduler", "data", "optimizer_too") if k in made}

    def run(rank: int, meeting: Meeting) -> str:
        engine = Standin(rank, meeting, seed=9, **made)
        engine.step()
        given = {k: v(engine) for k, v in settings.items()}
        before = engine.snapshot()
        rng = torch.get_rng_state()
        with pytest.raises(kind) as caught:
            load(engine, folder, **given)
        assert engine.snapshot() == before
        assert torch.equal(rng, torch.get_rng_state())
        return str(caught.value)

    return good(on_ranks(P, run))[0]


def test_everything_that_does_not_fit_is_told_at_once(tmp_path: Path) -> None:
    put(tmp_path / "ck")
    shapes = {**SHAPES, "embed": (4, 11), "new": (3,)}
    del shapes["head"]
    text = refused(tmp_path / "ck", shapes=shapes, buffers={"running": torch.zeros(2)})
    assert "master:embed is [11, 4] in the checkpoint and [4, 11] in the engine" in text
    assert "new isn't in the checkpoint" in text
    assert "the buffer running isn't in the checkpoint" in text
    assert "master:head isn't in the engine" in text


def test_another_optimizer(tmp_path: Path) -> None:
    put(tmp_path / "ck")
    text = refused(tmp_path / "ck", optimizer=lambda g: SGD(g, lr=0.1, momentum=0.9))
    assert "AdamW kept exp_avg_sq, and SGD with these settings doesn't" in text
    assert "SGD keeps momentum_buffer, which the checkpoint doesn't have" in text
    text = refused(tmp_path / "ck", optimizer=lambda g: Adam(g, amsgrad=True))
    assert "Adam keeps max_exp_avg_sq" in text

    def run(rank: int, meeting: Meeting) -> Loaded:
        engine = Standin(rank, meeting, optimizer=lambda g: SGD(g, lr=0.1, momentum=0.9))
        return load(engine, tmp_path / "ck", optimizer=False)

    assert "optimizer state and settings: they weren't asked for" in good(on_ranks(2, run))[0].left


def test_another_scheduler_or_other_data(tmp_path: Path) -> None:
    def write(rank: int, meeting: Meeting) -> None:
        engine = Standin(rank, meeting)
        save(engine, tmp_path / "ck", scheduler=StepLR(engine.optimizer, 2), data=Samples(30, 2))

    good(on_ranks(1, write))
    text = refused(tmp_path / "ck", scheduler=lambda e: CosineAnnealingLR(e.optimizer, 5))
    assert "isn't a CosineAnnealingLR" in text
    assert "30 samples" in refused(tmp_path / "ck", data=lambda e: Samples(31, 2))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("state", ["master", "exp_avg_sq", "client", "buffer"])
def test_a_flipped_bit_is_found(tmp_path: Path, state: str) -> None:
    buffers = {"b": torch.zeros(3)}
    put(tmp_path / "ck", buffers=buffers)
    array = next(p for p in (tmp_path / "ck").iterdir() if p.name.endswith(f".{state}"))
    flip(array / "c" / "0")
    refused(tmp_path / "ck", 3, kind=CorruptError, buffers=buffers)


def test_a_chunk_that_is_missing(tmp_path: Path) -> None:
    put(tmp_path / "ck")
    next((tmp_path / "ck").rglob("c/1")).unlink()
    assert "missing" in refused(tmp_path / "ck", kind=CorruptError)


def test_ranks_that_look_elsewhere(tmp_path: Path) -> None:
    put(tmp_path / "a")
    put(tmp_path / "b", steps=3)

    def run(rank: int, meeting: Meeting) -> None:
        load(Standin(rank, meeting), tmp_path / "ab"[rank])

    for error in on_ranks(2, run):
        assert isinstance(error, InconsistentError)


def test_in_the_middle_of_a_step(tmp_path: Path) -> None:
    put(tmp_path / "ck")

    def run(rank: int, meeting: Meeting) -> None:
        engine = Standin(rank, meeting)
        engine.busy = "a forward is under way" if rank else None
        load(engine, tmp_path / "ck")

    assert all(isinstance(e, NotAtSafePoint) for e in on_ranks(2, run))


def test_one_rank_that_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "ck")
    plain = Reader.region
    count = iter(range(1 << 30))

    def fail(self: Reader, *args: Any) -> Any:
        if next(count) == 7:
            raise MemoryError("no memory")
        return plain(self, *args)

    monkeypatch.setattr(Reader, "region", fail)

    def run(rank: int, meeting: Meeting) -> bool:
        engine = Standin(rank, meeting, seed=9)
        before = engine.snapshot()
        with pytest.raises((MemoryError, ReshardError), match="no memory"):
            load(engine, tmp_path / "ck")
        return engine.snapshot() == before

    assert on_ranks(3, run) == [True] * 3
