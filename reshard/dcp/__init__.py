"""Plug-ins for ``torch.distributed.checkpoint``: its ``load`` and ``save`` over this library.

:class:`ZReader` brings a checkpoint of any format into a model of any sharding, without a
conversion; :class:`ZWriter` writes the native format. Torch is imported when one of them is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.lazy import lazily

if TYPE_CHECKING:
    from reshard.dcp.reader import ZReader
    from reshard.dcp.writer import ZWriter

__all__ = ["ZReader", "ZWriter"]

_HOME = {"ZReader": "reader", "ZWriter": "writer"}


__getattr__ = lazily(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(__all__)
