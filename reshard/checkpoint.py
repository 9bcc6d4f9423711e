"""How does a script look into a checkpoint?

A :class:`Checkpoint` is a mapping from names to :class:`LazyTensor`; slicing one reads only the
bytes of the slice, whatever shards they lie in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.box import Box, Shape
from reshard.dtypes import DType
from reshard.errors import NotFoundError
from reshard.layout import BUFFER, MASTER, PARAM, TensorKey, key_text
from reshard.manifest import Manifest, ParamGroup, Tensor
from reshard.read import Reader, box_of

DEFAULT_STATES = (PARAM, MASTER, BUFFER)
"""What a bare name stands for: the weights as the model holds them, else the masters, else a
buffer."""


class LazyTensor:
    """A tensor of a checkpoint, read when it is asked for.

    Indexing with integers and slices, or ``numpy.asarray``, reads it. Nothing is kept.
    """

    __slots__ = ("_reader", "_tensor")

    def __init__(self, reader: Reader, tensor: Tensor) -> None:
        self._reader = reader
        self._tensor = tensor

    @property
    def name(self) -> str:
        """Its name."""
        return self._tensor.name

    @property
    def state(self) -> str:
        """Its state: ``param``, ``master``, ``exp_avg`` and so on."""
        return self._tensor.state

    @property
    def shape(self) -> Shape:
        """Its sizes."""
        return self._tensor.shape

    @property
    def dtype(self) -> DType:
        """Its element type."""
        return self._tensor.dtype

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self._tensor.nbytes

    def __getitem__(self, index: Any) -> NDArray[Any]:
        box, inner = box_of(index, self.shape)
        found: NDArray[Any] = self._reader.region(self._tensor, box)[inner]
        return found

    def numpy(self) -> NDArray[Any]:
        """The whole tensor; bfloat16 and 8-bit floats come as ``ml_dtypes``."""
        return self._reader.region(self._tensor, Box.whole(self.shape))

    def __array__(
        self, dtype: np.dtype[Any] | None = None, copy: bool | None = None
    ) -> NDArray[Any]:
        found = self.numpy()
        return found if dtype is None else found.astype(dtype, copy=False)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a 0-d tensor has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<{key_text(self._tensor.key)} {self.dtype} {list(self.shape)}>"


class Checkpoint(Mapping[str, LazyTensor]):
    """A checkpoint of any format, as a mapping from names to lazy tensors.

    Parameters
    ----------
    manifest
        What its reader found.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._reader = Reader(manifest)

    @property
    def world(self) -> int:
        """How many ranks its state is sharded over."""
        return self.manifest.layout.world

    @property
    def stage(self) -> int | None:
        """Its ZeRO stage, where it has one."""
        return self.manifest.layout.stage

    @property
    def states(self) -> tuple[str, ...]:
        """The states that occur in it."""
        return self.manifest.states

    @property
    def groups(self) -> tuple[ParamGroup, ...]:
        """Its parameter groups."""
        return self.manifest.groups

    @property
    def objects(self) -> Mapping[str, Any]:
        """Its state that isn't tensors."""
        return self.manifest.objects

    def state(self, state: str) -> dict[str, LazyTensor]:
        """All tensors of one state, by name."""
        return {
            name: LazyTensor(self._reader, tensor)
            for (name, its_state), tensor in self.manifest.tensors.items()
            if its_state == state
        }

    def __getitem__(self, key: str | TensorKey) -> LazyTensor:
        """A tensor by its name, or by (name, state); tied names work too.

        Raises
        ------
        KeyError
            If there is none; the error is also a :class:`~reshard.errors.NotFoundError`.
        """
        name, states = (key, DEFAULT_STATES) if isinstance(key, str) else (key[0], (key[1],))
        for candidate in (name, self.manifest.aliases.get(name, name)):
            for state in states:
                tensor = self.manifest.tensors.get((candidate, state))
                if tensor is not None:
                    return LazyTensor(self._reader, tensor)
        raise MissingTensorError(f"no tensor {key!r}", where=self.manifest.root)

    def __iter__(self) -> Iterator[str]:
        names = (n for n, s in self.manifest.tensors if s in DEFAULT_STATES)
        return iter(dict.fromkeys((*names, *self.manifest.aliases)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        layout = self.manifest.layout
        stage = "" if layout.stage is None else f", ZeRO stage {layout.stage}"
        return (
            f"<{self.manifest.format} checkpoint {str(self.manifest.root)!r}: "
            f"{len(self)} tensors, {layout.world} rank(s){stage}>"
        )


class MissingTensorError(NotFoundError, KeyError):
    """There is no tensor of that name (also a :class:`KeyError`, as for any mapping)."""

    __str__ = NotFoundError.__str__
