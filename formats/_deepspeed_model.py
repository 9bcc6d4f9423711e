"""Where do weights, buffers and frozen parameters lie in the model files?

Stages 0 to 2: whole tensors in ``module`` (views of one flat buffer). Stage 3: buffers only, once
a rank; parameters are empty placeholders, and frozen ones lie in ``frozen_param_fragments``,
``ceil(n / P)`` elements a rank. Pipelines keep a file a layer, experts a file each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from reshard.builder import Builder, Placed
from reshard.dtypes import dtype
from reshard.errors import CorruptError, InconsistentError
from reshard.formats._deepspeed_experts import Expert
from reshard.formats._deepspeed_load import Checkpoint, Loaded, expert_in, load_one
from reshard.formats._deepspeed_optimizer import shapes_of
from reshard.formats._deepspeed_tensor import TensorRules
from reshard.formats._torch import placed
from reshard.layout import BUFFER, PARAM, Entry, FlatSpace
from reshard.partition import PerTensor
from reshard.store import ShardStore
from reshard.stored import StoredTensor


@dataclass(slots=True)
class Model:
    """Adds the tensors of the model files to a builder."""

    builder: Builder
    checkpoint: Checkpoint
    rules: TensorRules
    trained: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def add(self) -> None:
        """Add everything."""
        for mp in self.checkpoint.mps:
            loaded = self.checkpoint.models[mp, 0]
            if loaded.data.get("param_shapes") is not None:
                for group in shapes_of(loaded):
                    self.trained.update(group)
            self._aliases(self.checkpoint.models[mp, 0])
        if self.checkpoint.stage == 3:
            self._stage3()
            return
        for mp in self.checkpoint.mps:
            loaded = self.checkpoint.models[mp, 0]
            module = loaded.data.get("module")
            if isinstance(module, Mapping):
                self._module(loaded, module, mp)
            self._copies_of_frozen(loaded, mp)
        self._layers()
        self._experts()

    # -- which is which -----------------------------------------------------------------------

    def _aliases(self, loaded: Loaded) -> None:
        shared = loaded.data.get("shared_params")
        if not isinstance(shared, Mapping):
            return
        for alias, name in shared.items():
            self.builder.aliases[str(alias)] = str(name)

    def _state(self, loaded: Loaded, name: str) -> str:
        buffers = loaded.data.get("buffer_names")
        return BUFFER if isinstance(buffers, (list, tuple)) and name in buffers else PARAM

    def _coords(self, mp: int) -> dict[str, int]:
        tensor = self.checkpoint.tensor
        return {"tensor": mp % tensor} if tensor > 1 else {}

    # -- stages 0 to 2 ------------------------------------------------------------------------

    def _module(self, loaded: Loaded, module: Mapping[Any, Any], mp: int) -> None:
        rows: dict[str, list[Placed]] = {PARAM: [], BUFFER: []}
        copies: list[Placed] = []
        for name, tensor in self._tensors(loaded, module):
            whole = self.builder.aliases.get(name)
            state = self._state(loaded, name)
            for one in self._placed(loaded, name, tensor, mp, state):
                if whole is None:
                    rows[state].append(one)
                elif not self._same_place(module.get(whole), tensor):
                    entry = Entry(whole, one.entry.shape, one.entry.box)
                    copies.append(Placed(entry, one.dtype, one.file, one.offset, one.strides))
        for state, some in rows.items():
            self.builder.add_placed(f"{state}.mp{mp}", state, some, coords=self._coords(mp))
        coords = {**self._coords(mp), "replicate": 1}
        self.builder.add_placed(f"tied.mp{mp}", PARAM, copies, coords=coords)

    @staticmethod
    def _same_place(stored: object, alias: StoredTensor) -> bool:
        """Whether a tied name is a view of the very bytes that the stored name is."""
        return isinstance(stored, StoredTensor) and (
            (stored.storage.key, stored.offset) == (alias.storage.key, alias.offset)
        )

    def _tensors(
        self, loaded: Loaded, module: Mapping[Any, Any]
    ) -> Iterator[tuple[str, StoredTensor]]:
        for key, value in module.items():
            if isinstance(value, StoredTensor):
                yield str(key), value
            elif value is not None:
                self.builder.note(
                    "left-out", f"a value in the module of {loaded.path.name}", f"module/{key}"
                )

    def _placed(
        self, loaded: Loaded, name: str, tensor: StoredTensor, mp: int, state: str
    ) -> list[Placed]:
        expected = self.trained.get(name)
        if expected is not None and tensor.shape != expected:
            what = "a placeholder without data" if tensor.shape == (0,) else "another shape"
            raise InconsistentError(
                f"{name} is {list(tensor.shape)} in the module and {list(expected)} in "
                f"param_shapes: {what}",
                where=loaded.path,
                hint="the weights aren't in this file",
            )
        entries = [Entry(name, tensor.shape)]
        if state == PARAM:
            entries = self.rules.entries(name, tensor.shape, self._coords(mp).get("tensor", 0))
        one = placed(self.builder, loaded.file, tensor, entries[0])
        found = []
        offset = one.offset
        for entry in entries:
            if len(entries) > 1 and one.strides is not None:
                raise InconsistentError(f"{name} is cut in pieces and has strides", where=name)
            found.append(Placed(entry, one.dtype, one.file, offset, one.strides))
            offset += one.dtype.nbytes(entry.numel)
        return found

    def _copies_of_frozen(self, loaded: Loaded, mp: int) -> None:
        """Stage 2 stores frozen parameters twice: the second time is a replica."""
        fragments = loaded.data.get("frozen_param_fragments")
        if not isinstance(fragments, Mapping):
            return
        coords = {**self._coords(mp), "replicate": 2}
        rows = [
            one
            for name, tensor in self._tensors(loaded, fragments)
            for one in self._placed(loaded, name, tensor, mp, PARAM)
        ]
        stored = {e.name for s in self.builder.spaces if PARAM in s.states for e in s.entries}
        known = [r for r in rows if r.entry.name in stored]
        only = [r for r in rows if r.entry.name not in stored]
        self.builder.add_placed(f"frozen.mp{mp}", PARAM, known, coords=coords)
        self.builder.add_placed(f"frozen_only.mp{mp}", PARAM, only, coords=self._coords(mp))

    # -- pipelines and experts ----------------------------------------------------------------

    def _layers(self) -> None:
        tied = {n: s for n, s in self.trained.items() if n.startswith("tied_modules.")}
        buffers = {
            str(b)
            for m in self.checkpoint.models.values()
            for b in (m.data.get("buffer_names") or ())
        }
        seen: set[tuple[str, int]] = set()
        for (layer, tensor), path in self.checkpoint.names.layers.items():
            loaded = load_one(path, tensor, 0)
            rows: dict[tuple[str, int], list[Placed]] = {}
            for rest, stored in self._tensors(loaded, loaded.data):
                name = self._layer_name(layer, rest, stored, tied)
                state = BUFFER if name in buffers else PARAM
                replica = int((name, tensor) in seen)
                seen.add((name, tensor))
                for one in self._placed(loaded, name, stored, tensor, state):
                    rows.setdefault((state, replica), []).append(one)
            for (state, replica), some in rows.items():
                coords = {**self._coords(tensor), **({"replicate": layer + 1} if replica else {})}
                name = f"{state}.layer{layer}.{tensor}.{replica}"
                self.builder.add_placed(name, state, some, coords=coords)

    def _layer_name(
        self, layer: int, rest: str, stored: StoredTensor, tied: Mapping[str, tuple[int, ...]]
    ) -> str:
        """A layer's file names tensors without the layer; tied modules have names of their own."""
        name = f"{layer}.{rest}"
        if name in self.trained:
            return name
        fits = [n for n in tied if n.split(".", 2)[2:] == [rest] and tied[n] == stored.shape]
        return fits[0] if len(fits) == 1 else name

    def _experts(self) -> None:
        shapes: dict[tuple[str, str], set[tuple[int, ...]]] = {}
        for name, shape in self.trained.items():
            if (own := Expert.parse(name)) is not None:
                shapes.setdefault((own.layer, own.rest), set()).add(shape)
        buffers = {
            (own.layer, own.rest)
            for model in self.checkpoint.models.values()
            for name in model.data.get("buffer_names") or ()
            if (own := Expert.parse(str(name))) is not None
        }
        for (layer, expert, mp), loaded in self.checkpoint.experts.items():
            rows: dict[str, list[Placed]] = {PARAM: [], BUFFER: []}
            for name, tensor in self._tensors(loaded, loaded.data):
                found = expert_in(loaded, name, expert)
                key = found.layer, found.rest
                expected = shapes.get(key, {tensor.shape})
                if tensor.shape not in expected:
                    raise InconsistentError(
                        f"{name} is {list(tensor.shape)} and should be {list(expected.pop())}",
                        where=loaded.path,
                    )
                state = BUFFER if key in buffers else PARAM
                rows[state] += self._placed(loaded, name, tensor, mp, state)
            for state, some in rows.items():
                at = f"{state}.layer{layer}.expert{expert}.mp{mp}"
                self.builder.add_placed(at, state, some, coords=self._coords(mp))

    # -- stage 3 ------------------------------------------------------------------------------

    def _stage3(self) -> None:
        for (mp, dp), loaded in self.checkpoint.models.items():
            module = loaded.data.get("module")
            if not isinstance(module, Mapping):
                raise CorruptError("holds no 'module'", where=loaded.path)
            rows: dict[str, list[Placed]] = {BUFFER: [], PARAM: []}
            for name, tensor in self._tensors(loaded, module):
                state = self._state(loaded, name)
                if state == PARAM and tensor.shape == (0,) and tensor.shape != self._shape(name):
                    self._expect_elsewhere(loaded, name)
                    continue
                if state == PARAM and name in self.builder.aliases:
                    continue
                rows[state] += self._placed(loaded, name, tensor, mp, state)
            coords = {**self._coords(mp), **({"replicate": dp} if dp else {})}
            for state, some in rows.items():
                self.builder.add_placed(f"{state}.mp{mp}.dp{dp}", state, some, coords=coords)
        for mp in self.checkpoint.mps:
            self._fragments(mp)

    def _shape(self, name: str) -> tuple[int, ...] | None:
        return self.trained.get(name)

    def _expect_elsewhere(self, loaded: Loaded, name: str) -> None:
        """A placeholder must stand for data that lies in another file."""
        frozen = loaded.data.get("frozen_param_shapes") or {}
        whole = self.builder.aliases.get(name, name)
        if whole not in self.trained and whole not in frozen:
            raise InconsistentError(
                f"{name} is an empty placeholder, and its data is nowhere",
                where=loaded.path,
                hint="it is neither in param_shapes nor in frozen_param_shapes",
            )

    def _fragments(self, mp: int) -> None:
        world = self.checkpoint.world
        shapes = self.checkpoint.models[mp, 0].data.get("frozen_param_shapes") or {}
        for index, (key, value) in enumerate(shapes.items()):
            name, shape = str(key), tuple(value)
            files, offsets, kinds = [], [], set()
            for dp in range(world):
                loaded = self.checkpoint.models[mp, dp]
                fragments = loaded.data.get("frozen_param_fragments") or {}
                tensor = fragments.get(name)
                expected = -(-Entry(name, shape).numel // world)
                if not isinstance(tensor, StoredTensor) or tensor.numel != expected:
                    count = tensor.numel if isinstance(tensor, StoredTensor) else "no"
                    raise InconsistentError(
                        f"the fragment of the frozen {name} has {count} elements on rank {dp} "
                        f"and should have {expected}",
                        where=loaded.path,
                    )
                one = placed(self.builder, loaded.file, tensor, Entry(name, tensor.shape))
                files.append(one.file)
                offsets.append(one.offset)
                kinds.add(tensor.dtype)
            if len(kinds) != 1:
                raise InconsistentError(
                    f"fragments of the frozen {name} are {sorted(kinds)}",
                    where=self.checkpoint.names.root,
                )
            space = FlatSpace(
                name=f"frozen{index}.mp{mp}",
                entries=(Entry(name, shape),),
                partition=PerTensor(world),
                states={PARAM: dtype(kinds.pop())},
                coords=self._coords(mp),
            )
            store = ShardStore.per_shard(space.ruler.part, files, offsets)
            self.builder.add(space, {PARAM: store})
