"""The tensors of a manifest, put together from the entries of its spaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard import manifest as manifest_module
from reshard.dtypes import dtype
from reshard.errors import InconsistentError
from reshard.layout import Entry, FlatSpace, Layout
from reshard.manifest import Manifest
from reshard.partition import Replicated


def made_of(*spaces: tuple[list[Entry], dict[str, str]]) -> Manifest:
    """A manifest without files."""
    made = tuple(
        FlatSpace(f"s{i}", tuple(entries), Replicated(1), {s: dtype(d) for s, d in kinds.items()})
        for i, (entries, kinds) in enumerate(spaces)
    )
    return Manifest("x", Path("/ckpt"), Layout(made, {}), (), {})


V, W = Entry("v", (2,)), Entry("w", (4, 3))


def test_places_in_the_order_of_the_spaces():
    found = made_of(
        ([V, W, W], {"master": "float32", "exp_avg": "bfloat16"}),
        ([W], {"master": "float32"}),
        ([W, V], {"param": "bfloat16"}),
    )
    assert {key: tensor.places for key, tensor in found.tensors.items()} == {
        ("v", "master"): ((0, 0),),
        ("w", "master"): ((0, 1), (0, 2), (1, 0)),
        ("v", "exp_avg"): ((0, 0),),
        ("w", "exp_avg"): ((0, 1), (0, 2)),
        ("w", "param"): ((2, 0),),
        ("v", "param"): ((2, 1),),
    }
    assert list(found.tensors) == [
        *(("v", "master"), ("w", "master"), ("v", "exp_avg"), ("w", "exp_avg")),
        *(("w", "param"), ("v", "param")),
    ]
    assert found.tensors["w", "exp_avg"].dtype.name == "bfloat16"
    assert found.nbytes == {"master": 4 * 14, "exp_avg": 2 * 14, "param": 2 * 14}


@pytest.mark.parametrize(
    ("other", "kind"), [(Entry("w", (3, 4)), "float32"), (Entry("w", (4, 3)), "float16")]
)
def test_entries_that_disagree(other, kind):
    found = made_of(([W], {"param": "float32"}), ([other], {"param": kind}))
    with pytest.raises(InconsistentError, match=r"param:w is float32 \[4, 3\] in one place and"):
        found.tensors  # noqa: B018 - it is put together when it is asked for


def test_replicas_are_gathered_once(monkeypatch):
    """A tensor in a thousand spaces: what is built along the way doesn't grow with its square."""
    built = []
    tensor, replace = manifest_module.Tensor, manifest_module.replace

    def counted(name, state, shape, kind, places):
        built.append(len(places))
        return tensor(name, state, shape, kind, places)

    def replaced(old, *, places):
        built.append(len(places))
        return replace(old, places=places)

    monkeypatch.setattr(manifest_module, "Tensor", counted)
    monkeypatch.setattr(manifest_module, "replace", replaced)
    found = made_of(*[([V, W], {"param": "float32"})] * 1000)
    assert [len(t.places) for t in found.tensors.values()] == [1000, 1000]
    assert sum(built) <= 2 * (1000 + 2)
