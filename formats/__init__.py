"""Which formats are there, and which of them is at a path?

Formats are found by being there: every module of this package whose name doesn't begin with an
underscore has an object ``FORMAT``.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from pathlib import Path

if __name__ != "reshard.formats":
    raise ImportError("this package is imported as reshard.formats")

from reshard.errors import NotFoundError, RequestError
from reshard.format import Format, Found


@cache
def formats() -> dict[str, Format]:
    """All formats by their names."""
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))
    found = [importlib.import_module(f"{__name__}.{name}").FORMAT for name in names]
    return {f.name: f for f in found}


def named(name: str) -> Format:
    """The format of that name.

    Raises
    ------
    RequestError
        If there is none.
    """
    found = formats().get(name)
    if found is None:
        raise RequestError(f"there is no format {name!r}", hint=f"known: {', '.join(formats())}")
    return found


def detect(path: Path) -> tuple[Format, Found]:
    """The format of the checkpoint at a path (or in the folder that a path names).

    Raises
    ------
    NotFoundError
        If there is nothing at the path, or nothing that any format knows.
    """
    if not path.exists():
        raise NotFoundError("there is nothing there", where=path)
    for found_format in formats().values():
        found = found_format.detect(path)
        if found is not None:
            return found_format, found
    raise NotFoundError(
        "no checkpoint of a known format is there",
        where=path,
        hint=f"known formats: {', '.join(formats())}; name the checkpoint's own folder or file",
    )
