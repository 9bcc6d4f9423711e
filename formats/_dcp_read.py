"""How are the files of a distributed checkpoint read into a manifest?

The metadata say what there is, keys are sorted into the model's, the optimizers' and the script's,
and all become spaces, groups and values. What looks like a checkpoint and can't be read is refused
with its reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reshard.builder import Builder
from reshard.collector import collector_paused
from reshard.errors import IncompleteError, UnsupportedError
from reshard.formats._dcp_blobs import Blobs, check_files, orphans
from reshard.formats._dcp_keys import Keys, sort_keys
from reshard.formats._dcp_mesh import Mesh, mesh_of
from reshard.formats._dcp_metadata import Index, read
from reshard.formats._dcp_names import METADATA, OTHER_LIBRARY
from reshard.formats._dcp_optimizer import Group, Optimizers
from reshard.formats._dcp_spaces import Spaces
from reshard.formats._dcp_values import Script
from reshard.formats._dcp_write_keys import OBJECTS
from reshard.layout import PARAM
from reshard.manifest import Manifest

_LATER = 60.0
"""Seconds by which a data file must be younger than the metadata to be worth a note."""


@collector_paused()
def read_checkpoint(root: Path, name: str) -> Manifest:
    """Read the metadata, the pickles of all values, and where in the files tensors begin."""
    _refuse_others(root)
    index = read(root)
    _refuse_megatron(root, index)
    check_files(root, index)
    _refuse_local_state(root, index)
    keys = sort_keys(index)
    builder = Builder(name, root, algorithm="crc32")
    mesh = mesh_of(index)
    spaces = Spaces(builder, Blobs(root, compressed=True), mesh)
    script = Script(spaces, index)
    optimizers = Optimizers(spaces, script, index, keys.model.values())
    groups = [optimizers.add(i, one) for i, one in enumerate(keys.optimizers)]
    check_model(root, keys, groups)
    spaces.loose(PARAM, ((name, index.tensors[key]) for key, name in keys.model.items()))
    script.add(keys.others)
    held = [
        {e.name for s in builder.spaces if s.group == i for e in s.entries}
        for i in range(len(builder.groups))
    ]
    keep(builder, keys, groups, held)
    _notes(builder, root, index)
    return builder.build(_axes(mesh), 3 if mesh.cut else None)


def _axes(mesh: Mesh) -> dict[str, int]:
    axes = {"shard": mesh.shards}
    if mesh.replicas > 1:
        axes["replicate"] = mesh.replicas
    return axes


# -- what can't be read ---------------------------------------------------------------------------


def _refuse_megatron(root: Path, index: Index) -> None:
    if (root / "common.pt").is_file() or any(k.startswith("common_state/") for k in index.values):
        whole = (root / "metadata.json").is_file()
        raise UnsupportedError(
            "is a checkpoint of Megatron-Core, whose keys mean something else"
            + ("" if whole else "; its metadata.json, which is written last, is missing"),
            where=root,
            hint="read it as megatron"
            if whole
            else "the save wasn't finished: take an earlier one",
        )


def _refuse_others(root: Path) -> None:
    if (root / OTHER_LIBRARY).is_file() and not (root / METADATA).exists():
        raise UnsupportedError(
            "is a checkpoint of another library (torch_checkpointing), not of torch's own DCP",
            where=root,
            hint="load it with that library, and save it with torch.distributed.checkpoint",
        )


def _refuse_local_state(root: Path, index: Index) -> None:
    flat = [key for key in index.tensors if key.rpartition(".")[2] == "_flat_param"]
    if flat:
        raise UnsupportedError(
            f"holds FSDP1's local state ({flat[0]}): what each rank had in its flat parameters. "
            "Names and shapes of the parameters aren't in it, and where they have keys of their "
            "own, DCP kept one rank's part and dropped all others",
            where=root,
            hint="save it again with StateDictType.SHARDED_STATE_DICT",
        )


def check_model(root: Path, keys: Keys, groups: list[tuple[Group, ...]]) -> None:
    """Every parameter that an optimizer steps must be in the model, if there is one."""
    there = set(keys.model.values())
    names = dict.fromkeys(n for some in groups for group in some for n in group.names)
    missing = [name for name in names if name not in there]
    if there and missing:
        raise IncompleteError(
            f"the optimizer has {missing[0]!r} (and {len(missing) - 1} more), which the model "
            f"({keys.prefix or 'at the top'}) lacks",
            where=root,
            hint="keys were lost from the metadata: save the checkpoint again",
        )


# -- what is kept beside tensors ------------------------------------------------------------------


def keep(
    builder: Builder, keys: Keys, groups: list[tuple[Group, ...]], held: list[set[str]]
) -> None:
    """Keep where things stood, as far as it isn't the usual, and parameters without state.

    Parameters
    ----------
    builder
        The manifest in the making.
    keys, groups
        What was found.
    held
        The names that the spaces of each group have.
    """
    own: dict[str, Any] = {}
    if keys.model and keys.prefix != "model.":
        own["model"] = keys.prefix
    prefixes = [list(o.prefix) for o in keys.optimizers]
    if prefixes not in ([], [["optim"]]):
        own["optimizers"] = prefixes
    if any(o.flat for o in keys.optimizers):
        own["flat"] = True
    named = [list(group.names) for some in groups for group in some]
    if any(set(names) != there for names, there in zip(named, held, strict=True)):
        own["params"] = named
    if own:
        builder.objects[OBJECTS] = own


def _notes(builder: Builder, root: Path, index: Index) -> None:
    if left := orphans(root, index):
        some = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        text = f"files of an earlier save that aren't part of this one: {some}"
        builder.note("note", text, root.name)
    metadata = root / METADATA
    if not metadata.is_file():
        return
    when = metadata.stat().st_mtime
    times = {name: (root / name).stat().st_mtime for name in {b.file for _, b in index.blobs()}}
    later = sorted(name for name, time in times.items() if time > when + _LATER)
    if later and min(times.values()) <= when:
        text = (
            f"written after {METADATA}, unlike others: {', '.join(later[:5])}. If a save into "
            "this folder was interrupted, values of two steps are mixed"
        )
        builder.note("note", text, root.name)
