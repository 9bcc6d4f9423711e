"""Do the sums agree with what the source says of its bytes, and with each other?

Three proofs: each of the source's regions that was read has the checksum that was stored with
it; replicas of a tensor are equal, and equal to the digest that was recorded when it was written;
16-bit weights are the rounding of their masters.
"""

from __future__ import annotations

import numpy as np

from reshard.digest import CRC64NVME
from reshard.errors import CorruptError, InconsistentError
from reshard.layout import TensorKey, key_text
from reshard.plan import Plan
from reshard.source import Fetcher
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
    values = tally.messages.values()
    read = {key: _equal(plan, key, [int(values[m]) for m in same]) for key, same in plan.join.same}
    for message, key, parent in plan.derived:
        if int(values[message]) != read[key]:
            raise InconsistentError(
                f"{key_text(key)} isn't {key_text(parent)} rounded to its type",
                where=plan.source.root,
                hint="weights and masters are of different moments, or one of them is damaged",
            )
    return {
        message.key: int(value)
        for message, value in zip(plan.messages, values, strict=True)
        if message.written
    }


def _equal(plan: Plan, key: TensorKey, values: list[int]) -> int:
    """The digest of a source tensor, its replicas proved equal."""
    if any(v != values[0] for v in values):
        raise InconsistentError(
            f"{key_text(key)} is stored several times, and its copies differ",
            where=plan.source.root,
            hint="ranks have drifted apart or are of different runs; "
            "--replicas first takes the first copy of each",
        )
    stored = plan.source.digests.get(key)
    if stored is not None and stored != values[0]:
        raise CorruptError(
            f"{key_text(key)} has the digest {CRC64NVME.hex(values[0])}, but "
            f"{CRC64NVME.hex(stored)} was recorded when it was written",
            where=plan.source.root,
        )
    return values[0]
