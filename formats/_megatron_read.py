"""How are the files of a Megatron-Core checkpoint read into a manifest?

The backend's reader says what is stored; keys become tensors, flat buckets are matched with them,
and all become spaces, groups and objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from reshard.builder import Builder
from reshard.collector import collector_paused
from reshard.errors import CorruptError, IncompleteError, UnsupportedError
from reshard.formats._megatron_buckets import collect
from reshard.formats._megatron_files import BACKEND, METADATA, described
from reshard.formats._megatron_gathered import gathered
from reshard.formats._megatron_match import match
from reshard.formats._megatron_names import check_states, named
from reshard.formats._megatron_parts import Contents
from reshard.formats._megatron_spaces import Spaces
from reshard.formats._megatron_state import State, assign
from reshard.formats._megatron_torch_dist import read_torch_dist
from reshard.formats._megatron_zarr import read_zarr
from reshard.layout import PARAM
from reshard.manifest import Manifest
from reshard.stored import brief

_READERS: Mapping[str, Callable[[Builder], Contents]] = {
    "torch_dist": read_torch_dist,
    "zarr": read_zarr,
}


@collector_paused()
def read_checkpoint(root: Path, name: str) -> Manifest:
    """Read the metadata, the pickles of all values, and where in the files tensors begin.

    Where the optimizer's state was stored without names, weights and masters are read and
    compared (see :mod:`._megatron_match`).
    """
    builder = Builder(name, root, algorithm="crc32")
    contents = _reader(root)(builder)
    buckets, rest = collect(contents.tensors, root)
    found, paths = gathered(builder, contents)
    tensors = named(rest, root)
    if buckets or found:
        tensors |= match((*buckets, *found), tensors, {**contents.paths, **paths}, root)
    if not tensors:
        raise IncompleteError("has no tensors", where=root)
    if bare := check_states(tensors, root):
        some = ", ".join(bare[:5]) + (f" and {len(bare) - 5} more" if len(bare) > 5 else "")
        builder.note("note", f"the optimizer has no state of {some}", "optimizer")
    State(builder, contents).add()
    shapes = {name: part.shape for (name, state), part in tensors.items() if state != PARAM}
    Spaces(builder, contents.world).add(tensors, assign(builder, shapes))
    return builder.build({"shard": contents.world}, None)


def _reader(root: Path) -> Callable[[Builder], Contents]:
    if not (root / METADATA).is_file():
        raise IncompleteError(
            f"has no {METADATA}, which Megatron-Core writes last: the save wasn't finished",
            where=root,
            hint="take an earlier checkpoint",
        )
    found = described(root)
    if found is None or BACKEND not in found:
        raise CorruptError("doesn't say which backend wrote the checkpoint", where=root / METADATA)
    backend, version = found[BACKEND], found.get("sharded_backend_version")
    if backend not in _READERS or version != 1:
        raise UnsupportedError(
            f"was written by the backend {brief(backend)}, version {brief(version)}; this reads "
            f"{' and '.join(_READERS)}, version 1",
            where=root,
        )
    return _READERS[backend]
