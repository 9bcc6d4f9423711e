"""Which ranks divide the state, and which hold the same slice?

Without a mesh all ranks divide one copy. A mesh of two axes has ``replicate`` copies, each divided
over ``shard`` ranks; a slice's gradients are then summed within the copy and over the copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from reshard.engine.counting import Counting
from reshard.engine.topology import Groups
from reshard.engine.transport import connect
from reshard.errors import RequestError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """The groups that an engine works with.

    Parameters
    ----------
    world
        All ranks: they take part in every step.
    shard
        The ranks that divide one copy.
    replicate
        The ranks that hold this rank's slice too; ``None`` with one copy.
    """

    world: Counting
    shard: Counting
    replicate: Counting | None

    @property
    def replica(self) -> int:
        """Which copy this rank belongs to."""
        return 0 if self.replicate is None else self.replicate.rank

    def sent(self) -> int:
        """Bytes that this rank has sent since this was asked last."""
        total = 0
        for transport in {id(t): t for t in (self.world, self.shard, self.replicate) if t}.values():
            total += transport.total().sent
            transport.reset()
        return total

    def rest(self) -> None:
        """Let go of the transports' buffers."""
        for transport in (self.world, self.shard, self.replicate):
            if transport is not None:
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
    """
    world = connect(None, device=device)  # before its parts: they share its watch
    if mesh is None:
        counting = Counting(world)
        return Ranks(counting, counting, None)

    def part(group: ProcessGroup, name: str) -> Counting:
        return Counting(connect(group, name=name, device=device))

    if isinstance(mesh, Groups):
        copies = mesh.topology.replicate
        return Ranks(
            part(mesh.data, "data"),
            part(mesh.shard, "shard"),
            part(mesh.replicate, "replicate") if copies > 1 else None,
        )
    names = tuple(mesh.mesh_dim_names or ("replicate", "shard")[-mesh.ndim :])
    if names not in (("shard",), ("replicate", "shard")):
        raise RequestError(
            f"the mesh has the axes {names}",
            hint='make it with mesh_dim_names=("shard",) or ("replicate", "shard")',
        )
    if mesh.size() != world.size:
        raise RequestError(f"the mesh has {mesh.size()} of {world.size} ranks; all are needed")
    shard = part(mesh.get_group(names.index("shard")), "shard")
    if "replicate" not in names or mesh.size(0) == 1:
        return Ranks(Counting(world), shard, None)
    return Ranks(Counting(world), shard, part(mesh.get_group(0), "replicate"))
