"""Is a checkpoint whole to the last byte, and does another one hold the same tensors?

All payload is read. Each byte range with a stored checksum is compared with it, each tensor with
its recorded digest, replicas with each other, and 16-bit weights with their masters. **Against**
another checkpoint every tensor is proved equal by digests that are computed from the bytes of
both, whatever their layouts and formats: neither one's own records are trusted.

Everything that is wrong is listed; nothing is raised for damage that was found.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from reshard.digest import CRC64NVME
from reshard.digests import Survey, survey
from reshard.errors import CorruptError, InconsistentError, ReshardError
from reshard.execute import Options
from reshard.layout import MASTER, PARAM, TensorKey, key_text
from reshard.manifest import Manifest
from reshard.pairs import pairs


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found in one checkpoint.

    Parameters
    ----------
    path, format
        Which one.
    tensors, nbytes
        How many tensors were read (one a name and state), and their bytes, replicas too.
    checksums
        Stored checksums of byte ranges that were compared.
    digests
        Tensors whose recorded digest was compared.
    replicas
        Tensors that are stored several times, compared with each other.
    roundings
        Tensors that were compared with the masters that they are the rounding of.
    unproved
        Tensors of which nothing is recorded: no checksum, no digest.
    problems
        All that is wrong, as errors that weren't raised.
    seconds
        How long it took.
    """

    path: str
    format: str
    tensors: int
    nbytes: int
    checksums: int
    digests: int
    replicas: int
    roundings: int
    unproved: int
    problems: tuple[ReshardError, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """The findings as plain data."""
        problems = [
            {"kind": p.kind, "what": p.what, "where": p.where, "hint": p.hint}
            for p in self.problems
        ]
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {"ok": self.ok, **fields, "problems": problems}


@dataclass(frozen=True, slots=True)
class Proof:
    """What comparing two checkpoints by the digests of their bytes came to.

    Parameters
    ----------
    equal
        How many tensors are the same in both.
    different
        (tensor, why) of tensors that are in both and aren't the same.
    only_here, only_there
        Tensors that the other one doesn't have.
    """

    equal: int
    different: tuple[tuple[str, str], ...]
    only_here: tuple[str, ...]
    only_there: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether both hold the same tensors."""
        return not (self.different or self.only_here or self.only_there)

    def to_json(self) -> dict[str, Any]:
        """The proof as plain data."""
        return {"same": self.same, **asdict(self)}


def verify(manifest: Manifest, options: Options | None = None) -> Verified:
    """Read all of a checkpoint and check whatever it can be checked against.

    Parameters
    ----------
    manifest
        The checkpoint, opened.
    options
        How to read.

    Raises
    ------
    ReshardError
        If a file can't be read at all.
    """
    return _verified(manifest, options or Options())[0]


def verify_against(
    manifest: Manifest,
    other: Manifest,
    options: Options | None = None,
    *,
    weights: bool = False,
) -> tuple[Verified, Verified, Proof]:
    """Verify two checkpoints, and compare the digests of their tensors.

    Parameters
    ----------
    manifest, other
        The checkpoints, opened.
    options
        How to read.
    weights
        Compare the weights only: see :func:`reshard.pairs.pairs`.

    Returns
    -------
    here, there, proof
        The findings in each, and the comparison. A damaged checkpoint is compared as it is.
    """
    options = options or Options()
    here, ours = _verified(manifest, options)
    there, theirs = _verified(other, options)
    found = pairs(manifest, other, weights=weights)
    different: list[tuple[str, str]] = []
    for pair in found.both:
        a, b = pair.a, pair.b
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            why = f"is {a.dtype} {list(a.shape)} here and {b.dtype} {list(b.shape)} there"
        elif ours.digests[a.key] and ours.digests[a.key][0] != theirs.digests[b.key][0]:
            mine, other_one = ours.digests[a.key][0], theirs.digests[b.key][0]
            why = f"has the digest {CRC64NVME.hex(mine)} here and {CRC64NVME.hex(other_one)} there"
        else:
            continue
        different.append((_names(a.key, b.key), why))
    proof = Proof(
        equal=len(found.both) - len(different),
        different=tuple(different),
        only_here=tuple(map(key_text, found.only_a)),
        only_there=tuple(map(key_text, found.only_b)),
    )
    return here, there, proof


def _names(a: TensorKey, b: TensorKey) -> str:
    return key_text(a) if a == b else f"{key_text(a)} ({key_text(b)} there)"


def _verified(manifest: Manifest, options: Options) -> tuple[Verified, Survey]:
    begin = time.perf_counter()
    pairs_of_weights = [
        ((name, PARAM), (name, MASTER))
        for name, state in manifest.tensors
        if state == PARAM and (name, MASTER) in manifest.tensors
    ]
    found = survey(manifest, options, roundings=pairs_of_weights)
    regions = manifest.regions
    sealed = len(regions) > 0 and regions.values is not None
    verified = Verified(
        path=str(manifest.root),
        format=manifest.format,
        tensors=len(found.digests),
        nbytes=found.nbytes,
        checksums=found.regions_checked,
        digests=sum(key in manifest.digests for key in found.digests),
        replicas=sum(len(values) > 1 for values in found.digests.values()),
        roundings=len(found.roundings),
        unproved=0 if sealed else sum(key not in manifest.digests for key in found.digests),
        problems=(*found.damaged, *_problems(manifest, found)),
        seconds=time.perf_counter() - begin,
    )
    return verified, found


def _problems(manifest: Manifest, found: Survey) -> Iterator[ReshardError]:
    for key, values in found.digests.items():
        if len(set(values)) > 1:
            yield InconsistentError(
                f"{key_text(key)} is stored {len(values)} times, and its copies differ",
                where=manifest.root,
                hint="ranks have drifted apart or are of different runs",
            )
        stored = manifest.digests.get(key)
        if stored is not None and stored not in values:
            yield CorruptError(
                f"{key_text(key)} has the digest {CRC64NVME.hex(values[0])}, but "
                f"{CRC64NVME.hex(stored)} was recorded when it was written",
                where=manifest.root,
                hint="its bytes have changed since; use another copy of the checkpoint",
            )
    for rounding in found.roundings:
        if not rounding.equal:
            yield InconsistentError(
                f"{key_text(rounding.key)} isn't {key_text(rounding.parent)} rounded to its type",
                where=manifest.root,
                hint="weights and masters are of different moments, or one of them is damaged",
            )
