"""Under which keys does ``dcp.load`` find what a checkpoint of any format holds?

Under those that it would have as a distributed checkpoint: ``model.<name>``,
``optim.state.<name>.<state>``, and the script's values. The settings of the parameter groups are
there twice, nested and flattened, as ``get_optimizer_state_dict`` gives either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reshard.box import Shape
from reshard.dtypes import DType, from_numpy
from reshard.format import Request
from reshard.formats._dcp_write_keys import OBJECTS, contents, key_of
from reshard.layout import TensorKey
from reshard.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Found:
    """A tensor under a key.

    Parameters
    ----------
    shape, dtype
        Of the whole.
    tensor
        The checkpoint's tensor that it is.
    array
        Its elements, where they are known already.
    """

    shape: Shape
    dtype: DType
    tensor: TensorKey | None
    array: np.ndarray[Any, Any] | None = None


@dataclass(frozen=True, slots=True)
class Catalog:
    """All keys of a checkpoint, with tensors and with other values."""

    tensors: Mapping[str, Found]
    values: Mapping[str, Any]

    @classmethod
    def of(cls, manifest: Manifest, model: str, optimizer: str) -> Catalog:
        """The keys under the names that the script has for its model and its optimizer."""
        tensors: dict[str, Found] = {}
        values: dict[str, Any] = {}
        for flat in (False, True):
            own = manifest.objects.get(OBJECTS)
            names = {
                **(dict(own) if isinstance(own, Mapping) else {}),
                "model": f"{model}." if model else "",
                "optimizers": _prefixes(manifest, optimizer),
                "flat": flat,
            }
            objects = {**manifest.objects, OBJECTS: names}
            chosen = contents(replace(manifest, objects=objects), Request())
            for item in chosen.items:
                tensors[key_of(item.path)] = Found(item.shape, item.dtype, item.source)
            for path, array in chosen.arrays.items():
                kind = from_numpy(array.dtype)
                tensors[key_of(path)] = Found(array.shape, kind, None, array)
            values.update((key_of(path), value) for path, value in chosen.values.items())
        return cls(tensors, values)


def _prefixes(manifest: Manifest, optimizer: str) -> list[list[str]]:
    """One prefix an optimizer: ``optim``, ``optim1``, and so on; none if it is empty text."""
    count = max((group.optimizer for group in manifest.groups), default=0) + 1
    if not optimizer:
        return [[] for _ in range(count)]
    return [[f"{optimizer}{i or ''}"] for i in range(count)]
