"""How does a pipeline keep its weights: a file a layer, whatever stage the layer is on.

The files are named by the layer's number (``layer_03-model_states.pt``, with the tensor-parallel
rank where there is one), and in them tensors are named without it
(``deepspeed/runtime/pipe/module.py``, ``ckpt_layer_path``, ``save_state_dict``, of 0.19.8). A
layer without tensors has a file too, without which DeepSpeed doesn't load.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from reshard.dtypes import DType
from reshard.errors import UnsupportedError
from reshard.formats._deepspeed_names import names
from reshard.formats._torch_sheet import Local, Sheet
from reshard.layout import BUFFER, PARAM
from reshard.manifest import Manifest

_NAME = re.compile(r"(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class Layer:
    """The file of a layer.

    Parameters
    ----------
    path
        Its name.
    params, buffers
        The tensors in it, by what the file calls them.
    """

    path: str
    params: Mapping[str, Local]
    buffers: Mapping[str, Local]


def layer_of(name: str) -> int | None:
    """The layer that a tensor is of, by its name."""
    found = _NAME.fullmatch(name)
    return None if found is None else int(found[1])


def layers_of(
    source: Manifest, locals_of: Callable[[str, int], Iterable[Local]], tensor: int
) -> tuple[Layer, ...]:
    """The files of all layers.

    Parameters
    ----------
    source
        The checkpoint.
    locals_of
        The tensors of a state that a tensor-parallel rank has.
    tensor
        Size of the tensor axis.

    Raises
    ------
    UnsupportedError
        If it isn't known which layers have files, or a tensor is of several layers.
    """
    numbers = _numbers(source)
    found = []
    for rank in range(tensor):
        params = _by_layer(locals_of(PARAM, rank), numbers)
        buffers = _by_layer(locals_of(BUFFER, rank), numbers)
        suffix = f"-model_{rank:02d}" if tensor > 1 else ""
        for number in numbers:
            path = f"layer_{number:02d}{suffix}-model_states.pt"
            found.append(Layer(path, params[number], buffers[number]))
    return tuple(found)


def _numbers(source: Manifest) -> list[int]:
    """The layers that have files."""
    engine = source.objects.get("deepspeed")
    said = engine.get("layers") if isinstance(engine, Mapping) else None
    if isinstance(said, (list, tuple)) and all(isinstance(n, int) for n in said):
        return sorted(set(said))
    if source.format == "deepspeed":
        return sorted({layer for layer, _ in names(source.root).layers})
    raise UnsupportedError(
        "the checkpoint doesn't say which layers of the pipeline have files",
        where=source.root,
        hint="convert from the original DeepSpeed checkpoint",
    )


def _by_layer(some: Iterable[Local], numbers: list[int]) -> dict[int, dict[str, Local]]:
    found: dict[int, dict[str, Local]] = {number: {} for number in numbers}
    for local in some:
        layer = layer_of(local.name)
        if layer not in found:
            raise UnsupportedError(
                f"{local.name} is of no layer, or of several: pipelines with tied layers can't be "
                "written",
                hint="keep it in the native format (--format native)",
            )
        found[layer][local.name.partition(".")[2]] = local
    return found


def layer_file(
    layer: Layer, kind: Callable[[Local], DType], source: Manifest, sheet: Sheet
) -> Mapping[str, Any]:
    """The value of a layer's file.

    Parameters
    ----------
    layer
        The layer.
    kind
        The element type of a weight.
    source
        The checkpoint.
    sheet
        Gets the file's storages.
    """
    value: OrderedDict[str, Any] = OrderedDict()
    for name, local in layer.params.items():
        value[name] = sheet.whole(PARAM, local, kind(local))
    for name, local in layer.buffers.items():
        dtype = source.tensors[local.entries[0].name, BUFFER].dtype
        value[name] = sheet.whole(BUFFER, local, dtype)
    return value
