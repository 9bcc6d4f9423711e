"""How are parameter groups laid out for Q ranks, so that DeepSpeed's own engine would have done so?

Stages 1 and 2: one flat space a group, each parameter followed by its alignment padding, the tail
padded to a multiple of 2 x Q; with ``round_robin_gradients`` the order of the parameters depends
on Q. (For a group of experts Q are the ranks that hold the same ones.) Stage 3: a group is cut in
sub-groups whose ends depend on Q, and each parameter in Q parts
(``deepspeed/runtime/zero/stage_1_and_2.py``: ``__init__``, ``_round_robin_reorder``, and
``stage3.py``: ``_create_fp16_sub_groups``, of 0.19.8).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from reshard.dtypes import DType
from reshard.errors import CorruptError
from reshard.formats._deepspeed_experts import Topology, data_first
from reshard.formats._torch_sheet import Local
from reshard.layout import FlatSpace
from reshard.partition import Contiguous, Partition, PerTensor
from reshard.ruler import Ints

SUB_GROUP_SIZE = 10**9
"""DeepSpeed's default for ``zero_optimization.sub_group_size``."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides how groups are laid out.

    Parameters
    ----------
    stage, world
        Of the target.
    round_robin
        Whether parameters are dealt out to the ranks in turn (stages 1 and 2).
    align
        Elements to whose multiples parameters are aligned (stages 1 and 2).
    sub_group_size
        Elements of a rank at which a sub-group ends (stage 3).
    tail_on_last
        Whether the last rank's padding is counted as a whole, and not cut off masters
        (BF16_Optimizer).
    data_first
        Whether ranks with the same experts stand side by side.
    """

    stage: int
    world: int
    round_robin: bool = False
    align: int = 1
    sub_group_size: int = SUB_GROUP_SIZE
    tail_on_last: bool = False
    data_first: bool = False

    @classmethod
    def of(
        cls, config: Mapping[str, Any], stage: int, world: int, itemsize: int, bf16_optimizer: bool
    ) -> Rules:
        """The rules of a DeepSpeed configuration.

        Parameters
        ----------
        config
            The configuration.
        stage, world
            Of the target.
        itemsize
            Bytes of an element of the model.
        bf16_optimizer
            Whether BF16_Optimizer resumes, which knows neither rotation nor alignment.
        """
        experts = data_first(config)
        if bf16_optimizer:
            return cls(stage, world, tail_on_last=True, data_first=experts)
        found = config.get("zero_optimization")
        zero: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
        size = zero.get("sub_group_size", SUB_GROUP_SIZE)
        if isinstance(size, bool) or not isinstance(size, (int, float)) or size < 1:
            raise CorruptError(f"zero_optimization.sub_group_size is {size!r:.80}")
        return cls(
            stage,
            world,
            round_robin=bool(zero.get("round_robin_gradients")) and stage < 3,
            align=16 // math.gcd(16, itemsize) if zero.get("parameter_alignment") else 1,
            sub_group_size=int(size),
            data_first=experts,
        )


@dataclass(frozen=True)
class Flat:
    """A flat group of the target (at stage 3: a sub-group).

    Parameters
    ----------
    space
        Its flat space.
    params
        Its parameters in the order in which they lie.
    order
        For each of them, its place among the parameters of the group as the user gave them.
    group
        Index of its parameter group.
    """

    space: FlatSpace
    params: tuple[Local, ...]
    order: tuple[int, ...]
    group: int

    def shard(self, rank: int) -> int | None:
        """The shard that a data-parallel rank has; ``None`` if it has other experts."""
        shard, rest = divmod(rank - self.space.shard_start, self.space.shard_step)
        return shard if rest == 0 and 0 <= shard < self.space.shards else None

    @property
    def part(self) -> int:
        """Elements of a rank."""
        return self.space.ruler.part if self.space.numel else 0

    @cached_property
    def _first(self) -> Ints:
        """The first entry of each parameter, and one past the last."""
        return np.cumsum([0, *(len(p.entries) for p in self.params)])

    @property
    def end(self) -> int:
        """Where the last parameter ends, of a space that is laid end to end."""
        ruler = self.space.ruler
        return int(ruler.phase[-1] + ruler.numel[-1])

    @cached_property
    def alignment_paddings(self) -> list[int]:
        """Elements of padding after each parameter (none is counted after the last)."""
        begin = self.space.ruler.phase[self._first[:-1]].tolist()
        ends = [b + p.numel for b, p in zip(begin, self.params, strict=True)]
        return [b - e for b, e in zip([*begin[1:], ends[-1]], ends, strict=True)]

    def padding(self, shard: int, *, tail_on_last: bool) -> int:
        """Elements of a shard after the last parameter's end, as ``group_paddings`` says.

        Parameters
        ----------
        shard
            The shard.
        tail_on_last
            Whether the last one counts the padding of all.
        """
        if tail_on_last:
            last = shard == self.space.shards - 1
            return self.part * self.space.shards - self.end if last else 0
        return min(self.part, max(0, (shard + 1) * self.part - self.end))

    def slices(self, shard: int) -> dict[str, tuple[int, int]]:
        """Where parameters lie in a shard: name to (first element, elements)."""
        pieces = self.space.ruler.shard(shard)
        param = np.searchsorted(self._first, pieces.entry, side="right") - 1
        found: dict[int, tuple[int, int]] = {}
        rows = zip(param.tolist(), pieces.local.tolist(), pieces.count.tolist(), strict=True)
        for index, start, count in rows:
            begin, before = found.get(index, (start, 0))
            found[index] = (begin, before + count)
        chosen = sorted(found, key=lambda index: self.order[index])
        return {self.params[index].name: found[index] for index in chosen}


def round_robin(count: int, world: int) -> list[int]:
    """The order of ``count`` parameters dealt out to ranks: original places in the new order."""
    return [i for first in range(min(world, count)) for i in range(first, count, world)]


def unrotated(params: Sequence[Local], world: int) -> tuple[Local, ...]:
    """The original order of parameters that were dealt out to ``world`` ranks."""
    order = round_robin(len(params), world)
    return tuple(p for _, p in sorted(zip(order, params, strict=True), key=lambda row: row[0]))


def lay_out(
    rules: Rules,
    group: int,
    params: Sequence[Local],
    states: Mapping[str, DType],
    coords: Mapping[str, int],
    *,
    degree: int = 1,
    block: int = 0,
) -> list[Flat]:
    """Lay out one parameter group.

    Parameters
    ----------
    rules
        How.
    group
        Its index.
    params
        Its parameters, in the user's order.
    states
        The states that lie so, with their element types.
    coords
        Where on the mesh it stands.
    degree, block
        Of experts: into how many blocks they are dealt out, and which of them this is.
    """
    topology = Topology(rules.world, degree, rules.data_first)
    if degree > 1:
        coords = {**coords, "expert": block}
    order = list(range(len(params)))
    if rules.round_robin:
        order = round_robin(len(params), topology.shards)
    cuts = _sub_groups(rules, [p.numel for p in params]) if rules.stage == 3 else [len(params)]
    found = []
    begin = 0
    for index, end in enumerate(cuts):
        some = order[begin:end]
        chosen = tuple(params[i] for i in some)
        name = ".".join(
            [f"group{group}", *(f"{a}{i}" for a, i in sorted(coords.items()))]
            + ([f"sub{index}"] if rules.stage == 3 else [])
        )
        space = FlatSpace(
            name=name,
            entries=tuple(e for p in chosen for e in p.entries),
            partition=_partition(rules, topology.shards),
            states=states,
            coords=coords,
            group=group,
            shard_start=topology.start(block),
            shard_step=topology.step if degree > 1 else 1,
        )
        found.append(Flat(space, chosen, tuple(some), group))
        begin = end
    return found


def _partition(rules: Rules, shards: int) -> Partition:
    if rules.stage == 3:
        return PerTensor(shards)
    return Contiguous(shards, align=rules.align, multiple=2)


def _sub_groups(rules: Rules, numel: Sequence[int]) -> list[int]:
    """Where sub-groups end."""
    mine = [-(-n // rules.world) for n in numel]
    if rules.sub_group_size >= sum(mine):
        return [len(mine)]
    ends, size = [], 0
    for index, count in enumerate(mine):
        size += count
        if size >= rules.sub_group_size or index == len(mine) - 1:
            ends.append(index + 1)
            size = 0
    return ends
