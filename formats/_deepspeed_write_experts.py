"""How are experts dealt out to the target's ranks, and in which files do their weights lie?

At the source's degree of expert parallelism a parameter group of experts stays what it is: each
block of experts is cut over fewer or more ranks. At another degree the blocks hold other experts,
and DeepSpeed makes other groups of them: it lists a rank's experts layer by layer, and begins a new
group where one would hold more than :data:`MOST` elements (``deepspeed/moe/utils.py``,
``split_params_into_different_moe_groups_for_optimizer``, of 0.19.8).

The 16-bit weights lie in a file an expert (``engine.py``, ``_save_moe_checkpoint``). There is no
optimizer file an expert with ZeRO: the experts' optimizer state lies in the ranks' own files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reshard.errors import IncompleteError, RequestError, UnsupportedError
from reshard.formats._deepspeed_experts import Expert, degree_of, with_degree
from reshard.formats._deepspeed_write_groups import unrotated
from reshard.formats._deepspeed_write_layers import Layer
from reshard.formats._torch_sheet import Local
from reshard.layout import BUFFER, MASTER, PARAM
from reshard.manifest import Manifest, ParamGroup
from reshard.plain import encode

MOST = 178956971
"""Elements of a rank's experts that DeepSpeed puts into one group."""


@dataclass(frozen=True, slots=True)
class Dealt:
    """A parameter group of experts as the target's ranks have it.

    Parameters
    ----------
    group
        Its settings.
    degree
        Into how many blocks experts are dealt out.
    blocks
        The parameters of each block, named as a rank names them.
    """

    group: ParamGroup
    degree: int
    blocks: tuple[tuple[Local, ...], ...]


def moe_layers(source: Manifest) -> dict[str, int]:
    """The MoE layers of a checkpoint in DeepSpeed's order, and how many experts each has.

    Raises
    ------
    UnsupportedError
        If there are experts, and the order of their layers isn't known.
    IncompleteError
        If an expert is missing.
    """
    found: dict[str, set[int]] = {}
    for name, state in source.tensors:
        expert = Expert.parse(name) if state in (PARAM, MASTER, BUFFER) else None
        if expert is not None:
            found.setdefault(expert.layer, set()).add(expert.index)
    if not found:
        return {}
    engine = source.objects.get("deepspeed")
    said = engine.get("moe_layers") if isinstance(engine, Mapping) else None
    order = [str(layer) for layer in said] if isinstance(said, (list, tuple)) else []
    if set(order) != set(found):
        raise UnsupportedError(
            "the checkpoint has experts, and doesn't say in which order their layers come",
            where=source.root,
            hint="convert from the original DeepSpeed checkpoint",
        )
    for layer, numbers in found.items():
        missing = set(range(len(numbers))) - numbers
        if missing:
            raise IncompleteError(f"expert {min(missing)} of {layer} is missing", where=source.root)
    return {layer: len(found[layer]) for layer in order}


def expert_files(
    counts: Mapping[str, int], params: Iterable[Local], buffers: Iterable[Local]
) -> tuple[Layer, ...]:
    """The files of all experts.

    Parameters
    ----------
    counts
        The MoE layers, in order.
    params, buffers
        Tensors of experts, by their names among all experts.
    """
    params_of, buffers_of = _by_expert(params), _by_expert(buffers)
    found = []
    for number, (layer, count) in enumerate(counts.items()):
        for index in range(count):
            path = f"layer_{number}_expert_{index}_mp_rank_00_model_states.pt"
            key = (layer, index)
            found.append(Layer(path, params_of.get(key, {}), buffers_of.get(key, {})))
    return tuple(found)


def _by_expert(some: Iterable[Local]) -> dict[tuple[str, int], dict[str, Local]]:
    found: dict[tuple[str, int], dict[str, Local]] = {}
    for local in some:
        expert = _expert(local)
        found.setdefault((expert.layer, expert.index), {})[local.name] = local
    return found


