"""An engine that only holds state, and ranks that are threads: for tests of saving and loading.

It fulfils the protocol that saving and loading ask for, with the engine's own flats, and steps its
pieces with made-up gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from reshard.engine.flat import Flat, lay
from reshard.engine.snapshot import Saving
from reshard.engine.state import Restored

Shapes = Mapping[str, tuple[int, ...]]

SHAPES = {
    "embed": (11, 4), "layers.0.w": (5, 7), "layers.0.b": (5,), "layers.1.w": (3, 3, 2),
    "layers.1.scale": (), "empty": (0, 3), "head": (4, 11),
}  # fmt: skip
NO_DECAY = ("layers.0.b", "layers.1.scale")


class Meeting:
    """What P threads share: a place to exchange data, and a store."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.store = HashStore()
        self._barrier = threading.Barrier(size)
        self._said: list[Any] = [None] * size

    def exchange(self, rank: int, data: Any) -> list[Any]:
        import json

        self._said[rank] = json.dumps(data)
        self._barrier.wait(60)
        found = [json.loads(s) for s in self._said]
        self._barrier.wait(60)
        return found

    def abort(self) -> None:
        self._barrier.abort()


def on_ranks(size: int, function: Callable[[int, Meeting], Any]) -> list[Any]:
    """Call a function on each of P threads; results in rank order, or the error of each rank."""
    meeting = Meeting(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = function(rank, meeting)
        except Exception as error:  # noqa: BLE001 - given back in its rank's place
            results[rank] = error
            if isinstance(error, (AssertionError, threading.BrokenBarrierError)):
                meeting.abort()

    threads = [threading.Thread(target=run, args=(r,)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def good(results: Sequence[Any]) -> list[Any]:
    """The results, none of which is an error."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return list(results)


def value(name: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """A tensor's values, a function of its name."""
    rng = np.random.default_rng([seed, *name.encode()])
    return torch.from_numpy(np.asarray(rng.normal(size=shape), np.float32))


class Standin:
    """See the module."""

    stage = 3
    pipeline = (0, 1)

    def __init__(
        self,
        rank: int,
        meeting: Meeting,
        *,
        shapes: Shapes = SHAPES,
        frozen: Sequence[str] = (),
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        dtype: torch.dtype = torch.float32,
        per_flat: int = 3,
        no_decay: Sequence[str] = NO_DECAY,
        replicas: int = 1,
        seed: int = 0,
        aliases: Mapping[str, str] | None = None,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.rank, self.size, self._meeting = rank, meeting.size, meeting
        self.shards = meeting.size // replicas
        self.shard, self.replica = rank % self.shards, rank // self.shards
        self.store, self.saving = meeting.store, Saving()
        self.aliases = dict(aliases or {})
        self.buffers = dict(buffers or {})
        self.counters: dict[str, Any] = {"step": 0, "micro_batches": 0, "loss_scale": 1.0}
        self.busy: str | None = None
        self.flats = flats_of(shapes, frozen, per_flat, no_decay)
        self._dtype = dtype
        self._own: dict[str, Tensor] = {}
        self._pieces: dict[str, tuple[Flat, Any, torch.nn.Parameter]] = {}
        groups: list[dict[str, Any]] = [
            {"params": [], "weight_decay": 0.1},
            {"params": [], "weight_decay": 0.0},
        ]
        for flat in self.flats:
            own = self._own[flat.name] = torch.zeros(flat.part(self.shards), dtype=dtype)
            for piece in flat.pieces(self.shard, self.shards):
                entry = flat.entries[piece.entry]
                count = piece.high - piece.low
                run = value(entry.name, entry.shape, seed).reshape(-1)
                own[piece.low : piece.high] = run[piece.start : piece.start + count]
                if flat.trained:
                    parameter = torch.nn.Parameter(own[piece.low : piece.high])
                    self._pieces[entry.name] = (flat, piece, parameter)
                    groups[entry.group]["params"].append(parameter)
        self.optimizer = optimizer(groups)

    def step(self, skip: Sequence[str] = ()) -> None:
        self.counters["step"] += 1
        shapes = {e.name: e.shape for flat in self.flats for e in flat.entries}
        for name, (_, piece, parameter) in self._pieces.items():
            gradient = value(name, shapes[name], self.counters["step"] + 1000).reshape(-1)
            run = gradient[piece.start : piece.start + piece.high - piece.low]
            parameter.grad = None if name in skip else run.to(parameter.dtype)
        self.optimizer.step()

    # -- the protocol -----------------------------------------------------------------------------

    def exchange(self, data: Any, label: str) -> list[Any]:
        return self._meeting.exchange(self.rank, data)

    def unsafe(self) -> str | None:
        return self.busy

    @property
    def groups(self) -> list[dict[str, Any]]:
        return [
            {k: v for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]

    def states(self, flat: Flat) -> dict[str, torch.dtype]:
        found = {"master" if flat.trained else "param": self._dtype}
        for name in (e.name for e in flat.entries if e.name in self._pieces):
            parameter = self._pieces[name][2]
            for key, one in self.optimizer.state.get(parameter, {}).items():
                if isinstance(one, Tensor) and one.shape == parameter.shape:
                    found[key] = one.dtype
        return found

    def parts(self, flat: Flat, state: str) -> list[tuple[int, Tensor]]:
        if state in ("master", "param"):
            return [(0, self._own[flat.name])]
        return [
            (piece.low, self.optimizer.state[parameter][state])
            for of, piece, parameter in self._pieces.values()
            if of is flat and state in self.optimizer.state.get(parameter, {})
        ]

    def scalars(self, name: str) -> dict[str, Any] | None:
        if name not in self._pieces or not self.optimizer.state.get(self._pieces[name][2]):
            return None
        parameter = self._pieces[name][2]
        state = self.optimizer.state[parameter]
        return {k: v for k, v in state.items() if getattr(v, "shape", None) != parameter.shape}

    def restore(self, restored: Restored) -> None:
        for name, states in restored.slices.items():
            self._own[name].copy_(states["master" if "master" in states else "param"])
        self.optimizer.state.clear()
        for name, (flat, piece, parameter) in self._pieces.items():
            if name in restored.scalars:
                self.optimizer.state[parameter] = dict(restored.scalars[name])
                for key, one in restored.slices[flat.name].items():
                    if key != "master":
                        self.optimizer.state[parameter][key] = one[piece.low : piece.high]
        for group, settings in zip(self.optimizer.param_groups, restored.groups, strict=False):
            group.update(settings)
        for name, buffer in restored.buffers.items():
            self.buffers[name].copy_(buffer)
        self.counters.update(restored.counters)

    # -- what tests look at -----------------------------------------------------------------------

    def snapshot(self) -> dict[str, bytes]:
        """Every bit of the state, by a text that says what it is."""
        found: dict[str, bytes] = {}
        for flat in self.flats:
            for piece in flat.pieces(self.shard, self.shards):
                name = flat.entries[piece.entry].name
                own = self._own[flat.name][piece.low : piece.high]
                found[f"{name}@{piece.start}"] = own.detach().numpy().tobytes()
        for name, (_, _, parameter) in self._pieces.items():
            for key, one in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}/{key}"] = np.asarray(one).tobytes()
        found["groups"] = repr(self.groups).encode()
        found["counters"] = repr(self.counters).encode()
        found["buffers"] = repr({k: v.tolist() for k, v in self.buffers.items()}).encode()
        return found

    def whole(self) -> dict[str, dict[str, Tensor]]:
        """This rank's pieces: state to name to (a whole tensor, NaN where others own it)."""
        found: dict[str, dict[str, Tensor]] = {}
        for flat in self.flats:
            for piece in flat.pieces(self.shard, self.shards):
                entry = flat.entries[piece.entry]
                run = slice(piece.start, piece.start + piece.high - piece.low)
                for state in self.states(flat):
                    for begin, one in self.parts(flat, state):
                        low = piece.low - begin
                        if low >= 0 and low + piece.high - piece.low <= one.numel():
                            full = torch.full((entry.numel,), float("nan"), dtype=one.dtype)
                            full[run] = one.detach()[low : low + piece.high - piece.low]
                            found.setdefault(state, {})[entry.name] = full
        return found


def flats_of(
    shapes: Shapes, frozen: Sequence[str], per_flat: int, no_decay: Sequence[str]
) -> list[Flat]:
    """Flats of some parameters each; those without weight decay are group 1."""
    found = []
    for trained in (True, False):
        names = [n for n in shapes if (n not in frozen) == trained]
        for low in range(0, len(names), per_flat):
            some = [(n, tuple(shapes[n]), int(n in no_decay)) for n in names[low : low + per_flat]]
            kind = "" if trained else ".frozen"
            found.append(lay(f"unit{low}.float32{kind}", some, "float32", trained))
    return found


def wholes(engines: Sequence[Standin]) -> dict[str, dict[str, Tensor]]:
    """The state of all ranks put together: state to name to flat tensor."""
    found: dict[str, dict[str, Tensor]] = {}
    for engine in engines:
        for state, tensors in engine.whole().items():
            for name, part in tensors.items():
                mine = found.setdefault(state, {}).setdefault(name, part.clone())
                here = ~part.isnan()
                mine[here] = part[here]
    return found
