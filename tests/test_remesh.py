"""Another degree of tensor parallelism: how tensors are cut, and that every bit arrives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from oracle import Side

import reshard
from reshard.api import convert
from reshard.box import Box
from reshard.conversion import Wanted
from reshard.dtypes import dtype
from reshard.errors import RequestError, UnsupportedError
from reshard.execute import Options
from reshard.layout import Entry, FlatSpace, Layout
from reshard.manifest import Manifest
from reshard.partition import Contiguous
from reshard.remesh import remeshed

QUICK = Options(sync=False)
CASE = "tp2dp2_z1_bf16"


def manifest(ranks: list[list[Entry]], mesh: dict[str, int] | None = None) -> Manifest:
    states = {"param": dtype("float32")}
    spaces = tuple(
        FlatSpace(f"g.tensor{i}", tuple(entries), Contiguous(2), states, {"tensor": i}, 0)
        for i, entries in enumerate(ranks)
    )
    sizes = {"shard": 2, "tensor": len(ranks), **(mesh or {})}
    return Side(Layout(spaces, sizes)).lay_plainly().manifest(Path("/ckpt"))


def rows(low: int, high: int, name: str = "w") -> Entry:
    return Entry(name, (12, 4), Box((low, 0), (high, 4)))


def columns(low: int, high: int) -> Entry:
    return Entry("c", (3, 12), Box((0, low), (3, high)))


def held(found: Manifest) -> list[list[tuple[str, Box | None]]]:
    return [[(e.name, e.box) for e in space.entries] for space in found.layout.spaces]


WHOLE = Entry("n", (5,))
TWO = manifest([[rows(0, 6), columns(0, 6), WHOLE], [rows(6, 12), columns(6, 12), WHOLE]])


def test_each_tensor_is_cut_in_the_dim_in_which_it_was():
    found = remeshed(TWO, {"tensor": 3})
    assert found.layout.mesh == {"shard": 2, "tensor": 3}
    assert [space.coords for space in found.layout.spaces] == [{"tensor": i} for i in range(3)]
    assert held(found) == [
        [("w", rows(4 * i, 4 * i + 4).box), ("c", columns(4 * i, 4 * i + 4).box), ("n", None)]
        for i in range(3)
    ]


def test_one_rank_holds_whole_tensors():
    found = remeshed(TWO, {"tensor": 1})
    assert found.layout.mesh == {"shard": 2}
    assert held(found) == [[("w", None), ("c", None), ("n", None)]]


def test_parts_stacked_in_one_tensor_are_cut_part_by_part():
    ranks = [[rows(0, 3), rows(6, 9)], [rows(3, 6), rows(9, 12)]]
    found = remeshed(manifest(ranks), {"tensor": 3})
    assert held(found)[1] == [("w", rows(2, 4).box), ("w", rows(8, 10).box)]


def test_what_stays_as_it_is():
    assert remeshed(TWO, {}) is TWO
    assert remeshed(TWO, {"tensor": 2, "pipeline": 1, "shard": 7}) is TWO


@pytest.mark.parametrize(
    ("source", "mesh", "why"),
    [
        (TWO, {"tensor": 5}, r"w \[12, 4\] can't be cut over tensor=5: 12 isn't a multiple"),
        (TWO, {"pipeline": 2}, "pipeline=2 can't be made: the source has 1, and layers don't"),
        (TWO, {"replicate": 2}, "replicate=2 can't be made: replicas hold the same state"),
        (manifest([[WHOLE]]), {"tensor": 2}, "nothing says along which dim"),
    ],
)
def test_refused(source, mesh, why):
    with pytest.raises(RequestError, match=why):
        remeshed(source, mesh)


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        (
            [[Entry("w[tensor=0]", (6, 4))], [Entry("w[tensor=1]", (6, 4))]],
            "hold different tensors",
        ),
        ([[rows(0, 4)], [rows(6, 12)]], "the parts of w don't stand side by side"),
        ([[rows(6, 12)], [rows(0, 6)]], "the parts of w don't stand side by side"),
    ],
)
def test_parts_that_do_not_fit(ranks, why):
    with pytest.raises(UnsupportedError, match=why):
        remeshed(manifest(ranks), {"tensor": 4})


def test_axes_and_options_that_disagree(golden_dir: Path, tmp_path: Path):
    source = golden_dir / "z2_p4_bf16" / "ckpt"
    for wanted, why in (
        (Wanted(mesh={"shard": 8}, world=4), "the mesh says shard=8 and --to says 4"),
        (Wanted(mesh={"shards": 8}), "a mesh has no axis 'shards'"),
        (Wanted(mesh={"shard": 0}), "an axis shard of size 0 makes no sense"),
        (Wanted(mesh={"expert": 2}, format="dcp"), "the format dcp would have expert=1"),
    ):
        with pytest.raises(RequestError, match=why):
            convert(source, tmp_path / "no", wanted, QUICK)
    convert(source, tmp_path / "eight", Wanted(mesh={"shard": 8}), QUICK)
    assert reshard.open(tmp_path / "eight").world == 8


def _arrays(path: Path) -> dict[Any, bytes]:
    found = reshard.open(path)
    return {key: found[key].numpy().tobytes() for key in found.manifest.tensors}


@pytest.mark.parametrize("format", ["deepspeed", "native"])
@pytest.mark.parametrize("degree", [1, 3])
def test_deepspeed_at_another_degree(fixtures_dir: Path, tmp_path: Path, format: str, degree: int):
    """Bit for bit, and back again at the first degree where the ranks still know their parts."""
    source = fixtures_dir / "deepspeed" / CASE / "ckpt"
    wanted = Wanted(mesh={"shard": 3, "tensor": degree}, stage=2, format=format)
    convert(source, tmp_path / "made", wanted, QUICK)
    found = reshard.open(tmp_path / "made")
    assert dict(found.manifest.layout.mesh).get("tensor", 1) == degree
    assert _arrays(tmp_path / "made") == _arrays(source)
    if degree == 1:
        return
    back = Wanted(mesh={"shard": 2, "tensor": 2}, stage=1, format="deepspeed")
    convert(tmp_path / "made", tmp_path / "back", back, QUICK)
    assert _arrays(tmp_path / "back") == _arrays(source)
    there, again = (reshard.open(p).objects["deepspeed"] for p in (source, tmp_path / "back"))
    assert again["universal_checkpoint_info"] == there["universal_checkpoint_info"]
