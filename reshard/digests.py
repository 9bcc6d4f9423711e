"""What do the bytes of a checkpoint add up to, read once and written nowhere?

The checkpoint is planned onto itself, so that each copy reads where it would write, and the copies
are read and digested but not written. A :class:`Survey` says what was found, and nothing stops at
the first damage: judging is for others (:mod:`reshard.verification`, :mod:`reshard.difference`).

A plan's target can't have strides, so tensors that are stored with strides are read as proofs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from reshard.copies import PROOF, Batch
from reshard.errors import CorruptError
from reshard.execute import Options, in_threads
from reshard.layout import FlatSpace, Layout, TensorKey
from reshard.manifest import NO_REGIONS, Manifest
from reshard.mover import Mover
from reshard.plan import Plan
from reshard.ruler import ints
from reshard.source import Fetcher, Mapped, Read, SourceFiles
from reshard.store import EntryStore
from reshard.tally import ALGORITHMS, Tally
from reshard.targets import TargetFiles
from reshard.verdict import check_region
from reshard.work import Queue, Work


@dataclass(frozen=True, slots=True)
class Rounding:
    """A tensor that should be another one, rounded to its element type.

    Parameters
    ----------
    key, parent
        The tensor, and the one that it is the rounding of.
    equal
        Whether it is.
    """

    key: TensorKey
    parent: TensorKey
    equal: bool


@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """What the bytes of a checkpoint add up to.

    Parameters
    ----------
    digests
        CRC-64/NVME of each tensor, one a replica: of one length where it is stored once.
    roundings
        Pairs that were compared.
    regions_checked
        How many stored checksums were compared.
    damaged
        What is wrong with each region whose bytes don't have the checksum that was stored.
    nbytes
        Bytes that were read.
    """

    digests: Mapping[TensorKey, tuple[int, ...]]
    roundings: tuple[Rounding, ...]
    regions_checked: int
    damaged: tuple[CorruptError, ...]
    nbytes: int


def survey_nbytes(manifest: Manifest) -> int:
    """How many bytes of tensors a survey reads: what its progress adds up to."""
    return sum(
        space.numel * dtype.bits // 8
        for space in manifest.layout.spaces
        for dtype in space.states.values()
    )


def survey(
    manifest: Manifest,
    options: Options | None = None,
    *,
    roundings: Sequence[tuple[TensorKey, TensorKey]] = (),
) -> Survey:
    """Read all payload of a checkpoint and digest it.

    Parameters
    ----------
    manifest
        The checkpoint.
    options
        How. By default files are read, not mapped: a disk that fails is then an error, where
        mapped memory would kill the process. Without ``verify`` no region is compared.
    roundings
        Pairs (tensor, from) to compare.

    Raises
    ------
    ReshardError
        If a file can't be read, has changed its size, or a tensor has a hole.
    """
    return _Survey(manifest, options or Options(), roundings).run()


class _Survey:
    def __init__(
        self,
        manifest: Manifest,
        options: Options,
        roundings: Sequence[tuple[TensorKey, TensorKey]],
    ) -> None:
        self._options = options
        target = _onto_itself(manifest)
        itself = [(key, key) for key in manifest.tensors if key not in target.tensors]
        self._plan = Plan(manifest, target, proofs=(*itself, *roundings))
        self._files = SourceFiles(manifest, memory=options.max_memory // 4)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._nbytes = 0
        self._damaged: dict[int, CorruptError] = {}

    def run(self) -> Survey:
        tally = self._read_all()
        regions = self._plan.source.regions
        check = self._options.verify and regions.values is not None
        if check:
            waiting = deque(_not_proved(self._plan, tally))
            workers = min(self._options.workers, len(waiting))
            in_threads([partial(self._sum_again, waiting)] * workers, self._stop)
        values = tally.messages.values().tolist()
        digests = {k: tuple(values[m] for m in same) for k, same in self._plan.join.same}
        return Survey(
            digests=digests,
            roundings=tuple(
                Rounding(key, parent, values[made] == digests[key][0])
                for made, key, parent in self._plan.derived
                if key != parent
            ),
            regions_checked=len(regions) if check else 0,
            damaged=tuple(self._damaged[r] for r in sorted(self._damaged)),
            nbytes=self._nbytes,
        )

    # -- reading ------------------------------------------------------------------------------

    def _fetcher(self) -> Fetcher:
        if self._options.read == "map":
            return Mapped(self._files)
        return Read(self._files, self._options.step)

    def _read_all(self) -> Tally:
        queue = Queue(self._plan, lambda _: None)
        readers = [self._reader(self._fetcher()) for _ in range(self._options.workers)]
        in_threads([partial(r.work, queue) for r in readers], self._stop)
        tally = readers[0].tally
        for reader in readers[1:]:
            tally.merge(reader.tally)
        tally.settle()
        return tally

    def _reader(self, fetcher: Fetcher) -> _Reader:
        nothing = TargetFiles(Path(), (), sync=False)
        mover = Mover(
            self._plan,
            nothing,
            self._files,
            fetcher,
            step=self._options.step,
            verify=self._options.verify,
        )
        return _Reader(self, self._plan, mover, fetcher, self._options.step)

    def stopped(self) -> bool:
        """Whether another thread has failed."""
        return self._stop.is_set()

    def done(self, nbytes: int) -> None:
        """Count bytes that were read."""
        with self._lock:
            self._nbytes += nbytes
        if self._options.progress is not None and nbytes:
            self._options.progress(nbytes)

    # -- regions that one pass didn't prove ---------------------------------------------------

    def _sum_again(self, waiting: deque[int]) -> None:
        fetcher = self._fetcher()
        while waiting and not self._stop.is_set():
            try:
                region = waiting.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                check_region(self._plan, region, fetcher, self._options.step)
            except CorruptError as error:
                self._damaged[region] = error


class _Reader:
    """One worker: digests batches and sums the padding between their pieces."""

    def __init__(
        self, survey_of: _Survey, plan: Plan, mover: Mover, fetcher: Fetcher, step: int
    ) -> None:
        self._survey = survey_of
        self._regions = plan.source.regions
        self._mover = mover
        self._fetcher = fetcher
        self._step = step
        self.tally = mover.tally

    def work(self, queue: Queue) -> None:
        """Work off batches until there are none."""
        work: Work | None = None
        while not self._survey.stopped():
            found = queue.next(work)
            if found is None:
                return
            work, batch = found
            kinds = (batch.source_dtype, batch.target_dtype)
            self._mover.move(Batch(PROOF, *kinds, batch.runs, batch.blocks))
            for offset, nbytes in zip(*(c.tolist() for c in batch.gaps), strict=True):
                self._pad(batch.target_file, offset, nbytes)
            queue.done(work)
            self._survey.done(batch.nbytes)

    def _pad(self, file: int, offset: int, nbytes: int) -> None:
        """Add padding to the sum of the region that it lies in, if it lies in one."""
        region = int(self._regions.find(ints([file]), ints([offset]))[0])
        if region < 0 or self._regions.values is None:
            return
        start = int(self._regions.offsets[region])
        nbytes = min(nbytes, start + int(self._regions.sizes[region]) - offset)
        algorithm, crc = ALGORITHMS[self._regions.algorithm], 0
        for at in range(offset, offset + nbytes, self._step):
            part = min(self._step, offset + nbytes - at)
            crc = algorithm.of(self._fetcher.fetch(file, at, part), crc)
            self._fetcher.reset()
        self.tally.source.add_one(region, offset - start, nbytes, crc)


def _onto_itself(manifest: Manifest) -> Manifest:
    """The checkpoint as a target: all spaces but those with a tensor that has strides."""
    spaces = manifest.layout.spaces
    left: set[TensorKey] = set()
    kept = list(spaces)
    lost = [space for space in spaces if _strided(manifest, space)]
    while lost:  # a tensor is planned onto itself with all of its places, or not at all
        left |= {key for space in lost for key in _keys(space)}
        kept = [space for space in kept if space not in lost]
        lost = [space for space in kept if not left.isdisjoint(_keys(space))]
    layout = Layout(tuple(kept), manifest.layout.mesh, manifest.layout.stage)
    return replace(manifest, layout=layout, digests={}, regions=NO_REGIONS)


def _strided(manifest: Manifest, space: FlatSpace) -> bool:
    stores = [manifest.stores[space.name, state] for state in space.states]
    return any(isinstance(s, EntryStore) and s.strides is not None for s in stores)


def _keys(space: FlatSpace) -> set[TensorKey]:
    return {(entry.name, state) for entry in space.entries for state in space.states}


def _not_proved(plan: Plan, tally: Tally) -> list[int]:
    """Regions that aren't covered by what was read, or whose sum isn't the stored one."""
    values, sums = plan.source.regions.values, tally.source
    assert values is not None
    covered = sums.covered == sums.sizes
    return [
        region
        for region in range(len(values))
        if not covered[region] or sums.value(region) != int(values[region])
    ]
