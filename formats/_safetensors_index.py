"""Which file holds which tensor, where a model is cut in several safetensors files?

``model.safetensors.index.json`` says so: ``weight_map`` (tensor to file) and ``metadata``. It
comes from strangers, and its values become paths: only plain relative names are let through.
(Links are followed: the hub's cache is made of them.)

Sources: ``transformers`` and ``huggingface_hub``, which write it (``indent=2, sort_keys=True``),
and whose loaders refuse an index above 10 MiB and names that leave the folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from reshard.errors import CorruptError, IncompleteError, UnsafeError
from reshard.formats._safetensors_json import JsonObject, is_text, parse_json, refuse
from reshard.source import source_error
from reshard.stored import brief

INDEX_LIMIT = 10 << 20
"""Largest index that the hub's loaders read."""

MODEL = "model"
"""How the names of a model's files begin."""

SUFFIX = ".safetensors.index.json"
"""How the name of an index ends."""


@dataclass(frozen=True, slots=True)
class Index:
    """The content of an index.

    Parameters
    ----------
    files
        Tensor to file, relative to the index's folder.
    metadata
        Plain data; ``total_size`` is the bytes of all tensors.
    """

    files: Mapping[str, str]
    metadata: Mapping[str, object]


def read(path: Path) -> Index:
    """Read and check an index.

    Raises
    ------
    UnsafeError
        If a name leaves the folder.
    CorruptError
        If it is too large, isn't JSON, or has values that aren't text; all problems at once.
    """
    content = parse_json(_bytes(path), path, "the index")
    if not isinstance(content, JsonObject):
        raise CorruptError(f"the index is {brief(content)}, not an object", where=path)
    problems = [f"{brief(key)} occurs more than once" for key in content.repeated]
    fields = content.fields
    files = _files(fields.get("weight_map"), problems)
    metadata = fields.get("metadata")
    if metadata is None:
        metadata = JsonObject()
    if not isinstance(metadata, JsonObject):
        problems.append(f"metadata is {brief(metadata)}, not an object")
        metadata = JsonObject()
    refuse(problems, path, "the index")
    unsafe = [f"{brief(name)} → {brief(file)}" for name, file in files.items() if not _plain(file)]
    if unsafe:
        raise UnsafeError(
            f"names files outside its folder: {', '.join(unsafe[:5])}"
            + (f" and {len(unsafe) - 5} more" if len(unsafe) > 5 else ""),
            where=path,
            hint="nothing was read; don't trust whatever made this index",
        )
    return Index(files, metadata.fields)


def _bytes(path: Path) -> bytes:
    try:
        nbytes = path.stat().st_size
        if nbytes > INDEX_LIMIT:
            raise CorruptError(
                f"the index has {nbytes} bytes; loaders refuse more than {INDEX_LIMIT}", where=path
            )
        return path.read_bytes()
    except OSError as error:
        raise source_error(error, path) from error


def _files(found: object, problems: list[str]) -> dict[str, str]:
    if not isinstance(found, JsonObject):
        what = "there is no weight_map" if found is None else f"weight_map is {brief(found)}"
        problems.append(f"{what}; an object (tensor to file) is due")
        return {}
    if not found:
        problems.append("weight_map is empty")
    problems.extend(f"weight_map: {brief(key)} occurs more than once" for key in found.repeated)
    files: dict[str, str] = {}
    for name, file in found.fields.items():
        if not is_text(name):
            problems.append(f"weight_map: the name {brief(name)} isn't valid Unicode")
        elif not is_text(file):
            problems.append(f"weight_map: the file of {brief(name)} is {brief(file)}, not text")
        else:
            files[name] = str(file)
    return files


def _plain(file: str) -> bool:
    """Whether a file's name stays beneath its folder, on every system."""
    if "\0" in file or "\\" in file or re.match("[A-Za-z]:", file):
        return False
    return all(part not in ("", ".", "..") for part in file.split("/"))


def encode(files: Mapping[str, str], nbytes: int) -> bytes:
    """Write an index as ``transformers`` does.

    Parameters
    ----------
    files
        Tensor to file.
    nbytes
        Bytes of all tensors.
    """
    content = {"metadata": {"total_size": nbytes}, "weight_map": dict(files)}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def refuse_missing_files(path: Path, files: Iterable[str]) -> None:
    """See that the files which an index names are there.

    Raises
    ------
    IncompleteError
        If some aren't.
    """
    missing = sorted(f for f in files if not (path.parent / f).is_file())
    if missing:
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        raise IncompleteError(
            f"the index names files that aren't there: {', '.join(missing[:10])}{more}",
            where=path,
            hint="copy the missing files too",
        )
