"""Files of ``torch.save``: a model's state dict, or one beside an optimizer's.

A checkpoint is a ``.pt``, ``.pth``, ``.bin`` or ``.ckpt`` file, a folder with
``pytorch_model.bin``, or one with ``pytorch_model.bin.index.json`` and the files that it names.
Neither torch nor any code from a file runs. Everything is whole, on one rank.

What lies where: ``_torch_dict`` (which part of a file is the model, which the optimizer),
``_torch_optimizer`` (whose state is whose), ``_torch_write`` (how a file is written).
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from reshard.builder import Builder, Placed
from reshard.collector import collector_paused
from reshard.errors import IncompleteError, InconsistentError, UnsupportedError
from reshard.format import AS_WRITTEN, Draft, Found, Request
from reshard.formats import _safetensors_index as indexes
from reshard.formats._torch import Values, placed
from reshard.formats._torch_dict import MODEL, OBJECTS, Parts, parts_of
from reshard.formats._torch_optimizer import Optimizer, named_groups, names_file
from reshard.layout import CLIENT, PARAM, Entry
from reshard.manifest import Manifest
from reshard.pickle_stubs import Opaque
from reshard.stored import StoredTensor, brief
from reshard.torchfile import TorchFile, open_torch_file

SUFFIXES = (".pt", ".pth")
"""How the names of such files end."""

SHARED = (".bin", ".ckpt")
"""Endings that other programs use too: the first bytes decide."""

INDEX_SUFFIX = ".bin.index.json"
INDEX = "pytorch_model" + INDEX_SUFFIX
"""What transformers calls the index of a model in several files."""

_RANKS = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_\d+|mp_rank_\d+_model_states|rank_?\d+_of_\d+|_optim_states\.pt$"
)
"""Names of files that are one rank's part of something."""


class Torch:
    """The format of ``torch.save``; see the module."""

    name = "torch"
    title = "torch.save: a state dict, or one beside an optimizer's, in one file"
    writes = True
    sharded = False

    def detect(self, path: Path) -> Found | None:
        """A file that is a zip with a pickle, or begins like an older one; or a folder of them."""
        if path.is_dir():
            return Found(path) if _in_folder(path) is not None else None
        if path.name.endswith((*SUFFIXES, INDEX_SUFFIX)) or _has_pickle(path):
            return Found(path)
        return Found(path) if path.name.endswith(SHARED) and _is_old(path) else None

    @collector_paused()
    def open(self, root: Path) -> Manifest:
        """Read what the pickles say; no payload.

        Raises
        ------
        UnsupportedError
            If a file holds no state dict, one rank's part of a checkpoint, or is of torch
            before 1.6.
        IncompleteError
            If a file that an index names isn't there, or lacks tensors.
        InconsistentError
            If an optimizer's state doesn't fit the model.
        """
        path = root if not root.is_dir() else root / str(_in_folder(root))
        reading = _Reading(root)
        if path.name.endswith(INDEX_SUFFIX):
            reading.add_indexed(path)
        else:
            reading.add_file(path)
        return reading.manifest()

    def draft(self, source: Manifest, request: Request, target: Path) -> Draft:
        """Lay out one file, or ``pytorch_model.bin`` in a folder."""
        from reshard.formats import _torch_write

        return _torch_write.draft(source, request, target)


FORMAT = Torch()


def _in_folder(folder: Path) -> str | None:
    """What transformers would load from a folder."""
    return next((name for name in (INDEX, MODEL) if (folder / name).is_file()), None)


def _has_pickle(path: Path) -> bool:
    """Whether a file is a zip as torch writes it, whatever its name."""
    try:
        with path.open("rb") as file:
            if file.read(4) != b"PK\3\4":
                return False
            with zipfile.ZipFile(file) as archive:
                return any(
                    n.count("/") == 1 and n.endswith("/data.pkl") for n in archive.namelist()
                )
    except (OSError, zipfile.BadZipFile):
        return False  # detection only asks; whoever opens the file says what is wrong with it


def _is_old(path: Path) -> bool:
    """Whether a file begins like those of torch before 1.6, which get an error of their own."""
    try:
        with path.open("rb") as file:
            return file.read(1) == b"\x80"  # a pickle
    except OSError:
        return False