@dataclass(frozen=True, slots=True)
class Dealer:
    """Deals experts out to the target's ranks.

    Parameters
    ----------
    counts
        The MoE layers and how many experts each has.
    world
        The target's data-parallel world size.
    rotated
        To how many ranks the source's parameters were dealt out in turn; 0 if they weren't.
    wanted
        The degree that was asked for, if one was.
    """

    counts: Mapping[str, int]
    world: int
    rotated: int
    wanted: int | None = None

    def deal(self, groups: Sequence[tuple[ParamGroup, Sequence[Local]]]) -> list[Dealt]:
        """Deal out the parameter groups of experts.

        Parameters
        ----------
        groups
            Groups of experts that stand side by side, with their parameters. Those that are alike
            may come back as fewer or more.

        Raises
        ------
        RequestError
            If the degree of expert parallelism doesn't fit the world size or the experts.
        UnsupportedError
            If the groups that DeepSpeed would make at another degree can't be told.
        """
        found: list[Dealt] = []
        for run in _runs(groups):
            group = run[0][0]
            old = degree_of(group.settings)
            assert old is not None
            new = self._degree(old)
            parts = [self._blocks(params, old) for _, params in run]
            if new == old:
                found += [
                    Dealt(one, old, tuple(self._named(block, old) for block in blocks))
                    for (one, _), blocks in zip(run, parts, strict=True)
                ]
            else:
                settings = with_degree(group.settings, new)
                changed = ParamGroup(settings, group.scalars, group.optimizer)
                found += [Dealt(changed, new, b) for b in self._again(parts, old, new)]
        return found

    def _degree(self, old: int) -> int:
        """The degree of a group in the target."""
        new = old if self.wanted is None else self.wanted
        if new < 1 or self.world % new:
            raise RequestError(
                f"an expert-parallel degree of {new} doesn't fit {self.world} rank(s)",
                hint=f"choose a world size that {new} divides, or another degree (MoE's ep_size)",
            )
        for layer, count in self.counts.items():
            if count % new and new != old:
                raise RequestError(
                    f"an expert-parallel degree of {new} doesn't fit the {count} expert(s) of "
                    f"{layer}",
                    hint=f"choose a degree that divides {count}",
                )
        return new

    def _blocks(self, params: Sequence[Local], degree: int) -> list[tuple[Local, ...]]:
        """The parameters of each block of experts, in the user's order."""
        found: list[list[Local]] = [[] for _ in range(degree)]
        for local in params:
            expert = _expert(local)
            own, rest = divmod(self.counts.get(expert.layer, 0), degree)
            if rest or not own:
                raise UnsupportedError(
                    f"{local.name} is in a parameter group of expert-parallel degree {degree}, "
                    f"which doesn't fit the {self.counts.get(expert.layer, 0)} expert(s) of its "
                    "layer"
                )
            found[expert.index // own].append(local)
        some = [tuple(block) for block in found]
        if self.rotated:
            some = [unrotated(block, self.rotated // degree) for block in some]
        patterns = [[p.name for p in self._named(block, degree)] for block in some]
        if any(pattern != patterns[0] for pattern in patterns):
            raise UnsupportedError("the ranks of a parameter group train different experts")
        return some

    def _named(self, block: Sequence[Local], degree: int) -> tuple[Local, ...]:
        """A block's parameters, numbered as its ranks do."""
        found = []
        for local in block:
            expert = _expert(local)
            own = expert.at(expert.index % (self.counts[expert.layer] // degree))
            found.append(replace(local, name=str(own)))
        return tuple(found)

    # -- another degree -------------------------------------------------------------------------

    def _again(
        self, parts: Sequence[Sequence[tuple[Local, ...]]], old: int, new: int
    ) -> Iterator[tuple[tuple[Local, ...], ...]]:
        """The groups that DeepSpeed makes of some alike ones at another degree, as blocks."""
        sizes = [[p.numel for p in blocks[0]] for blocks in parts]
        merged = [list(blocks) for blocks in parts]
        if _split([n for some in sizes for n in some]) == [len(some) for some in sizes]:
            merged = [[sum((part[b] for part in parts), ()) for b in range(old)]]
        elif any(len(_split(some)) > 1 for some in sizes):
            raise UnsupportedError(
                f"a parameter group has more than {MOST} elements of experts on a rank, so that it "
                "can't be told which groups there are at another expert-parallel degree",
                hint=f"keep the degree of {old}",
            )
        for blocks in merged:
            dealt = self._dealt(blocks, old, new)
            begin = 0
            for length in _split([p.numel for p in dealt[0]]):
                yield tuple(block[begin : begin + length] for block in dealt)
                begin += length

    def _dealt(
        self, blocks: Sequence[Sequence[Local]], old: int, new: int
    ) -> list[tuple[Local, ...]]:
        """The experts of some blocks, dealt out at another degree, layer by layer."""
        layers: dict[str, dict[int, list[Local]]] = {}
        for local in (p for block in blocks for p in block):
            expert = _expert(local)
            layers.setdefault(expert.layer, {}).setdefault(expert.index, []).append(local)
        if self._order(layers, old) != [[p.name for p in block] for block in blocks]:
            raise UnsupportedError(
                "the experts of a parameter group don't come layer by layer, so that their order "
                "at another expert-parallel degree can't be told",
                hint=f"keep the degree of {old}",
            )
        of = {p.name: p for block in blocks for p in block}
        named = [[of[name] for name in block] for block in self._order(layers, new)]
        return [self._named(block, new) for block in named]

    def _order(
        self, layers: Mapping[str, Mapping[int, Sequence[Local]]], degree: int
    ) -> list[list[str]]:
        """Names of each block's parameters, layer by layer and expert by expert."""
        found = []
        for block in range(degree):
            names: list[str] = []
            for layer, experts in layers.items():
                rests = [_expert(p).rest for p in next(iter(experts.values()))]
                own = self.counts[layer] // degree
                mine = range(block * own, (block + 1) * own)
                names += [str(Expert(layer, index, rest)) for index in mine for rest in rests]
            found.append(names)
        return found


def _expert(local: Local) -> Expert:
    found = Expert.parse(local.entries[0].name)
    if found is None:
        raise UnsupportedError(f"{local.name} is in a parameter group of experts and is none")
    return found


def _runs(
    groups: Sequence[tuple[ParamGroup, Sequence[Local]]],
) -> list[list[tuple[ParamGroup, Sequence[Local]]]]:
    """Groups that come one after the other and are alike."""
    found: list[list[tuple[ParamGroup, Sequence[Local]]]] = []
    last: Any = None
    for one in groups:
        key = encode((dict(one[0].settings), dict(one[0].scalars), one[0].optimizer))
        if found and key == last:
            found[-1].append(one)
        else:
            found.append([one])
        last = key
    return found


def _split(numel: Sequence[int]) -> list[int]:
    """How many parameters each group has that DeepSpeed makes of a rank's experts."""
    found, count, size = [], 0, 0
    for n in numel:
        if count and size + n > MOST:
            found.append(count)
            count, size = 0, 0
        count, size = count + 1, size + n
    return [*found, count]
