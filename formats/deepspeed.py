"""DeepSpeed's ZeRO checkpoints: stages 1, 2 and 3, at any world size.

A checkpoint is a folder named by a tag, with a file of pickled state a rank; the file ``latest``
beside it names the tag. Nothing of DeepSpeed or torch is imported, and no code from a file runs.
The parts: which files there are (``_deepspeed_names``), what their pickles say and whether the
ranks agree (``_deepspeed_load``), where the optimizer's state lies (``_deepspeed_optimizer``) and
where the model's does (``_deepspeed_model``), tensor parallelism (``_deepspeed_tensor``), universal
checkpoints (``_deepspeed_universal``); ``_deepspeed_read`` joins them. Writing begins in
``_deepspeed_write``.
"""

from __future__ import annotations

from pathlib import Path

from reshard.format import Draft, Found, Request
from reshard.formats._deepspeed_names import find_tag
from reshard.manifest import Manifest


class DeepSpeed:
    """The DeepSpeed format; see the module."""

    name = "deepspeed"
    title = "DeepSpeed ZeRO checkpoints of stages 1, 2 and 3, and universal folders"
    writes = True
    sharded = True

    def detect(self, path: Path) -> Found | None:
        """A tag's folder, or a folder whose ``latest`` names one."""
        found = find_tag(path)
        return None if found is None else Found(*found)

    def open(self, root: Path) -> Manifest:
        """Read what all ranks' files say; no payload."""
        from reshard.formats._deepspeed_read import read_checkpoint

        return read_checkpoint(root, self.name)

    def draft(self, source: Manifest, request: Request, target: Path) -> Draft:
        """Lay out files that DeepSpeed resumes from."""
        from reshard.formats import _deepspeed_write

        return _deepspeed_write.draft(source, request, target)


FORMAT = DeepSpeed()
