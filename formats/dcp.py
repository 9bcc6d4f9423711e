"""PyTorch's distributed checkpoints (DCP): a folder with ``.metadata`` and ``*.distcp`` files.

What FSDP2, HSDP, tensor parallelism and FSDP1's sharded state dicts are saved as. Neither torch is
imported nor code from a file run. The parts: what the metadata say (``_dcp_metadata``), where in a
blob a tensor's bytes are (``_dcp_blobs``), who held what (``_dcp_mesh``), what the keys mean
(``_dcp_keys``), and how these become spaces (``_dcp_spaces``), parameter groups
(``_dcp_optimizer``) and values (``_dcp_values``); ``_dcp_read`` joins them. Writing begins in
``_dcp_write``.
"""

from __future__ import annotations

from pathlib import Path

from reshard.format import Draft, Found, Request
from reshard.formats._dcp_names import METADATA, OF_RANK, OTHER_LIBRARY
from reshard.manifest import Manifest


class Dcp:
    """The format of torch's distributed checkpoints; see the module."""

    name = "dcp"
    title = "PyTorch's distributed checkpoints (DCP), as FSDP2 and FSDP save them"
    writes = True
    sharded = True

    def detect(self, path: Path) -> Found | None:
        """A folder with ``.metadata``, or with data files that should have one."""
        if path.name == METADATA and path.is_file():
            return Found(path.parent)
        if not path.is_dir():
            return None
        names = {p.name for p in path.iterdir()}
        if METADATA in names or any(OF_RANK.fullmatch(n) for n in names):
            return Found(path)
        if any(n.endswith(".distcp") for n in names):
            return Found(path)
        other = OTHER_LIBRARY in names and any(n.startswith("model_") for n in names)
        return Found(path) if other else None

    def open(self, root: Path) -> Manifest:
        """Read the metadata, the pickles of all values, and where in the files tensors begin."""
        from reshard.formats._dcp_read import read_checkpoint

        return read_checkpoint(root, self.name)

    def draft(self, source: Manifest, request: Request, target: Path) -> Draft:
        """Lay out files as FSDP2 saves them, which torch's own ``dcp.load`` reads."""
        from reshard.formats import _dcp_write

        return _dcp_write.draft(source, request, target, self.name)


FORMAT = Dcp()
