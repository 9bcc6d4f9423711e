"""What did the training script, and the optimizer, store that isn't a tensor of the model?

A value is a blob of its own, a whole ``torch.save`` file, of which the pickle is read safely. Of
values that all ranks have, DCP keeps one rank's, whichever has the least to write, and doesn't
compare them: that is told. Where each rank wrote metadata of its own, all are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from reshard.builder import Builder, Placed
from reshard.errors import CorruptError, InconsistentError, UnsupportedError
from reshard.formats._dcp_blobs import Blobs
from reshard.formats._dcp_metadata import Blob, Index, Path_
from reshard.formats._dcp_spaces import Spaces, full_chunks
from reshard.formats._torch import Values
from reshard.layout import CLIENT
from reshard.plain import LARGEST_ARRAY, LeftOut, TensorRef, encode
from reshard.stored import StoredTensor, item_bytes

LONGEST_LIST = 1 << 16
"""Elements that a list may have whose elements have blobs of their own."""

_SHARDED = ("torch.distributed.tensor.", "torch.distributed._tensor.", "torch.distributed._shard.")


class Script:
    """Reads values.

    Parameters
    ----------
    spaces
        Where large tensors go.
    index
        The metadata.
    """

    def __init__(self, spaces: Spaces, index: Index) -> None:
        self._spaces = spaces
        self._index = index
        self._inside: list[Placed] = []

    @property
    def _builder(self) -> Builder:
        return self._spaces.builder

    @property
    def _blobs(self) -> Blobs:
        return self._spaces.blobs

    def value(self, key: str, copy: int = 0) -> Any:
        """A value or a small tensor, as plain data.

        Parameters
        ----------
        key
            Its key.
        copy
            Which rank's, where several wrote it.
        """
        blobs = self._index.values.get(key)
        if blobs is None:
            return self.array(key, copy)
        blob = blobs[min(copy, len(blobs) - 1)]
        with self._blobs.opened(blob) as (file, whole):
            if any(name.startswith(_SHARDED) for name in file.opaque):
                return self._one_rank_s(key, blob)
            if whole is not None and any(map(_is_large, _tensors(file.value))):
                raise UnsupportedError(
                    f"{key} holds a large tensor inside of a compressed value",
                    where=self._blobs.path(blob),
                    hint="load it with torch and save it again without extensions",
                )
            values = Values(self._builder, file, prefix=f"rank{copy}/" if copy else "")
            found = values.plain(file.value, key)
        self._inside += values.tensors
        return found

    def array(self, key: str, copy: int = 0) -> np.ndarray[Any, Any]:
        """A tensor that is stored whole."""
        stored = self._index.tensors[key]
        (chunk,) = full_chunks(stored)
        blob = chunk.blobs[min(copy, len(chunk.blobs) - 1)]
        return self._blobs.array(blob, stored.shape, stored.dtype)

    def copies(self, keys: Iterable[str]) -> int:
        """How many ranks wrote any of these keys."""
        most = 1
        for key in keys:
            if key in self._index.values:
                most = max(most, len(self._index.values[key]))
            elif self._is_small(key):
                most = max(most, len(full_chunks(self._index.tensors[key])[0].blobs))
        return most

    def agreed(self, key: str) -> Any:
        """A value of which all ranks must have written the same."""
        first = self.value(key)
        for copy in range(1, self.copies([key])):
            if encode(self.value(key, copy)) != encode(first):
                raise InconsistentError(
                    f"rank 0 and another rank wrote different values of {key}",
                    where=self._builder.root,
                    hint="the ranks were at different steps: this save can't be used",
                )
        return first

    def nested(self, keys: Sequence[str], copy: int = 0) -> dict[str, Any]:
        """Values in the nested dict that they were saved in; large tensors are referred to."""
        root: dict[str | int, Any] = {}
        for key in keys:
            if key in self._index.values or self._is_small(key):
                value = self.value(key, copy)
            else:
                value = TensorRef(key, CLIENT)
            put(root, self._index.paths[key], value)
        found = listed(root)
        assert isinstance(found, dict)
        return {str(k): v for k, v in found.items()}

    def add(self, keys: Sequence[str]) -> None:
        """Add the training script's values to the manifest."""
        if not keys:
            return
        builder = self._builder
        client = self.nested(keys)
        if type(client.get("step")) is int:
            builder.objects["step"] = client.pop("step")
        if isinstance(client.get("scheduler"), dict):
            builder.objects["scheduler"] = client.pop("scheduler")
        if client:
            builder.objects["client"] = client
        ranks = self.copies(keys)
        if ranks > 1:
            self._per_rank([client, *(self.nested(keys, copy) for copy in range(1, ranks))])
        else:
            self._tell(keys)
        large = [k for k in keys if k in self._index.tensors and not self._is_small(k)]
        self._spaces.loose(CLIENT, ((k, self._index.tensors[k]) for k in large))
        builder.add_placed("client.inside", CLIENT, self._inside)

    def _per_rank(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        keys = dict.fromkeys(key for rank in ranks for key in rank)
        found = {key: [rank.get(key) for rank in ranks] for key in keys}
        differing = {k: v for k, v in found.items() if any(encode(x) != encode(v[0]) for x in v)}
        if differing:
            self._builder.objects["per_rank"] = {"client": differing}

    def _tell(self, keys: Sequence[str]) -> None:
        """Say whose values these are, if there were several ranks."""
        if self._spaces.mesh.shards * self._spaces.mesh.replicas < 2:
            return
        of: dict[str, None] = {}
        for key in keys:
            blobs = self._index.values.get(key)
            if blobs is None and self._is_small(key):
                blobs = full_chunks(self._index.tensors[key])[0].blobs
            if blobs and blobs[0].rank is not None:
                of[f"{key} (rank {blobs[0].rank})"] = None
        if of:
            shown = ", ".join(list(of)[:8]) + (f" and {len(of) - 8} more" if len(of) > 8 else "")
            text = (
                "DCP keeps one rank's value of a key, and doesn't compare the ranks; what each "
                f"rank had of its own is gone: {shown}"
            )
            self._builder.note("note", text, "client")

    def _is_small(self, key: str) -> bool:
        stored = self._index.tensors[key]
        chunks = full_chunks(stored)
        nbytes = stored.dtype.nbytes(chunks[0].box.numel)
        return len(chunks) == 1 and nbytes <= LARGEST_ARRAY

    def _one_rank_s(self, key: str, blob: Blob) -> LeftOut:
        rank = "one rank" if blob.rank is None else f"rank {blob.rank}"
        text = (
            f"sharded tensors of {rank} inside one pickle: what the other ranks had of them was "
            "never saved (a state dict that wasn't flattened); the optimizer's state, if it was "
            "that, is lost"
        )
        self._builder.note("left-out", text, key)
        return LeftOut("torch.distributed.tensor.DTensor")


def put(root: dict[str | int, Any], path: Path_, value: Any) -> None:
    """Set a value in nested dicts; a list is a dict of its indices until :func:`listed`.

    Raises
    ------
    CorruptError
        If something else than a dict stands on the way, or an index can't be one.
    """
    for step in path[:-1]:
        root = root.setdefault(step, {})
        if type(root) is not dict:
            break
    indices = [step for step in path if isinstance(step, int)]
    if type(root) is not dict or not all(0 <= i < LONGEST_LIST for i in indices):
        raise CorruptError(f"the path {'/'.join(map(str, path))} makes no sense")
    root[path[-1]] = value


def listed(value: Any) -> Any:
    """Make lists of dicts whose keys are indices; what has no value is ``None``."""
    if type(value) is not dict:
        return value
    if value and all(type(k) is int for k in value):
        return [listed(value.get(i)) for i in range(max(value) + 1)]
    return {k: listed(v) for k, v in value.items()}


def _tensors(value: Any) -> Iterator[StoredTensor]:
    """The tensors inside of a value."""
    if isinstance(value, StoredTensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for one in value:
            yield from _tensors(one)


def _is_large(tensor: StoredTensor) -> bool:
    return tensor.numel * item_bytes(tensor.dtype) > LARGEST_ARRAY
