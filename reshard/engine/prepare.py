"""What is saved, and does it all fit together?

Every rank says what it has; all compare it, and know then what each of them will write.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.digest import CRC64NVME
from reshard.engine import manifest, random_state, stages
from reshard.engine.data import Position, Samples
from reshard.engine.manifest import ENGINE, Extras, Said
from reshard.engine.state import NotAtSafePoint
from reshard.engine.together import together
from reshard.engine.values import pack, raw
from reshard.engine.writer import Source
from reshard.errors import InconsistentError
from reshard.formats import native
from reshard.layout import Layout
from reshard.manifest import Manifest, ParamGroup
from reshard.plain import encode

if TYPE_CHECKING:
    from torch import Tensor

    from reshard.engine.state import Stateful


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """What is to be written.

    Parameters
    ----------
    slices
        The manifest of the flats alone, as every rank has it.
    first
        The index of the space of this rank's first flat.
    whole
        Rank 0: makes the whole manifest, and what it adds to the slices, of all random states and
        the other stages' buffers.
    rng
        This rank's random state.
    buffers
        What this rank sends of its stage's to rank 0.
    """

    slices: Manifest
    first: int
    whole: Callable[[Sequence[bytes], Sequence[Mapping[str, Tensor]]], tuple[Manifest, Extras]]
    rng: bytes
    buffers: Mapping[str, Tensor]


def prepare(
    engine: Stateful, target: Path, client: Any, scheduler: Any, data: Samples | Position | None
) -> Prepared:
    """Ask every rank what it has, and see that it all fits.

    Raises
    ------
    ReshardError
        If it doesn't.
    """
    rng = random_state.capture()
    tensors: dict[str, Tensor] = {}
    objects: dict[str, Any] = {}

    def say() -> dict[str, Any]:
        _check_safe(engine)
        plain, found = pack(client, "client")
        tensors.update(found)
        objects.update(_objects(engine, plain, scheduler, data))
        digest = None if client is None else _digest(plain, tensors)
        return asdict(manifest.say(engine, rng, digest, stages.describe(engine)))

    said = [Said(**one) for one in together(engine, "save: what is there", say)]
    _check_same(said)
    found = stages.stages(engine, said)
    every = [flat for stage in found for flat in stage.flats]
    scalars, unstepped = manifest.group_scalars(every, len(engine.groups), said)
    objects[ENGINE]["unstepped"] = unstepped
    groups = [
        ParamGroup(settings, values)
        for settings, values in zip(stages.settings(found), scalars, strict=True)
    ]
    aliases = {alias: name for stage in found for alias, name in stage.aliases.items()}
    flats = stages.layout(engine, found, said)
    # training goes on, and may change them
    buffers = {name: one.detach().clone() for name, one in engine.buffers.items()}
    tensors = {name: one.detach().clone() for name, one in tensors.items() if engine.rank == 0}

    def whole(
        rngs: Sequence[bytes], others: Sequence[Mapping[str, Tensor]]
    ) -> tuple[Manifest, Extras]:
        every = {name: one for some in (*reversed(others), buffers) for name, one in some.items()}
        more = manifest.extras(every, tensors, rngs, flats.world)
        layout = Layout((*flats.spaces, *more.spaces), flats.mesh, flats.stage)
        made = native.new_manifest(layout, target, groups=groups, aliases=aliases, objects=objects)
        native.check_fits(made)
        return made, more

    first = found[engine.pipeline[0]].first
    sent = buffers if engine.rank and stages.leads(engine) else {}
    return Prepared(native.new_manifest(flats, target), first, whole, rng, sent)


def _check_safe(engine: Stateful) -> None:
    why = engine.unsafe()
    if why is not None:
        raise NotAtSafePoint(
            f"this is the middle of a step ({why}), so nothing was saved",
            hint="save between the optimizer's step and the next forward",
        )


def _objects(
    engine: Stateful, client: Any, scheduler: Any, data: Samples | Position | None
) -> dict[str, Any]:
    import torch

    counters = dict(engine.counters)
    position = data.position if isinstance(data, Samples) else data
    kind = type(engine.optimizer)
    own = {
        "optimizer": f"{kind.__module__}.{kind.__qualname__}",
        "world": engine.shards,
        "ranks": engine.size,
        "counters": counters,
        "seed": torch.initial_seed(),
        "data": None if position is None else position.to_plain(),
        "scheduler": None if scheduler is None else type(scheduler).__name__,
    }
    state = None if scheduler is None else pack(dict(scheduler.state_dict()), "scheduler")[0]
    objects = {"step": counters.get("step"), "scheduler": state, "client": client, ENGINE: own}
    encode(objects)  # raises here what can't be plain data
    return objects


def _digest(plain: Any, tensors: Mapping[str, Tensor]) -> str:
    """Digest of the script's state."""
    crc = CRC64NVME.of(json.dumps(encode(plain), sort_keys=True).encode())
    for name in sorted(tensors):
        crc = CRC64NVME.of(raw(tensors[name]), crc)
    return CRC64NVME.hex(crc)


def _check_same(said: Sequence[Said]) -> None:
    first: dict[int, int] = {}
    for rank, one in enumerate(said):
        other = first.setdefault(one.pipeline, rank)
        if one.common != said[0].common or one.about != said[other].about:
            raise InconsistentError(
                "the ranks don't save the same: parameters, groups, stage or step differ",
                where=f"ranks {0 if one.common != said[0].common else other} and {rank}",
            )
        if one.client is not None and one.client != said[0].client:
            raise InconsistentError(
                "the client state differs between ranks, and one of them would be lost",
                where=f"ranks 0 and {rank}",
                hint="give what is the same everywhere, or gather it on rank 0 and give it there",
            )


def sources(engine: Stateful, prepared: Prepared, *, copy: bool) -> list[Source]:
    """The slices as bytes, copied where they may change or aren't in this memory."""
    if engine.replica:
        return []
    rows: list[tuple[int, str, list[tuple[int, Tensor]]]] = []
    flats = [flat for flat in engine.flats if flat.entries]
    for index, flat in enumerate(flats, prepared.first):
        for state in prepared.slices.space(index).states:
            held = engine.states(flat)
            parts = list(engine.parts(flat, state)) if state in held else []
            rows.append((index, state, parts))
    tensors = [tensor for _, _, parts in rows for _, tensor in parts]
    away = any(t.device.type != "cpu" for t in tensors)
    found = iter(engine.saving.area.copy(tensors) if copy or away else [raw(t) for t in tensors])
    return [
        Source(index, state, [(begin, next(found)) for begin, _ in parts])
        for index, state, parts in rows
    ]
