"""Which rank holds which expert, and what does it call it?

The n experts of a MoE layer are dealt out in as many blocks as the degree of expert parallelism
says: block b has the experts ``[b * n / degree, (b + 1) * n / degree)``, and a rank that holds it
numbers them from 0. A parameter group of experts is cut over the ranks that hold the same ones: of
the data-parallel ranks b, b + degree, b + 2 * degree, …, or ranks that stand side by side with
``use_data_before_expert_parallelism`` (``deepspeed/utils/groups.py``,
``_create_expert_and_data_parallel``, ``moe/layer.py`` and ``moe/experts.py`` of 0.19.8).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reshard.errors import IncompleteError, InconsistentError
from reshard.formats._deepspeed_names import Names

_NAME = re.compile(r"(.*\bdeepspeed_experts)\.(\d+)\.(.*)")
_DEGREE = re.compile(r"ep_size_(\d+)")


@dataclass(frozen=True, slots=True)
class Expert:
    """The name of a tensor of an expert.

    Parameters
    ----------
    layer
        The module that holds the layer's experts.
    index
        The expert's number: among all of the layer, or among those of a rank.
    rest
        The name inside of the expert.
    """

    layer: str
    index: int
    rest: str

    @classmethod
    def parse(cls, name: str) -> Expert | None:
        """Take a name apart; ``None`` for one that isn't an expert's."""
        found = _NAME.fullmatch(name) if "deepspeed_experts." in name else None
        return None if found is None else cls(found[1], int(found[2]), found[3])

    def at(self, index: int) -> Expert:
        """The same tensor of another expert."""
        return replace(self, index=index)

    def __str__(self) -> str:
        return f"{self.layer}.{self.index}.{self.rest}"


@dataclass(frozen=True, slots=True)
class Topology:
    """How the ranks of the shard axis are shared by experts and shards.

    Parameters
    ----------
    world
        Data-parallel world size.
    degree
        Into how many blocks experts are dealt out; it divides the world size.
    data_first
        Whether the ranks with the same experts stand side by side.
    """

    world: int
    degree: int
    data_first: bool = False

    @property
    def shards(self) -> int:
        """How many ranks hold the same experts."""
        return self.world // self.degree

    def start(self, block: int) -> int:
        """The first rank that holds a block of experts."""
        return block * self.shards if self.data_first else block

    @property
    def step(self) -> int:
        """Ranks from one that holds a block of experts to the next."""
        return 1 if self.data_first else self.degree

    def block(self, rank: int) -> int:
        """Which block of experts a rank holds."""
        return rank // self.shards if self.data_first else rank % self.degree


def data_first(config: Mapping[str, Any]) -> bool:
    """Whether a DeepSpeed configuration puts data before expert parallelism."""
    return bool(config.get("use_data_before_expert_parallelism"))


def degree_of(settings: Mapping[str, Any]) -> int | None:
    """The degree of expert parallelism of a parameter group; ``None`` if it has no experts.

    DeepSpeed finds the group's ranks by its name, which has the degree in it
    (``stage_1_and_2.py``, ``_configure_moe_settings``).
    """
    name = settings.get("name")
    found = _DEGREE.fullmatch(name) if isinstance(name, str) else None
    return int(found[1]) if found is not None and settings.get("moe") else None


def with_degree(settings: Mapping[str, Any], degree: int) -> dict[str, Any]:
    """The settings of a group of experts at another degree."""
    return {**settings, "name": f"ep_size_{degree}"}


def are_counts(value: object) -> bool:
    """Whether a value is a list of how many experts each layer has."""
    if not isinstance(value, (list, tuple)):
        return False
    return all(isinstance(n, int) and n > 0 for n in value)


def check_files(names: Names, mp: int, counts: Sequence[int]) -> None:
    """Check that the files of all experts of a model rank are there, and no others.

    Raises
    ------
    IncompleteError, InconsistentError
        If they aren't.
    """
    expected = {(layer, expert) for layer, n in enumerate(counts) for expert in range(n)}
    found = {(layer, expert) for layer, expert, of in names.experts if of == mp}
    missing, more = sorted(expected - found), sorted(found - expected)
    if missing:
        layer, expert = missing[0]
        raise IncompleteError(
            f"expert {expert} of {counts[layer]} is missing: there is no "
            f"layer_{layer}_expert_{expert}_mp_rank_{mp:02d}_model_states.pt",
            where=names.root,
            hint="copy the missing file into the folder; nothing can stand in for it",
        )
    if more:
        layer, expert = more[0]
        raise InconsistentError(
            f"is of expert {expert} of MoE layer {layer}, but the layers have {list(counts)} "
            "experts",
            where=names.experts[layer, expert, mp],
            hint="files of an earlier run were left in the folder",
        )
