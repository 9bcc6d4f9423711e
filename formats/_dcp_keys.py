"""Which keys of a distributed checkpoint are the model's, which an optimizer's, and which neither?

DCP stores a flat dict of keys, each with its path in the nested dict that was saved. An
**optimizer** is where ``param_groups`` stand: nested (``optim / param_groups / 0 / lr``, ``optim /
state / <name> / exp_avg``), or flattened (``optim / param_groups.<name>.lr``, with
``flatten_optimizer_state_dict=True``); or where ``state`` stands alone, with names of tensors below
it. The **model** is where the optimizers' parameters stand.
Everything else is the training script's.

Source: torch 2.13, ``torch/distributed/checkpoint/state_dict.py`` (``_flatten_optim_state_dict``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from reshard.formats._dcp_metadata import Index, Path_

STATE, GROUPS = "state", "param_groups"
_FLAT = re.compile(r"(?:(.+?)\.)?(state|param_groups)\.(.+)")
_USUAL = ("model", "module", "state_dict", "model_state_dict")


@dataclass(slots=True)
class Optimizer:
    """The keys of an optimizer.

    Parameters
    ----------
    prefix
        Where it stands.
    flat
        Whether its dict was flattened: settings stand by parameter, and groups aren't told.
    state
        Parameter to state to key.
    settings
        Number of the group (the parameter's name, if flat) to the rest of the path, to key.
    """

    prefix: Path_
    flat: bool = False
    state: dict[str, dict[str, str]] = field(default_factory=dict)
    settings: dict[int | str, dict[Path_, str]] = field(default_factory=dict)

    @property
    def names(self) -> Iterable[str]:
        """The parameters that it has state or settings of."""
        named = self.settings if self.flat else {}
        return dict.fromkeys((*self.state, *(n for n in named if isinstance(n, str))))


@dataclass(frozen=True, slots=True)
class Keys:
    """All keys, sorted.

    Parameters
    ----------
    model
        Key to name of the model's tensors.
    prefix
        What the keys of the model begin with, ``""`` or text that ends with a dot.
    optimizers
        In order.
    others
        The training script's.
    """

    model: Mapping[str, str]
    prefix: str
    optimizers: tuple[Optimizer, ...]
    others: tuple[str, ...]


def sort_keys(index: Index) -> Keys:
    """Tell the keys of a checkpoint apart."""
    optimizers, left = _optimizers(index)
    tensors = [key for key in left if key in index.tensors]
    names = dict.fromkeys(n for o in optimizers for n in o.names)
    prefix = _model_prefix(tensors, names)
    model: dict[str, str] = {}
    if prefix is not None:
        model = {key: key[len(prefix) :] for key in tensors if key.startswith(prefix)}
        if not prefix and names:  # what stands deeper is the script's
            model = {k: n for k, n in model.items() if n in names or len(index.paths[k]) == 1}
    others = tuple(key for key in left if key not in model)
    return Keys(model, prefix or "", tuple(optimizers), others)


@dataclass(frozen=True, slots=True)
class _Part:
    """A path taken apart: an optimizer's prefix, ``state`` or ``param_groups``, and the rest."""

    prefix: Path_
    kind: str
    flat: bool
    rest: Path_


def _parts(path: Path_) -> Iterable[_Part]:
    """All readings of a path as a part of an optimizer."""
    for i, step in enumerate(path):
        if not isinstance(step, str):
            continue
        if step in (STATE, GROUPS) and i + 1 < len(path):
            yield _Part(path[:i], step, False, path[i + 1 :])
        elif (found := _FLAT.fullmatch(step)) is not None:
            above, kind, below = found.groups()
            prefix = path[:i] if above is None else (*path[:i], above)
            yield _Part(prefix, kind, True, (below, *path[i + 1 :]))


def _optimizers(index: Index) -> tuple[list[Optimizer], list[str]]:
    """The optimizers, and the keys that are none's."""
    found: dict[Path_, Optimizer] = {}
    for path in index.paths.values():
        for part in _parts(path):
            if part.kind == GROUPS and _is_setting(part):
                found.setdefault(part.prefix, Optimizer(part.prefix, part.flat))
    for prefix in _without_groups(index, found):
        found[prefix] = Optimizer(prefix)
    left = []
    for key, path in index.paths.items():
        for part in _parts(path):
            optimizer = found.get(part.prefix)
            if optimizer is not None and optimizer.flat == part.flat and _add(optimizer, part, key):
                break
        else:
            left.append(key)
    return list(found.values()), left


def _without_groups(index: Index, known: Iterable[Path_]) -> list[Path_]:
    """Where states of tensors stand without groups, as other libraries' optimizers have them."""
    names = {name for key in index.tensors for name in _tails(key)}
    fits: dict[Path_, bool] = {}
    for key, path in index.paths.items():
        for part in _parts(path):
            if part.kind == STATE and not part.flat and part.prefix and part.prefix not in known:
                fit = len(part.rest) == 2 and part.rest[0] in names and key in index.tensors
                fits[part.prefix] = fits.get(part.prefix, True) and fit
    return [prefix for prefix, fit in fits.items() if fit]


def _tails(key: str) -> Iterable[str]:
    """A key, and what follows each of its dots."""
    while key:
        yield key
        key = key.partition(".")[2]


def _is_setting(part: _Part) -> bool:
    if part.flat:
        return isinstance(part.rest[0], str) and "." in part.rest[0]
    return isinstance(part.rest[0], int) and len(part.rest) > 1


def _add(optimizer: Optimizer, part: _Part, key: str) -> bool:
    first = part.rest[0]
    if part.kind == GROUPS:
        if not _is_setting(part):
            return False
        if part.flat:
            name, _, setting = str(first).rpartition(".")
            optimizer.settings.setdefault(name, {})[setting, *part.rest[1:]] = key
        else:
            assert isinstance(first, int)
            optimizer.settings.setdefault(first, {})[part.rest[1:]] = key
        return True
    if part.flat:
        name, _, state = str(first).rpartition(".")
        steps: Path_ = (state, *part.rest[1:])
    else:
        name, steps = str(first), part.rest[1:]
    if not name or not steps:
        return False
    optimizer.state.setdefault(name, {})[".".join(map(str, steps))] = key
    return True


def _model_prefix(tensors: Iterable[str], names: Mapping[str, None]) -> str | None:
    """What stands before the model's names: ``None`` if there is no model."""
    usual = [f"{one}." for one in _USUAL]
    if not names:
        return next((p for p in usual if any(t.startswith(p) for t in tensors)), "")
    counts: dict[str, int] = {}
    for key in tensors:
        at = 0
        while True:  # every place where a name may begin
            if key[at:] in names:
                counts[key[:at]] = counts.get(key[:at], 0) + 1
            at = key.find(".", at) + 1
            if not at:
                break
    if not counts:
        return None
    most = max(counts.values())
    best = [prefix for prefix, count in counts.items() if count == most]
    return next((p for p in usual if p in best), best[0])
