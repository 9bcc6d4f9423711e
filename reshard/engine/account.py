"""What does an engine say of its state, and how does it take a state back?

The side of the engine that saving and loading see: :class:`reshard.engine.state.Stateful`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from reshard.engine.flat import Flat
from reshard.engine.inner import default_store
from reshard.engine.state import Restored
from reshard.engine.stepping import refill

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from reshard.engine.core import Core
    from reshard.engine.data import Position, Samples
    from reshard.engine.load import Loaded
    from reshard.engine.snapshot import Running, Saving


class Account:
    """An engine's state; see :class:`reshard.engine.state.Stateful` for every member."""

    _core: Core
    _saving: Saving | None = None
    _store: Store | None = None
    _closed = False

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        client: Mapping[str, Any] | None = None,
        scheduler: Any = None,
        data: Samples | Position | None = None,
        blocking: bool = True,
        sync: bool = True,
        keep_last: int | None = None,
    ) -> Running:
        """Save everything between two steps; see :func:`reshard.engine.save.save`."""
        from reshard.engine.save import save

        return save(
            self,
            path,
            client=client,
            scheduler=scheduler,
            data=data,
            blocking=blocking,
            sync=sync,
            keep_last=keep_last,
        )

    def ready_to_save(self) -> None:
        """Touch the memory that a save with ``blocking=False`` copies into, in a thread.

        Call it after the first step, when the optimizer has its state. Without it the first such
        save takes that time from the training: new memory costs several times the copy. Ranks that
        write nothing (copies of slices) reserve nothing.
        """
        if self.replica == 0:
            parts = [p for f in self.flats for s in self.states(f) for p in self.parts(f, s)]
            self.saving.area.touch([tensor for _, tensor in parts])

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        scheduler: Any = None,
        data: Samples | None = None,
        optimizer: bool = True,
    ) -> Loaded:
        """Load a checkpoint of any format; see :func:`reshard.engine.load.load`."""
        from reshard.engine.load import load

        return load(self, path, scheduler=scheduler, data=data, optimizer=optimizer)

    @property
    def rank(self) -> int:
        """The number of this rank among all."""
        return self._core.ranks.all.rank

    @property
    def size(self) -> int:
        """How many ranks there are in all."""
        return self._core.ranks.all.size

    @property
    def pipeline(self) -> tuple[int, int]:
        """Which stage of a pipeline this is, of how many."""
        return self._core.ranks.part, self._core.ranks.parts

    @property
    def shard(self) -> int:
        """Which slice of every flat this rank owns; at stage 0 there is one, the whole."""
        return self._core.shard.rank if self.stage else 0

    @property
    def shards(self) -> int:
        """Over how many ranks flats are cut."""
        return self._core.shard.size if self.stage else 1

    @property
    def replica(self) -> int:
        """Which of the groups with all slices this rank belongs to."""
        return self._core.ranks.replica if self.stage else self._core.world.rank

    @property
    def stage(self) -> int:
        """0, 1, 2 or 3."""
        return self._core.stage

    @property
    def flats(self) -> Sequence[Flat]:
        """All flats, the same on every rank."""
        return [holding.flat for holding in self._core.holdings]

    @property
    def optimizer(self) -> Optimizer:
        """The user's optimizer, over pieces; for schedulers and settings."""
        return self._core.pieces.optimizer

    @property
    def groups(self) -> Sequence[Mapping[str, Any]]:
        """Settings of the parameter groups, without their parameters."""
        return self._core.pieces.groups

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """The buffers that belong to the model's state, by name."""
        state = self._core.module.state_dict(keep_vars=True)
        return {n: b for n, b in self._core.module.named_buffers() if n in state}

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tied names: alias to the name that a flat has."""
        return self._core.aliases

    @property
    def counters(self) -> Mapping[str, Any]:
        """Steps taken, and the loss scale with what decides when it grows."""
        core = self._core
        return {"step": core.steps, "micro_batches": core.micro_batches, **core.scale.state()}

    @property
    def store(self) -> Store:
        """Small values that all ranks see."""
        store = self._store
        if store is None:
            store = self._store = default_store()
        assert store is not None
        return store

    @property
    def saving(self) -> Saving:
        """Saves under way."""
        if self._saving is None:
            from reshard.engine.snapshot import Saving

            self._saving = Saving()
        return self._saving

    def unsafe(self) -> str | None:
        """Why this isn't a safe point, in a few words; ``None`` if it is one."""
        core = self._core
        if self._closed:
            return "the engine was closed"
        if core.busy:
            return core.busy
        if core.micro_batches or core.reducer.unsynced:
            return f"{core.micro_batches} micro-batches have been taken since the last step()"
        return None

    def exchange(self, data: Any, label: str) -> list[Any]:
        """What each of all ranks said, in rank order."""
        return self._core.ranks.all.exchange(data, label)

    def states(self, flat: Flat) -> Mapping[str, torch.dtype]:
        """States that this rank holds of a flat: ``master`` and the optimizer's, or ``param``."""
        holding = self._core.holding(flat)
        if not flat.trained:
            return {"param": holding.own.dtype}
        return {"master": holding.own.dtype, **self._core.pieces.states(flat)}

    def parts(self, flat: Flat, state: str) -> Sequence[tuple[int, Tensor]]:
        """What lies in this rank's slice: (first element there, 1-D tensor), in order."""
        if state in ("master", "param"):
            return [(0, self._core.holding(flat).own[: flat.part(self.shards)])]
        return self._core.pieces.parts(flat, state)

    def scalars(self, name: str) -> Mapping[str, Any] | None:
        """Optimizer state of a parameter that is one value; ``None`` if it has none here."""
        return self._core.pieces.scalars(name)

    def restore(self, restored: Restored) -> None:
        """Take a whole state; what isn't in it is as in a new engine."""
        core = self._core
        if core.residency is not None:
            core.residency.release_all()
        for holding in core.holdings:
            state = "master" if holding.flat.trained else "param"
            values = restored.slices.get(holding.flat.name, {}).get(state)
            if values is not None:
                holding.own[: values.numel()].copy_(values)
        core.pieces.restore(restored)
        if core.residency is None:
            refill(core, core.holdings)
        buffers = dict(core.module.named_buffers())
        with torch.no_grad():
            for name, value in restored.buffers.items():
                buffers[name].copy_(value)
        core.reducer.clear()
        core.micro_batches = 0
        core.steps = int(restored.counters.get("step", 0))
        core.scale.restore(
            float(restored.counters.get("loss_scale", core.precision.first_scale)),
            int(restored.counters.get("good_steps", 0)),
        )
