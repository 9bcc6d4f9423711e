"""What does the manifest of a checkpoint say whose payload the ranks have written?

The values that the ranks sent are read as those of a distributed checkpoint are, safely: they give
the parameter groups and the script's state. Which group a parameter is in is known only now, so
that spaces name a group for each of their entries.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from reshard.builder import Builder
from reshard.dcp.sheet import Sheet
from reshard.errors import UnsupportedError
from reshard.formats._dcp_blobs import Blobs
from reshard.formats._dcp_mesh import Mesh
from reshard.formats._dcp_metadata import Stored
from reshard.formats._dcp_optimizer import Optimizers
from reshard.formats._dcp_read import check_model, keep
from reshard.formats._dcp_spaces import Spaces
from reshard.formats._dcp_values import Script
from reshard.formats._torch import Values
from reshard.layout import FlatSpace, Layout
from reshard.manifest import Manifest
from reshard.torchfile import open_torch_file


@dataclass(frozen=True, slots=True)
class _Told(Spaces):
    """Is told of spaces, and keeps only which names are in which group."""

    groups: dict[int, list[str]] = field(default_factory=dict)

    def add(
        self,
        name: str,
        tensors: Iterable[tuple[str, Mapping[str, Stored]]],
        group: int | None = None,
    ) -> None:
        """See :meth:`Spaces.add`."""
        if group is not None:
            self.groups.setdefault(group, []).extend(one for one, _ in tensors)


class _Sent(Script):
    """Values that the ranks sent."""

    def __init__(self, spaces: Spaces, sheet: Sheet, sent: Mapping[str, Any]) -> None:
        super().__init__(spaces, sheet.index)
        self._sent = sent

    def value(self, key: str, copy: int = 0) -> Any:
        """See :meth:`Script.value`."""
        return self._sent[key]


def manifest_of(sheet: Sheet, sent: Mapping[str, Any]) -> Manifest:
    """The target with everything that isn't payload.

    Parameters
    ----------
    sheet
        Where the payload lies.
    sent
        Key to what was sent: an array for a tensor, the bytes of a ``torch.save`` file for another
        value.
    """
    root = sheet.manifest.root
    builder = Builder(sheet.manifest.format, root)
    spaces = _Told(builder, Blobs(root), Mesh(sheet.manifest.layout.world, 1, False, True))
    values = {k: _plain(k, v) if isinstance(v, bytes) else v for k, v in sent.items()}
    script = _Sent(spaces, sheet, values)
    optimizers = Optimizers(spaces, script, sheet.index, sheet.keys.model.values())
    groups = [optimizers.add(i, one) for i, one in enumerate(sheet.keys.optimizers)]
    check_model(root, sheet.keys, groups)
    script.add(sheet.keys.others)
    held = [set(spaces.groups.get(i, ())) for i in range(len(builder.groups))]
    keep(builder, sheet.keys, groups, held)
    layout = sheet.manifest.layout
    named = {name: group for group, names in spaces.groups.items() for name in names}
    grouped = tuple(_in_groups(space, named) for space in layout.spaces)
    return replace(
        sheet.manifest,
        layout=Layout(grouped, layout.mesh, layout.stage),
        groups=tuple(builder.groups),
        objects=builder.objects,
    )


def _in_groups(space: FlatSpace, named: Mapping[str, int]) -> FlatSpace:
    """The space with the group of each of its entries, if all of them have one."""
    groups = [named.get(entry.name) for entry in space.entries]
    if not space.name.startswith("optimizer") or None in groups:
        return space
    found = tuple(g for g in groups if g is not None)
    return replace(space, group=found[0] if len(set(found)) == 1 else found)


def _plain(key: str, data: bytes) -> Any:
    """A value as plain data, of the bytes that torch would have written."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        opened = open_torch_file(file.name)
        values = Values(Builder("", opened.path), opened)
        found = values.plain(opened.value, key)
        if opened.opaque or values.tensors:
            what = ", ".join(opened.opaque) or "a large tensor inside of a tuple or an object"
            raise UnsupportedError(
                f"holds {what}, which a native checkpoint can't hold",
                where=key,
                hint="give numbers, texts, lists, dicts and tensors: an object's state_dict(), "
                "for one",
            )
        return found
