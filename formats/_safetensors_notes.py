"""What does zreshard note in a safetensors file, so that reading it gives back what was written?

The format knows names, not states. Weights and buffers are written under their own names and
optimizer state as ``optimizer.<state>.<name>``; two keys of the file's free text say the rest:

``zreshard``
    JSON, only where there is something to say: ``version`` 1, ``states`` (those of optimizer
    state), ``buffers`` (names that aren't weights), ``aliases`` (tied name to stored name).
``zreshard.digests``
    JSON: ``{"crc64nvme": {name in the file: 16 hex digits}}``. With it a lone file can be checked.

Loaders leave unknown keys unread. Files without these keys hold weights only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from reshard.digest import CRC64NVME
from reshard.errors import CorruptError, UnsupportedError
from reshard.formats._safetensors_json import JsonObject, is_text, parse_json
from reshard.layout import BUFFER, CLIENT, PARAM, TensorKey
from reshard.stored import brief

NOTES = "zreshard"
"""Key of the free text for states, buffers and aliases."""

DIGESTS = "zreshard.digests"
"""Key of the free text for the tensors' digests."""

_HEX = re.compile("[0-9a-f]{16}")
_OPTIMIZER = "optimizer."
_VERSION = 1
_PLAIN_STATES = frozenset((PARAM, BUFFER, CLIENT))


@dataclass(frozen=True, slots=True)
class Notes:
    """What a file says of its tensors beyond the format.

    Parameters
    ----------
    states
        States of its optimizer state.
    buffers
        Names of its buffers.
    aliases
        Tied name to stored name.
    """

    states: tuple[str, ...] = ()
    buffers: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)

    def key(self, label: str) -> TensorKey:
        """Name and state of the tensor that has this label in the file."""
        if label in self.buffers:
            return label, BUFFER
        for state in self.states:
            if label.startswith(f"{_OPTIMIZER}{state}."):
                return label[len(_OPTIMIZER) + len(state) + 1 :], state
        return label, PARAM

    def encode(self) -> dict[str, str]:
        """The entry of the free text; none where there is nothing to say."""
        if not (self.states or self.buffers or self.aliases):
            return {}
        content: dict[str, object] = {"version": _VERSION}
        if self.states:
            content["states"] = self.states
        if self.buffers:
            content["buffers"] = sorted(self.buffers)
        if self.aliases:
            content["aliases"] = dict(sorted(self.aliases.items()))
        return {NOTES: _json(content)}


def label_of(key: TensorKey) -> str:
    """What a tensor is called in a file."""
    name, state = key
    return name if state in _PLAIN_STATES else f"{_OPTIMIZER}{state}.{name}"


def read_notes(metadata: Mapping[str, str], path: Path) -> Notes:
    """The notes in a file's free text; empty ones where another program wrote the file.

    Raises
    ------
    UnsupportedError
        If a newer release wrote them.
    CorruptError
        If they aren't what they should be.
    """
    if NOTES not in metadata:
        return Notes()
    content = _fields(metadata[NOTES], NOTES, path)
    version = content.get("version")
    if type(version) is int and version > _VERSION:
        raise UnsupportedError(
            f"was written by a newer zreshard (version {brief(version)} of its notes, "
            f"this release knows {_VERSION})",
            where=path,
            hint="install a newer zreshard",
        )
    states = content.get("states", [])
    buffers = content.get("buffers", [])
    aliases = content.get("aliases", JsonObject())
    if (
        type(version) is not int
        or version != _VERSION
        or not isinstance(states, list)
        or not isinstance(buffers, list)
        or not isinstance(aliases, JsonObject)
        or aliases.repeated
        or not all(map(is_text, chain(states, buffers, *aliases)))
        or _PLAIN_STATES & set(states)
    ):
        raise _broken(NOTES, path)
    return Notes(
        tuple(map(str, states)),
        frozenset(map(str, buffers)),
        {alias: str(name) for alias, name in aliases},
    )


def encode_digests(digests: Mapping[str, int]) -> dict[str, str]:
    """The entry of the free text for digests; its length depends on the labels only."""
    content = {label: CRC64NVME.hex(value) for label, value in digests.items()}
    return {DIGESTS: _json({CRC64NVME.name: content})}


def read_digests(metadata: Mapping[str, str], path: Path) -> dict[str, int]:
    """The digests in a file's free text, by label.

    Raises
    ------
    CorruptError
        If they aren't what they should be.
    """
    if DIGESTS not in metadata:
        return {}
    content = _fields(metadata[DIGESTS], DIGESTS, path).get(CRC64NVME.name)
    if not isinstance(content, JsonObject) or content.repeated:
        raise _broken(DIGESTS, path)
    if not all(isinstance(value, str) and _HEX.fullmatch(value) for _, value in content):
        raise _broken(DIGESTS, path)
    return {label: int(str(value), 16) for label, value in content}


def free_text(metadata: Mapping[str, str], aliases: Iterable[str]) -> dict[str, str]:
    """The part of a file's text that others wrote: what the next writer carries on."""
    own = {NOTES, DIGESTS, *aliases}
    return {key: value for key, value in metadata.items() if key not in own}


def _fields(text: str, key: str, path: Path) -> dict[str, object]:
    content = parse_json(text.encode(), path, f"the metadata {key!r}")
    if not isinstance(content, JsonObject) or content.repeated:
        raise _broken(key, path)
    return content.fields


def _broken(key: str, path: Path) -> CorruptError:
    return CorruptError(
        f"the metadata {key!r} isn't what zreshard writes there",
        where=path,
        hint="something has changed it since; use another copy of the file",
    )


def _json(content: object) -> str:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))
