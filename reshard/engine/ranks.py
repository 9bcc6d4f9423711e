"""Which ranks divide the state, and which hold the same slice?

Without a mesh all ranks divide one copy. A mesh of two axes has ``replicate`` copies, each divided
over ``shard`` ranks; a slice's gradients are then summed within the copy and over the copies.

In a pipeline each stage is a model of its own, with an engine over the ranks that train it: its
**world**. What concerns the whole model (norm, overflow, checkpoints) is for **all** ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from reshard.engine.counting import Counting
from reshard.engine.topology import Groups
from reshard.engine.transport import connect
from reshard.errors import RequestError, UnsupportedError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """The groups that an engine works with.

    Parameters
    ----------
    world
        All ranks that train this part of the model.
    shard
        The ranks that divide one copy.
    replicate
        The ranks that hold this rank's slice too; ``None`` with one copy.
    all
        All ranks of the pipeline; without one they are the world.
    part, parts
        Which stage of the pipeline this is, of how many.
    """

    world: Counting
    shard: Counting
    replicate: Counting | None
    all: Counting
    part: int = 0
    parts: int = 1

    @property
    def replica(self) -> int:
        """Which copy this rank belongs to."""
        return 0 if self.replicate is None else self.replicate.rank

    def sent(self) -> int:
        """Bytes that this rank has sent since this was asked last."""
        total = 0
        for transport in self._each():
            total += transport.total().sent
            transport.reset()
        return total

    def close(self) -> None:
        """End the transports' threads."""
        for transport in self._each():
            transport.close()

    def retire(self) -> None:
        """End them when the engine is no more: nothing is waited for."""
        for transport in self._each():
            transport.retire()

    def _each(self) -> list[Counting]:
        every = (self.shard, self.replicate, self.world, self.all)
        return list({id(t): t for t in every if t is not None}.values())

    def rest(self) -> None:
        """Let go of the transports' buffers."""
        for transport in self._each():
            transport.rest()

    def combine(self, values: Tensor, label: str) -> None:
        """Sum a slice over the copies, in place and in their order."""
        assert self.replicate is not None
        n, R, r = values.numel(), self.replicate.size, self.replicate.rank
        bounds = [i * n // R for i in range(R + 1)]
        run = values.new_empty(bounds[r + 1] - bounds[r])
        self.replicate.reduce(values, bounds, run, label).wait()
        values[bounds[r] : bounds[r + 1]].copy_(run)
        self.replicate.gather(values, bounds, label).wait()


def ranks(mesh: DeviceMesh | Groups | None, device: torch.device) -> Ranks:
    """Make the groups of a mesh (axes ``shard`` and, before it, ``replicate``), or of a topology.

    Raises
    ------
    RequestError
        If the mesh has other axes, or leaves ranks out.
    UnsupportedError
        If the topology divides layers (tensor parallelism).
    """
    if isinstance(mesh, Groups) and mesh.topology.tensor > 1:
        raise UnsupportedError(
            f"the topology has {mesh.topology.tensor} tensor ranks; the engine divides whole "
            "parameters, and would count those that tensor ranks share more than once",
            hint="train with tensor=1: shard, replicate and pipeline degrees are free",
        )
    world = connect(None, device=device)  # before its parts: they share its watch
    everybody = Counting(world)
    if mesh is None:
        return Ranks(everybody, everybody, None, everybody)

    def part(group: ProcessGroup, name: str) -> Counting:
        return Counting(connect(group, name=name, device=device))

    if isinstance(mesh, Groups):
        topology = mesh.topology
        return Ranks(
            part(mesh.data, "data"),
            part(mesh.shard, "shard"),
            part(mesh.replicate, "replicate") if topology.replicate > 1 else None,
            everybody,
            topology.coordinate(world.rank)["pipeline"],
            topology.pipeline,
        )
    names = tuple(mesh.mesh_dim_names or ("replicate", "shard")[-mesh.ndim :])
    if names not in (("shard",), ("replicate", "shard")):
        raise RequestError(
            f"the mesh has the axes {names}",
            hint='make it with mesh_dim_names=("shard",) or ("replicate", "shard")',
        )
    if mesh.size() != world.size:
        raise RequestError(
            f"the mesh has {mesh.size()} of {world.size} ranks; all are needed",
            hint="for a pipeline give the groups of Topology(..., pipeline=...).make()",
        )
    shard = part(mesh.get_group(names.index("shard")), "shard")
    copies = part(mesh.get_group(0), "replicate") if mesh.size() > shard.size else None
    return Ranks(everybody, shard, copies, everybody)
