"""How does state that isn't tensors of the model come into the pickles of torch's files?

Plain data (:mod:`reshard.plain`) becomes what a training script pickles: tensors, numpy's arrays,
namespaces. No class is imported.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reshard.dtypes import BY_NAME
from reshard.errors import InconsistentError
from reshard.format import Loss
from reshard.formats._torch_sheet import Local, Sheet
from reshard.layout import Entry
from reshard.manifest import Manifest
from reshard.pickle_stubs import StoredArray
from reshard.pickle_write import Call, Global, NewObj
from reshard.plain import LeftOut, NumpyArray, TensorRef


@dataclass(slots=True)
class Plain:
    """Turns plain data into what is pickled into one file.

    Parameters
    ----------
    sheet
        The file's storages.
    source
        The checkpoint that the data is of.
    lost
        Told of every value that couldn't be carried.
    """

    sheet: Sheet
    source: Manifest
    lost: Callable[[Loss], None] = field(default=lambda _: None)

    def value(self, value: Any, path: str) -> Any:
        """One value; a value that was left out is ``None``, or no key of its dict.

        Parameters
        ----------
        value
            Plain data.
        path
            Where it stands, for what is said of a loss.
        """
        if isinstance(value, LeftOut):
            self.lost(Loss(path, f"an object of {value.what} can't be carried"))
            return None
        if isinstance(value, TensorRef):
            return self._tensor(value, path)
        if isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, (str, bytes)):
            return self._array(value, path)
        if isinstance(value, Mapping):
            return self.mapping(value, path)
        if isinstance(value, Namespace):
            attributes = self.mapping(vars(value), path)
            return NewObj(Global("argparse", "Namespace"), attributes or None)
        if isinstance(value, (list, tuple)):
            found = [self.value(v, f"{path}/{i}") for i, v in enumerate(value)]
            return tuple(found) if isinstance(value, tuple) else found
        if isinstance(value, (set, frozenset)):
            some = {self.value(v, path) for v in value}
            order = sorted(some, key=repr)
            known = isinstance(value, set)
            return some if known else Call(Global("builtins", "frozenset"), (order,))
        if isinstance(value, bytearray):
            return Call(Global("builtins", "bytearray"), (bytes(value),))
        return value

    def mapping(self, value: Mapping[Any, Any], path: str) -> dict[Any, Any]:
        """A dict."""
        found = {}
        for key, one in value.items():
            made = self.value(one, f"{path}{key}" if path.endswith(":") else f"{path}/{key}")
            if not isinstance(one, LeftOut):
                found[key] = made
        return found

    def _array(self, value: np.ndarray[Any, Any] | np.generic, path: str) -> Any:
        """A tensor, or what numpy itself pickles."""
        own = isinstance(value, (NumpyArray, np.generic))
        if value.dtype.kind not in "biufc" if own else value.dtype.name not in BY_NAME:
            self.lost(Loss(path, f"an array of {value.dtype} can't be carried"))
            return None
        if isinstance(value, np.generic):
            return value
        return StoredArray.of(value) if own else self.sheet.array(value)

    def _tensor(self, ref: TensorRef, path: str) -> Any:
        tensor = self.source.tensors.get(ref.key)
        if tensor is None:
            raise InconsistentError(
                f"{path} is a tensor {ref.name!r} that isn't there", where=self.source.root
            )
        local = Local(ref.name, tensor.shape, (Entry(ref.name, tensor.shape),))
        return self.sheet.whole(ref.state, local, tensor.dtype)
