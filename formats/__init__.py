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


def detect(path: Path, name: str | None = None) -> tuple[Format, Found]:
    """The format of the checkpoint at a path (or in the folder that a path names).

    Parameters
    ----------
    path
        The place.
    name
        The only format that is looked for; ``None`` for any.

    Raises
    ------
    NotFoundError
        If there is nothing at the path, or nothing that any format knows.
    RequestError
        If there are checkpoints of several formats.
    """
    found = detect_all(path, name)
    if len(found) > 1:
        listed = ", ".join(f"{f.name} ({one.root})" for f, one in found)
        raise RequestError(
            f"holds checkpoints of several formats: {listed}",
            where=path,
            hint="name the folder or the file of the one that you mean, or its format "
            "(--source-format)",
        )
    return found[0]


def detect_all(path: Path, name: str | None = None) -> list[tuple[Format, Found]]:
    """The checkpoints at a path, of each format the one that it recognises.

    Raises
    ------
    NotFoundError
        If there is none.
    """
    if not path.exists():
        raise NotFoundError("there is nothing there", where=path)
    wanted = formats().values() if name is None else (named(name),)
    found = [(f, one) for f in wanted if (one := f.detect(path)) is not None]
    parts = {part for _, one in found for part in one.parts}
    whole = [(f, one) for f, one in found if f.name not in parts]
    if not whole:
        raise NotFoundError(
            f"no checkpoint of {'a known format' if name is None else f'the format {name}'} is "
            "there",
            where=path,
            hint=f"known formats: {', '.join(formats())}; name the checkpoint's own folder or file",
        )
    return whole
