"""Plug-ins for ``torch.distributed.checkpoint``: its ``load`` and ``save`` over this library.

:class:`ZReader` brings a checkpoint of any format into a model of any sharding, without a
conversion; :class:`ZWriter` writes the native format. Torch is imported when one of them is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reshard.dcp.reader import ZReader
    from reshard.dcp.writer import ZWriter

__all__ = ["ZReader", "ZWriter"]

_HOME = {"ZReader": "reader", "ZWriter": "writer"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch is loaded only then."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
