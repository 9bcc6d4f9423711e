"""Which tensors of two checkpoints are the same tensor?

Those with the same name and state, and a name that is tied in one checkpoint stands for the one
that is stored there. Where only **weights** count, one tensor a name does, whatever its state: a
file of whole weights calls fp32 masters ``param``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from reshard.layout import BUFFER, MASTER, PARAM, TensorKey
from reshard.manifest import Manifest, Tensor

WEIGHTS = (MASTER, PARAM, BUFFER)
"""States that can be a weight of the model, best first."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor of one checkpoint and the tensor that it is in the other."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class Pairs:
    """The tensors of two checkpoints, told apart.

    Parameters
    ----------
    both
        Tensors that are in both.
    only_a, only_b
        Tensors that are in one of them.
    """

    both: tuple[Pair, ...]
    only_a: tuple[TensorKey, ...]
    only_b: tuple[TensorKey, ...]


def pairs(a: Manifest, b: Manifest, *, weights: bool = False) -> Pairs:
    """Find the pairs of two checkpoints.

    Parameters
    ----------
    a, b
        The checkpoints.
    weights
        Compare one tensor a name: of the states that are weights, the best that both have in one
        element type, else the best of each. Optimizer state and client tensors don't count.
    """
    found = _pairs_of_weights(a, b) if weights else _pairs_of_keys(a, b)
    both = {(p.a.key, p.b.key): p for p in found}
    seen_a, seen_b = {p.a.key for p in found}, {p.b.key for p in found}
    if weights:
        names_a, names_b = {k[0] for k in seen_a}, {k[0] for k in seen_b}
        rest_a = _first_of_names(a, names_a)
        rest_b = _first_of_names(b, names_b)
    else:
        rest_a = [k for k in a.tensors if k not in seen_a]
        rest_b = [k for k in b.tensors if k not in seen_b]
    return Pairs(tuple(both.values()), tuple(rest_a), tuple(rest_b))


def _pairs_of_keys(a: Manifest, b: Manifest) -> list[Pair]:
    found = [_meet(t, b.tensors, a.aliases, b.aliases) for t in a.tensors.values()]
    turned = [_meet(t, a.tensors, b.aliases, a.aliases) for t in b.tensors.values()]
    return [
        *(Pair(t, o) for t, o in zip(a.tensors.values(), found, strict=True) if o is not None),
        *(Pair(o, t) for t, o in zip(b.tensors.values(), turned, strict=True) if o is not None),
    ]


def _meet(
    tensor: Tensor,
    others: Mapping[TensorKey, Tensor],
    own: Mapping[str, str],
    theirs: Mapping[str, str],
) -> Tensor | None:
    """The tensor of the other checkpoint that has the name, or the name that stands for it."""
    name, state = tensor.key
    same = others.get((name, state))
    if same is not None:
        return same
    tied = [theirs[name]] if name in theirs else []
    tied += [alias for alias, stored in own.items() if stored == name]
    return next((others[n, state] for n in tied if (n, state) in others), None)


def _pairs_of_weights(a: Manifest, b: Manifest) -> list[Pair]:
    in_a, in_b = _by_name(a), _by_name(b)
    found = []
    for name in dict.fromkeys((*in_a, *in_b)):
        some_a = in_a.get(name) or in_a.get(a.aliases.get(name, ""))
        some_b = in_b.get(name) or in_b.get(b.aliases.get(name, ""))
        if some_a and some_b:
            alike = (Pair(x, y) for x in some_a for y in some_b if x.dtype == y.dtype)
            found.append(next(alike, Pair(some_a[0], some_b[0])))
    return found


def _by_name(manifest: Manifest) -> dict[str, list[Tensor]]:
    """The weights of each name, best first."""
    found: dict[str, list[Tensor]] = {}
    for state in WEIGHTS:
        for (name, its_state), tensor in manifest.tensors.items():
            if its_state == state:
                found.setdefault(name, []).append(tensor)
    return found


def _first_of_names(manifest: Manifest, seen: Iterable[str]) -> list[TensorKey]:
    known = set(seen)
    return [some[0].key for name, some in _by_name(manifest).items() if name not in known]
