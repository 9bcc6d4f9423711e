"""In what do two checkpoints differ, and by how much?

Tensors are compared by the digests of their bytes, whatever the layouts and formats. Those that
differ are read again, some elements of both at a time, to say how many elements differ, by how
much, and where. Parameter groups, tied names and the state that isn't tensors are compared as
plain data. How a checkpoint is cut over ranks is no difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from reshard.compare import Gap, Tolerance, gap
from reshard.describe import numbers, simple
from reshard.digests import survey, survey_nbytes
from reshard.errors import InconsistentError
from reshard.execute import Options
from reshard.layout import TensorKey, key_text
from reshard.manifest import Manifest
from reshard.pairs import Pair, pairs
from reshard.plain import encode, pointer
from reshard.read import Reader


@dataclass(frozen=True, slots=True)
class Changed:
    """A tensor that isn't the same in both.

    Parameters
    ----------
    tensor
        Its state and name.
    a, b
        Element type and shape on both sides.
    gap
        How its elements differ; ``None`` where they can't be compared one by one.
    """

    tensor: str
    a: str
    b: str
    gap: Gap | None


@dataclass(frozen=True, slots=True)
class Value:
    """A value that isn't a tensor and isn't the same in both.

    Parameters
    ----------
    place
        Where it stands, as a JSON pointer: ``/groups/0/settings/lr``.
    a, b
        The value in each, as JSON has it; ``None`` also where it is missing.
    """

    place: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs.

    Parameters
    ----------
    equal
        Tensors that are the same, bit for bit.
    close
        Tensors that aren't, but whose elements are within the tolerances.
    only_a, only_b
        Tensors that the other one doesn't have.
    changed
        Tensors that differ.
    values
        Settings, tied names and other state that differ.
    """

    equal: int
    close: tuple[Changed, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    changed: tuple[Changed, ...]
    values: tuple[Value, ...]

    @property
    def same(self) -> bool:
        """Whether nothing differs by more than the tolerances."""
        return not (self.only_a or self.only_b or self.changed or self.values)

    def to_json(self) -> dict[str, Any]:
        """The differences as JSON has them."""
        found: dict[str, Any] = simple({"same": self.same, **asdict(self)})
        return found


def diff(
    a: Manifest,
    b: Manifest,
    options: Options | None = None,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    weights: bool = False,
    recorded: bool = False,
) -> Difference:
    """Compare two checkpoints.

    Parameters
    ----------
    a, b
        The checkpoints, opened.
    options
        How to read.
    rtol, atol
        Elements are close if ``|a - b| <= atol + rtol * |b|``; NaN is close to NaN.
    weights
        Compare the weights only: see :func:`reshard.pairs.pairs`.
    recorded
        Where both have recorded a tensor's digest, believe it instead of reading the tensor.

    Raises
    ------
    ReshardError
        If a checkpoint can't be read, or its replicas differ, so that there is no one tensor
        to compare.
    """
    options = options or Options()
    found = pairs(a, b, weights=weights)
    digests_a, digests_b = _digests(a, b, options, recorded)
    reader_a, reader_b = Reader(a), Reader(b)
    tolerance = Tolerance(rtol, atol)
    equal = 0
    close: list[Changed] = []
    changed: list[Changed] = []
    for pair in found.both:
        alike = (pair.a.shape, pair.a.dtype) == (pair.b.shape, pair.b.dtype)
        if alike and digests_a[pair.a.key] == digests_b[pair.b.key]:
            equal += 1
            continue
        between = gap(reader_a, reader_b, pair, tolerance, options.max_memory)
        inside = alike and between is not None and between.outside == 0
        (close if inside else changed).append(_changed(pair, between))
    return Difference(
        equal=equal,
        close=tuple(close),
        only_a=tuple(map(key_text, found.only_a)),
        only_b=tuple(map(key_text, found.only_b)),
        changed=tuple(changed),
        values=() if weights else tuple(_values(a, b)),
    )


def diff_nbytes(a: Manifest, b: Manifest, recorded: bool = False) -> int:
    """How many bytes the progress of :func:`diff` adds up to."""
    if recorded and _all_recorded(a, b):
        return 0
    return survey_nbytes(a) + survey_nbytes(b)


def _all_recorded(a: Manifest, b: Manifest) -> bool:
    return all(m.tensors.keys() <= m.digests.keys() for m in (a, b))


def _digests(
    a: Manifest, b: Manifest, options: Options, recorded: bool
) -> tuple[Mapping[TensorKey, int], Mapping[TensorKey, int]]:
    if recorded and _all_recorded(a, b):
        return a.digests, b.digests
    return _computed(a, options), _computed(b, options)


def _computed(manifest: Manifest, options: Options) -> dict[TensorKey, int]:
    found = survey(manifest, options)
    for error in found.damaged:
        raise error
    for key, values in found.digests.items():
        if len(set(values)) > 1:
            raise InconsistentError(
                f"{key_text(key)} is stored {len(values)} times, and its copies differ",
                where=manifest.root,
                hint="`zreshard verify` lists all that is wrong with this checkpoint",
            )
    return {key: values[0] for key, values in found.digests.items()}


def _changed(pair: Pair, between: Gap | None) -> Changed:
    a, b = pair.a, pair.b
    name = key_text(a.key) if a.key == b.key else f"{key_text(a.key)} ({key_text(b.key)} in b)"
    return Changed(name, f"{a.dtype} {list(a.shape)}", f"{b.dtype} {list(b.shape)}", between)


# -- what isn't a tensor --------------------------------------------------------------------------


def _values(a: Manifest, b: Manifest) -> Iterator[Value]:
    """Everything in plain data that differs."""
    yield from _between("", _plain(a), _plain(b))
    yield from _between("/group_of", _membership(a), _membership(b))


def _plain(manifest: Manifest) -> dict[str, Any]:
    groups = [
        {"settings": dict(g.settings), "scalars": dict(g.scalars), "optimizer": g.optimizer}
        for g in manifest.groups
    ]
    document = {"groups": groups, "aliases": manifest.aliases, "objects": manifest.objects}
    return {key: encode(numbers(value)) for key, value in document.items()}


def _membership(manifest: Manifest) -> dict[str, int]:
    """The parameter group of each name that is in one."""
    return {
        entry.name: group
        for space in manifest.layout.spaces
        for group, entries in space.in_groups().items()
        for entry in entries
    }


def _between(place: str, a: Any, b: Any) -> Iterator[Value]:
    """The innermost places at which two JSON values differ."""
    if type(a) is type(b) and isinstance(a, dict) and "$array" not in a:
        for key in dict.fromkeys((*a, *b)):
            yield from _between(f"{place}/{pointer(key)}", a.get(key), b.get(key))
    elif type(a) is type(b) and isinstance(a, list) and len(a) == len(b):
        for index, pair in enumerate(zip(a, b, strict=True)):
            yield from _between(f"{place}/{index}", *pair)
    elif a != b or isinstance(a, bool) != isinstance(b, bool):
        yield Value(place, a, b)
