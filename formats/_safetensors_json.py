"""How is JSON of strangers read, so that nothing in it can be read in two ways?

Python's parser takes more than JSON, and keeps the last of two values of one key. Here that is
seen and said, with all problems of a document in one error.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from reshard.errors import CorruptError

_MOST_SHOWN = 20


def refuse(problems: Sequence[str], path: Path, what: str) -> None:
    """Raise one error for all problems of a part of a file, if there are any."""
    if not problems:
        return
    shown = list(problems[:_MOST_SHOWN])
    if len(problems) > _MOST_SHOWN:
        shown.append(f"and {len(problems) - _MOST_SHOWN} more")
    if len(problems) == 1:
        raise CorruptError(f"a problem in {what}: {shown[0]}", where=path)
    lines = "".join(f"\n  - {p}" for p in shown)
    raise CorruptError(f"{len(problems)} problems in {what}:{lines}", where=path)


class JsonObject(tuple[tuple[str, object], ...]):
    """A JSON object as it is written: its pairs of a key and a value, in order."""

    __slots__ = ()

    @property
    def fields(self) -> dict[str, object]:
        """Its values by key; of a key that is repeated the last."""
        return dict(self)

    @property
    def repeated(self) -> tuple[str, ...]:
        """The keys that it has more than once."""
        if len({key for key, _ in self}) == len(self):
            return ()
        counts = Counter(key for key, _ in self)
        return tuple(key for key, count in counts.items() if count > 1)


def parse_json(
    raw: bytes,
    path: Path,
    what: str,
    make: Callable[[list[tuple[str, object]]], object] = JsonObject,
) -> object:
    """Parse JSON strictly: UTF-8, no ``NaN``, and ``-0`` is no whole number.

    Parameters
    ----------
    raw
        The text.
    path, what
        For messages: the file, and which part of it.
    make
        Makes an object of its pairs.

    Raises
    ------
    CorruptError
        If it isn't JSON.
    """
    try:
        return json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=make,
            parse_int=_whole if b"-0" in raw else None,
            parse_constant=_no_constant,
        )
    except RecursionError as error:
        raise CorruptError(f"{what} is nested too deeply", where=path) from error
    except ValueError as error:
        raise CorruptError(f"{what} isn't valid JSON: {error}", where=path) from error


def _whole(text: str) -> float:
    return -0.0 if text == "-0" else int(text)


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def is_text(value: object) -> bool:
    """Whether a value is text that UTF-8 can hold (JSON can spell halves of characters)."""
    if not isinstance(value, str):
        return False
    if value.isascii():
        return True
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