class _Reading:
    """A manifest in the making."""

    def __init__(self, root: Path) -> None:
        self.builder = Builder(FORMAT.name, root, algorithm="crc32")
        self._kept: dict[str, Any] = {}

    def manifest(self) -> Manifest:
        """Everything that was added."""
        if self._kept:
            self.builder.objects[OBJECTS] = self._kept
        return self.builder.build({"shard": 1}, None)

    # -- one file -----------------------------------------------------------------------------

    def add_file(self, path: Path) -> None:
        """Take everything that a file holds."""
        if _RANKS.search(path.name):
            raise UnsupportedError(
                "is one rank's part of a checkpoint",
                where=path,
                hint="open the folder that holds the files of all ranks; what FSDP calls a local "
                "state dict can only be loaded by the same job at the same world size, which "
                "then should save a sharded one (torch.distributed.checkpoint)",
            )
        file = open_torch_file(path)
        parts = parts_of(file.value, path)
        shapes = self._model(file, parts.model)
        others = Values(self.builder, file)
        written: dict[str, Any] = {"model": parts.model_key, "optimizer": parts.optimizer_key}
        if parts.optimizer is not None:
            groups = named_groups(parts.optimizer, path)
            if groups is None:
                self.builder.note(
                    "note",
                    "the optimizer's state is by numbers, and is kept so: to have it by name, list "
                    f"the parameters' names, in the optimizer's order, in {names_file(path).name}",
                    path.name,
                )
                self._kept["optimizer"] = others.plain(parts.optimizer, "optimizer")
            else:
                Optimizer(self.builder, file, shapes).add(groups)
                written["groups"] = [list(group.names) for group in groups]
        self.builder.objects[OBJECTS + AS_WRITTEN] = written
        client = {key: others.plain(value, str(key)) for key, value in parts.others.items()}
        if type(client.get("step")) is int:
            self.builder.objects["step"] = client.pop("step")
        if isinstance(client.get("scheduler"), dict):
            self.builder.objects["scheduler"] = client.pop("scheduler")
        if client:
            self.builder.objects["client"] = client
        self.builder.add_placed(CLIENT, CLIENT, others.tensors)

    def _model(
        self,
        file: TorchFile,
        model: Mapping[str, Any],
        wanted: Iterable[str] | None = None,
        space: str = PARAM,
    ) -> dict[str, tuple[int, ...]]:
        """Add the tensors of a state dict; returns the shapes of all, tied ones too."""
        taken = model if wanted is None else {name: model[name] for name in wanted}
        rows: list[Placed] = []
        shapes: dict[str, tuple[int, ...]] = {}
        stored: dict[tuple[object, ...], str] = {}
        for name, value in taken.items():
            if isinstance(value, StoredTensor):
                shapes[name] = value.shape
                place = (value.storage.key, value.offset, value.shape, value.strides, value.dtype)
                first = stored.setdefault(place, name) if value.numel else name
                if first != name:
                    self.builder.aliases[name] = first
                else:
                    rows.append(placed(self.builder, file, value, Entry(name, value.shape)))
            else:
                self._other(file, name, value)
        self.builder.add_placed(space, PARAM, rows)
        return shapes

    def _other(self, file: TorchFile, name: str, value: object) -> None:
        """A value of a state dict that isn't a plain tensor."""
        if isinstance(value, Opaque) and not name.endswith("_extra_state"):
            local = "sharded_tensor" in value.qualname or name.endswith("_flat_param")
            raise UnsupportedError(
                f"{name} is an object of {value.qualname}, not a tensor",
                where=file.path,
                hint=_LOCAL if local else "save whole tensors: full_tensor(), dequantize()",
            )
        values = self._kept.setdefault("values", {})
        values[name] = Values(self.builder, file).plain(value, name)

    # -- several files ------------------------------------------------------------------------

    def add_indexed(self, path: Path) -> None:
        """Take from each file the tensors that an index assigns to it."""
        index = indexes.read(path)
        wanted: dict[str, list[str]] = {}
        for name, file in index.files.items():
            wanted.setdefault(file, []).append(name)
        indexes.refuse_missing_files(path, wanted)
        for number, (name, labels) in enumerate(sorted(wanted.items())):
            self._shard(path, path.parent / name, labels, number)

    def _shard(self, index: Path, path: Path, labels: list[str], number: int) -> None:
        file = open_torch_file(path)
        parts = parts_of(file.value, path)
        if parts != Parts(parts.model):
            raise InconsistentError("isn't a state dict alone", where=path)
        lacking = sorted(set(labels) - set(parts.model))
        if lacking:
            raise IncompleteError(
                f"the index promises {brief(lacking[0])} in {path.name}, which doesn't hold it",
                where=index,
                hint="a file is of another version of the model; copy all files again",
            )
        stale = sorted(set(parts.model) - set(labels))
        if stale:
            text = f"holds {brief(stale[0])}, which the index doesn't assign to it"
            self.builder.note("note", text, path.name)
        self._model(file, parts.model, labels, f"{PARAM}.{number}")


_LOCAL = (
    "it is a rank's slice of FSDP's flat parameters, whose names and shapes the file doesn't say: "
    "load it in the same job at the same world size, and save a sharded state dict "
    "(torch.distributed.checkpoint) there"
)
