"""zreshard: move sharded training state between world sizes, ZeRO stages and formats.

Five lines that read one slice of one weight out of a sharded checkpoint::

    import reshard

    ckpt = reshard.open("checkpoints/run7")
    weight = ckpt["layers.0.weight"]
    print(weight.shape, weight.dtype, weight[:2])

``reshard.convert`` and ``reshard.consolidate`` write; ``docs/`` has the concepts and formats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.lazy import lazily

if TYPE_CHECKING:
    from reshard.api import consolidate, convert, diff, open, open_manifest, prepare, verify
    from reshard.checkpoint import Checkpoint, LazyTensor
    from reshard.conversion import Wanted
    from reshard.errors import ReshardError
    from reshard.execute import Options
    from reshard.manifest import Manifest
    from reshard.report import Report

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "LazyTensor",
    "Manifest",
    "Options",
    "Report",
    "ReshardError",
    "Wanted",
    "__version__",
    "consolidate",
    "convert",
    "diff",
    "open",
    "open_manifest",
    "prepare",
    "verify",
]

_HOME = {
    "Checkpoint": "checkpoint",
    "LazyTensor": "checkpoint",
    "Manifest": "manifest",
    "Options": "execute",
    "Report": "report",
    "ReshardError": "errors",
    "Wanted": "conversion",
    "consolidate": "api",
    "convert": "api",
    "diff": "api",
    "open": "api",
    "open_manifest": "api",
    "prepare": "api",
    "verify": "api",
}


__getattr__ = lazily(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(__all__)
