"""How does a model become flats on this rank?

Units are found, their parameters sorted by element type and by whether they are trained, and each
such set becomes a flat with the values of rank 0. First all ranks make sure that they have the
same model, since flats of different models would mix without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from reshard.engine.flat import lay
from reshard.engine.holding import Holding
from reshard.engine.inner import is_lazy
from reshard.engine.precision import Precision
from reshard.engine.residency import Resident
from reshard.engine.units import Unit
from reshard.errors import InconsistentError, RequestError, UnsupportedError

if TYPE_CHECKING:
    from reshard.engine.ranks import Ranks
    from reshard.engine.transport import Transport


def check_parameter(name: str, parameter: Parameter) -> None:
    """Refuse a parameter that can't be divided.

    Raises
    ------
    RequestError
        If it has no values yet.
    UnsupportedError
        If it is no plain dense tensor.
    """
    if is_lazy(parameter):
        raise RequestError(
            "the parameter has no shape yet", where=name, hint="run the model once before"
        )
    if parameter.is_meta:
        raise RequestError(
            "the parameter has no values (meta device)",
            where=name,
            hint="materialize the model first: model.to_empty(...) and initialize it",
        )
    if parameter.layout is not torch.strided or type(parameter.data) is not Tensor:
        kind = type(parameter.data).__name__
        raise UnsupportedError(
            f"the parameter is a {kind} of layout {parameter.layout}; only plain dense tensors "
            "can be divided",
            where=name,
        )


def check_same(world: Transport, model: Module, settings: Sequence[str]) -> None:
    """Make sure that all ranks made the same engine.

    Raises
    ------
    InconsistentError
        If parameters or settings of two ranks differ.
    """
    own = list(settings)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        trained = ", trained" if value.requires_grad else ""
        own.append(f"{name}: {tuple(value.shape)} {value.dtype}{trained}")
    compare(
        world, own, "model", "make the same model, with the same parameters frozen, on every rank"
    )


def compare(world: Transport, own: Sequence[str], label: str, hint: str) -> None:
    """Make sure that all ranks say the same.

    Raises
    ------
    InconsistentError
        With the first thing that two ranks say differently.
    """
    said = world.exchange(list(own), label)
    for rank, other in enumerate(said):
        if other != said[0]:
            pairs = zip([*said[0], "nothing more"], [*other, "nothing more"], strict=False)
            first, differs = next((a, b) for a, b in pairs if a != b)
            raise InconsistentError(
                f"ranks made different engines: rank 0 has {first!r}, rank {rank} has {differs!r}",
                hint=hint,
            )


def share(world: Transport, tensor: Tensor, label: str) -> None:
    """Give every rank the values of rank 0: a gather in which rank 0 owns everything."""
    flat = tensor.detach().reshape(-1)
    flat = flat if flat.is_contiguous() else flat.contiguous()
    raw = flat.view(torch.uint8)
    bounds = (0, *([raw.numel()] * world.size))
    world.gather(raw, bounds, label).wait()
    if raw.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))


ALONE = 1 << 20
"""Elements from which a parameter of the root has a flat of its own. The root's gradients come from
both ends of a backward (the head's first, the embedding's last): apart, the first needn't wait."""


def assemble(
    found: Sequence[Unit],
    groups: Mapping[Parameter, int],
    precision: Precision,
    ranks: Ranks,
    stage: int,
) -> list[Resident]:
    """Make the flats of every unit; the parameters' values move into them."""
    residents: list[Resident] = []
    for number, unit in enumerate(found):
        kinds: dict[tuple[torch.dtype, bool, str], list[tuple[str, Parameter]]] = {}
        for name, parameter in unit.parameters:
            alone = name if not unit.name and parameter.numel() >= ALONE else ""
            kind = (precision.cast(parameter.dtype), parameter.requires_grad, alone)
            kinds.setdefault(kind, []).append((name, parameter))
        holdings: list[Holding] = []
        for (dtype, trained, alone), named in kinds.items():
            text = str(dtype).removeprefix("torch.")
            label = f"{unit.label}.{text}" + ("" if trained else ".frozen")
            label += f".{alone}" if alone else ""
            shapes = [(n, tuple(p.shape), groups.get(p, 0)) for n, p in named]
            flat = lay(label, shapes, text, trained)
            by_name = dict(named)
            holdings.append(
                Holding(
                    flat,
                    [by_name[entry.name] for entry in flat.entries],
                    dtype,
                    ranks.shard.rank,
                    ranks.shard.size,
                    owns_all=stage == 0,
                    share=partial(share, ranks.world, label=label),
                )
            )
        residents.append(Resident(unit, holdings, number))
    return residents


def tied_names(model: Module) -> dict[str, str]:
    """Further names of tied parameters, to the name that the flat has."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[p] for name, p in every if first[p] != name}
