"""Do the sums agree with what the source says of its bytes, and with each other?

Three proofs: each of the source's regions that was read has the checksum that was stored with
it; replicas of a tensor are equal, and equal to the digest that was recorded when it was written;
16-bit weights are the rounding of their masters.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reshard.digest import CRC64NVME
from reshard.errors import CorruptError, InconsistentError
from reshard.frames import Cover
from reshard.layout import TensorKey, key_text
from reshard.manifest import Manifest
from reshard.plan import Plan
from reshard.ruler import ints
from reshard.source import Fetcher
from reshard.store import EntryStore
from reshard.tally import ALGORITHMS, Tally


def to_read_again(plan: Plan, tally: Tally) -> list[int]:
    """The source's regions whose sum isn't complete, or isn't the one that was stored.

    Parts of them weren't copied, or were copied twice, or their bytes are damaged: only summing
    them from the first byte to the last can tell.
    """
    regions, sums = plan.source.regions, tally.source
    if regions.values is None:
        return []
    return [
        region
        for region in np.flatnonzero(tally.touched).tolist()
        if sums.covered[region] != sums.sizes[region]
        or sums.value(region) != int(regions.values[region])
    ]


def check_region(plan: Plan, region: int, fetcher: Fetcher, step: int) -> None:
    """Sum a region of the source anew, ``step`` bytes at a time.

    Raises
    ------
    CorruptError
        If its checksum isn't the one that was stored.
    """
    regions = plan.source.regions
    algorithm = ALGORITHMS[regions.algorithm]
    file, start = int(regions.files[region]), int(regions.offsets[region])
    size, found = int(regions.sizes[region]), 0
    for at in range(start, start + size, step):
        part = min(step, start + size - at)
        found = algorithm.of(fetcher.fetch(file, at, part), found)
        fetcher.reset()
        fetcher.release(file, at, at + part)
    assert regions.values is not None
    expected = int(regions.values[region])
    if found != expected:
        raise CorruptError(
            f"{regions.labels[region]} has the checksum {algorithm.hex(found)}, but "
            f"{algorithm.hex(expected)} was stored with it",
            where=plan.source.path(file),
            hint="its bytes have changed since it was written; use another copy of the file",
        )


def digests(plan: Plan, tally: Tally) -> dict[TensorKey, int]:
    """The digest of each tensor that was written, when all proofs hold.

    Raises
    ------
    InconsistentError
        If replicas differ, or weights aren't the rounding of their masters.
    CorruptError
        If a tensor hasn't the digest that the source recorded.
    """
    values = tally.messages.values().tolist()
    same = plan.join.same
    differing = [(k, some) for k, some in same if len({values[m] for m in some}) > 1]
    if differing:
        raise _differing(plan, values, differing)
    read = {key: values[some[0]] for key, some in same}
    for key, value in read.items():
        _check_recorded(plan, key, value)
    for message, key, parent in plan.derived:
        if values[message] != read[key]:
            raise InconsistentError(
                f"{key_text(key)} isn't {key_text(parent)} rounded to its type",
                where=plan.source.root,
                hint="weights and masters are of different moments, or one of them is damaged",
            )
    return {
        message.key: value
        for message, value in zip(plan.messages, values, strict=True)
        if message.written
    }


def _check_recorded(plan: Plan, key: TensorKey, value: int) -> None:
    stored = plan.source.digests.get(key)
    if stored is not None and stored != value:
        raise CorruptError(
            f"{key_text(key)} has the digest {CRC64NVME.hex(value)}, but "
            f"{CRC64NVME.hex(stored)} was recorded when it was written",
            where=plan.source.root,
        )


def _differing(
    plan: Plan, values: Sequence[int], differing: Sequence[tuple[TensorKey, Sequence[int]]]
) -> InconsistentError:
    """What to say of tensors whose replicas aren't equal: of the first one, where they lie."""
    key, messages = differing[0]
    files = _files(plan, messages)
    others = [f for f, m in zip(files, messages, strict=True) if values[m] != values[messages[0]]]
    text = (
        f"{key_text(key)} is stored several times, and its copies differ: "
        f"in {files[0]} it isn't what it is in {_some(others)}"
    )
    if len(differing) > 1:
        text += f"; so do those of {_some([key_text(k) for k, _ in differing[1:]])}"
    return InconsistentError(
        text,
        where=plan.source.root,
        hint="ranks have drifted apart or are of different runs; "
        "--replicas first takes the first copy of each",
    )


def _files(plan: Plan, messages: Sequence[int]) -> list[str]:
    """In which file of the source each message begins."""
    found: dict[int, str] = {}
    wanted = set(messages)
    for rows in (*plan.join.sources.values(), plan.join.read_only):
        for message, cover in zip(rows.message.tolist(), rows.covers, strict=True):
            some = wanted & {message, plan.messages[message].twin}
            found |= {m: _file(plan.source, cover) for m in some}
    return [found[message] for message in messages]


def _file(source: Manifest, cover: Cover) -> str:
    index, entry = cover.places[0]
    space = source.space(index)
    store = source.stores[space.name, cover.tensor.state]
    if isinstance(store, EntryStore):
        file = store.files[entry]
    else:
        _, pieces = space.ruler.locate(ints([entry]), ints([0]), ints([1]))
        file = store.files[store.split(pieces).multiple[0]]
    return source.path(int(file)).name


def _some(names: Sequence[str], most: int = 5) -> str:
    """Some of many, each once: ``a, b and 3 more``."""
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
