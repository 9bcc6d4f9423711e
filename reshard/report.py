"""What will a conversion do, and what did it do?

A :class:`Report` is made of a plan in closed form, before anything is read, and completed when
the bytes have been moved. It is what ``plan`` prints, what ``--json`` gives, and what scripts get.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from reshard.commit import Staging
from reshard.decoded import disk_for
from reshard.execute import LEAST_MEMORY, Options
from reshard.format import Draft
from reshard.manifest import Manifest
from reshard.plan import Plan
from reshard.side import Side, side


@dataclass(frozen=True, slots=True)
class Report:
    """What a conversion does.

    Parameters
    ----------
    source, target
        Both sides.
    moved, copied
        Tensors that are cut in another way, and tensors whose cuts stay.
    cast
        Tensors whose element type changes.
    padded
        Bytes of padding in the target.
    aliased
        Tied names, which are stored once.
    dropped
        ``(what, why)`` of all that the target won't hold.
    proved
        Tensors that are read only to be compared.
    peak_memory
        A bound on anonymous memory over what the imports take, in bytes.
    disk_needed, disk_free
        Bytes of the target, and free where it will stand; what an earlier run has left there is
        used or removed, so it counts as free.
    notes
        What the reader wants to say.
    done
        Whether it has been done; the rest is set only then.
    moved_bytes, resumed_bytes
        Bytes that were moved, and bytes that an earlier run had moved.
    """

    source: Side
    target: Side
    moved: int
    copied: int
    cast: int
    padded: int
    aliased: int
    dropped: tuple[tuple[str, str], ...]
    proved: int
    peak_memory: int
    disk_needed: int
    disk_free: int | None
    notes: tuple[str, ...] = ()
    done: bool = False
    seconds: float | None = None
    moved_bytes: int | None = None
    resumed_bytes: int | None = None
    regions_checked: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return asdict(self)


def report(plan: Plan, draft: Draft, target: Path, options: Options) -> Report:
    """Say what a plan will do."""
    moved, copied = _moved(plan)
    goal = side(draft.manifest)
    return Report(
        source=side(plan.source),
        target=goal,
        moved=moved,
        copied=copied,
        cast=len(draft.casts),
        padded=_padding(draft.manifest),
        aliased=len(draft.manifest.aliases),
        dropped=tuple((loss.what, loss.why) for loss in draft.losses),
        proved=len(plan.derived) + len(plan.copies_of),
        peak_memory=min(options.max_memory, LEAST_MEMORY + 4 * options.workers * options.step),
        disk_needed=goal.file_bytes + disk_for(f.nbytes for f in plan.source.files if f.decoder),
        disk_free=free_space(target),
        notes=tuple(f"{n.where}: {n.text}" for n in plan.source.notes),
    )


def free_space(target: Path) -> int | None:
    """Bytes free where a target would be written, those that leftovers of one take included."""
    for folder in (target, *target.absolute().parents):
        if folder.exists():
            return shutil.disk_usage(folder).free + Staging(target, single_file=False).occupied()
    return None


def _moved(plan: Plan) -> tuple[int, int]:
    """How many tensors are cut in another way, and how many stay as they were."""
    moved: set[tuple[str, str]] = set()
    everything = plan.target.tensors
    for key, tensor in everything.items():
        before = plan.source.tensors[plan.source_key(key)]
        if [_cut(plan.target, p) for p in tensor.places] != [
            _cut(plan.source, p) for p in before.places
        ]:
            moved.add(key)
    return len(moved), len(everything) - len(moved)


def _cut(manifest: Manifest, place: tuple[int, int]) -> tuple[object, ...]:
    """What says how an entry is cut: equal for two entries that are cut alike."""
    space = manifest.space(place[0])
    ruler, entry = space.ruler, place[1]
    size, phase, numel = (int(c[entry]) for c in (ruler.size, ruler.phase, ruler.numel))
    skip, phase = divmod(phase, size)
    first = space.rank(int(ruler.first[entry]) + skip)
    one = phase + numel <= size
    replicated = space.shards == 1
    region = space.entries[entry].region
    return (region, replicated, first, None if one else (size, phase, space.shard_step))


def _padding(manifest: Manifest) -> int:
    """Bytes of the target's shards that hold no element."""
    total = 0
    for space in manifest.layout.spaces:
        for state, dtype in space.states.items():
            store = manifest.stores[space.name, state]
            chunks = getattr(store, "chunk", None)
            if chunks is not None:
                total += (chunks * len(store.files) - space.numel) * dtype.bits // 8
    return total
