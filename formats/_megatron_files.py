"""What are the files of a Megatron-Core checkpoint called, and what does the first say?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

METADATA = "metadata.json"
"""Written last; names the backend."""

COMMON = "common.pt"
"""All state that isn't sharded."""

LATEST = "latest_checkpointed_iteration.txt"
"""Beside the folders of iterations: which is the last that is complete."""

BACKEND = "sharded_backend"
"""The key of the backend's name."""

_LARGEST = 1 << 16


def described(path: Path) -> dict[str, Any] | None:
    """What a folder's metadata say; ``None`` if they are no metadata of Megatron-Core."""
    try:
        with (path / METADATA).open("rb") as file:
            found = json.loads(file.read(_LARGEST))
    except (OSError, ValueError, RecursionError):
        return None  # some other program's file
    return found if isinstance(found, dict) else None
