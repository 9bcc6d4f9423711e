"""In which folder does the array of one state of a flat space lie?

The name is the space's, a dot, and the state's, percent-encoded. Nothing but ASCII letters,
digits and ``.-_~%`` is in it, it begins with a letter or a digit, and two arrays never share one:
the last dot is the one between the two names. Names of tensors never become paths.
"""

from __future__ import annotations

import re
from urllib.parse import quote

SPACE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""What a space can be called."""

RESERVED = frozenset(("zarr.json", "zreshard.json"))
"""Names that other files of the folder have."""

LONGEST = 255
"""Bytes of a file's name that every file system holds."""


def array_path(space: str, state: str) -> str:
    """The folder of an array, relative to the checkpoint: ``group0.exp_avg``.

    Parameters
    ----------
    space
        Matches :data:`SPACE_NAME`.
    state
        Any text that is valid Unicode.
    """
    assert SPACE_NAME.fullmatch(space), space
    return f"{space}.{quote(state, safe='').replace('.', '%2E')}"
