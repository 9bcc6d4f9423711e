"""How does what a script hands over become plain data, and come back as it was?

Small tensors stand inside the plain data, as arrays; larger ones are tensors of the checkpoint,
referred to by name. Numpy's arrays stay numpy's.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from reshard.dtypes import BY_TORCH, DType, dtype
from reshard.errors import RequestError, UnsupportedError
from reshard.layout import CLIENT, TensorKey
from reshard.plain import LARGEST_ARRAY, NumpyArray, TensorRef
from reshard.stored import Device, DTypeName

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PLAIN = (bool, int, float, str, bytes, bytearray, type(None))


def dtype_of(tensor: Tensor) -> DType:
    """The element type of a tensor.

    Raises
    ------
    UnsupportedError
        If it is one that no checkpoint can hold.
    """
    return dtype_of_torch(tensor.dtype)


def dtype_of_torch(kind: torch.dtype) -> DType:
    """The element type that torch calls so; see :func:`dtype_of`."""
    name = str(kind).removeprefix("torch.")
    found = BY_TORCH.get(name)
    if found is None:
        raise UnsupportedError(f"a tensor of {name}, which no checkpoint can hold")
    return found


def torch_dtype(kind: DType) -> torch.dtype:
    """What torch calls an element type."""
    import torch

    if kind.torch is None:
        raise UnsupportedError(f"torch has no {kind} elements")
    found: torch.dtype = getattr(torch, kind.torch)
    return found


def raw(tensor: Tensor) -> NDArray[np.uint8]:
    """The very bytes of a tensor; a view, where it lies in memory without holes."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    if not flat.numel():
        return np.empty(0, np.uint8)
    found: NDArray[np.uint8] = flat.view(torch.uint8).cpu().numpy()
    return found


def as_array(tensor: Tensor) -> NDArray[Any]:
    """A tensor as an array of the same bits."""
    found: NDArray[Any] = raw(tensor).view(dtype_of(tensor).numpy).reshape(tuple(tensor.shape))
    return found


def as_tensor(array: NDArray[Any]) -> Tensor:
    """An array as a tensor of the same bits, with memory of its own."""
    import torch

    kind = torch_dtype(dtype(array.dtype.name))
    flat = np.array(array, order="C").reshape(-1).view(np.uint8)
    if not flat.size:
        return torch.empty(array.shape, dtype=kind)
    return torch.from_numpy(flat).view(kind).reshape(array.shape)


def sent(tensor: Tensor) -> dict[str, Any]:
    """A tensor as what JSON has."""
    array = as_array(tensor)
    data = base64.b64encode(raw(tensor).tobytes()).decode("ascii")
    return {"dtype": dtype_of(tensor).name, "shape": list(array.shape), "data": data}


def received(plain: Mapping[str, Any]) -> Tensor:
    """The tensor that :func:`sent` was given."""
    data = np.frombuffer(base64.b64decode(plain["data"]), dtype(plain["dtype"]).numpy)
    return as_tensor(data.reshape(plain["shape"]))


def number(value: Any) -> Any:
    """A setting as plain data: a 0-d tensor (``lr``) stays one, as an array."""
    if hasattr(value, "numel") and hasattr(value, "detach"):
        return as_array(value)
    if isinstance(value, (list, tuple)):
        return type(value)(number(v) for v in value)
    return value


def pack(value: Any, where: str) -> tuple[Any, dict[str, Tensor]]:
    """Turn a script's value into plain data.

    Parameters
    ----------
    value
        Dicts, lists and so on of numbers, texts, tensors and arrays.
    where
        What it is called: its large tensors get names that begin so.

    Returns
    -------
    plain, tensors
        The data, and the tensors that it refers to by name.

    Raises
    ------
    RequestError
        If something in it is neither data nor a tensor.
    """
    tensors: dict[str, Tensor] = {}
    return _pack(value, where, tensors), tensors


def _pack(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    import torch

    if isinstance(value, PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        if value.numel() * value.element_size() <= LARGEST_ARRAY:
            return as_array(value)
        tensors[where] = value
        return TensorRef(where, CLIENT)
    if isinstance(value, np.generic):
        return value
    if isinstance(value, np.ndarray):
        if value.nbytes > LARGEST_ARRAY:
            raise RequestError(
                f"an array of {value.nbytes} bytes; at most {LARGEST_ARRAY} are kept as an array",
                where=where,
                hint="give it as a tensor (torch.from_numpy)",
            )
        return value.view(NumpyArray)
    if isinstance(value, torch.dtype):
        return DTypeName(str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return Device(str(value))
    if isinstance(value, Mapping):
        return {k: _pack(v, f"{where}/{k}", tensors) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_pack(v, f"{where}/{i}", tensors) for i, v in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, (set, frozenset)):
        return type(value)(_pack(v, where, tensors) for v in value)
    raise RequestError(
        f"a {type(value).__name__} is not plain data",
        where=where,
        hint="give numbers, texts, lists, dicts and tensors: a class's own state_dict(), for one",
    )


def unpack(value: Any, read: Callable[[TensorKey], NDArray[Any]]) -> Any:
    """The script's value again.

    Parameters
    ----------
    value
        What :func:`pack` made.
    read
        Gives the array of a tensor that is referred to.
    """
    import torch

    if isinstance(value, TensorRef):
        return as_tensor(read(value.key))
    if isinstance(value, NumpyArray):
        return value.view(np.ndarray)
    if isinstance(value, np.ndarray):
        return as_tensor(value)
    if isinstance(value, DTypeName):
        return torch_dtype(dtype(str(value)))
    if isinstance(value, Device):
        return torch.device(str(value))
    if isinstance(value, Mapping):
        return {k: unpack(v, read) for k, v in value.items()}
    if isinstance(value, list):
        return [unpack(v, read) for v in value]
    if isinstance(value, tuple):
        return tuple(unpack(v, read) for v in value)
    return value
