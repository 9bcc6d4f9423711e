"""How is a value of a document looked at, and what is said of it when it is wrong?

:class:`Checks` collects problems instead of raising the first one: each method looks at one value,
says what is wrong with it, and gives the value on, or something that no further problem comes of.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.plain import faults, pointer, shown

_HEX = re.compile(r"[0-9a-f]{16}")
_HEX_LINES = re.compile(r"(?:[0-9a-f]{16}\n)*")


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a document.

    Parameters
    ----------
    place
        A JSON pointer (RFC 6901): ``"/spaces/2/entries/17"``, ``""`` for the document itself.
    text
        What stands there, and what was expected.
    """

    place: str
    text: str


class Checks:
    """Looks at one value at a time and collects what is wrong."""

    def __init__(self) -> None:
        self.found: list[Problem] = []

    def add(self, place: str, text: str) -> None:
        """Say what is wrong at a place."""
        self.found.append(Problem(place, text))

    def wrong(self, place: str, value: object, expected: str) -> None:
        """Say that a value is none that was expected."""
        self.add(place, f"is {shown(value)}; expected {expected}")

    def mapping(self, value: object, place: str) -> dict[str, Any]:
        """The object at a place; an empty one where it isn't one."""
        if isinstance(value, dict):
            return value
        self.wrong(place, value, "an object")
        return {}

    def record(
        self, value: object, place: str, keys: Collection[str], optional: Collection[str] = ()
    ) -> dict[str, Any]:
        """The object at a place, which has these keys and no others."""
        found = self.mapping(value, place)
        if not isinstance(value, dict):
            return found
        for key in keys:
            if key not in found:
                self.add(f"{place}/{pointer(key)}", "is missing")
        for key in found:
            if key not in keys and key not in optional:
                known = ", ".join([*keys, *optional][:20])
                self.add(f"{place}/{pointer(key)}", f"is an unknown key; known: {known}")
        return found

    def sequence(self, value: object, place: str) -> list[Any] | None:
        """The list at a place."""
        if isinstance(value, list):
            return value
        self.wrong(place, value, "a list")
        return None

    def integer(self, value: object, place: str, low: int, high: int) -> int | None:
        """The integer at a place, ``low <= it < high`` (true and 1.0 are none)."""
        if type(value) is int and low <= value < high:
            return value
        some = f"an integer from {low} to {high - 1}" if low < high else "none: there are none"
        self.wrong(place, value, some)
        return None

    def text(self, value: object, place: str) -> str | None:
        """The text at a place, which is valid Unicode."""
        if not isinstance(value, str):
            self.wrong(place, value, "a text")
            return None
        if not encodable(value):
            self.wrong(place, value, "valid Unicode")
            return None
        return value

    def texts(self, values: Sequence[object], place: str) -> list[str | None]:
        """Each of some values that is a text in valid Unicode."""
        some = [v for v in values if isinstance(v, str)]
        if len(some) == len(values) and encodable("".join(some)):
            return [*some]
        return [self.text(v, f"{place}/{i}") for i, v in enumerate(values)]

    def column(self, values: Sequence[object], place: str, *, gaps: bool) -> None:
        """Checksums as 16 hexadecimal digits each, or null where that is allowed."""
        some = [v for v in values if isinstance(v, str)]
        lines = "\n".join([*some, ""])
        nulls = values.count(None) if gaps else 0
        # one search of all of them together: a line too many is no longer 17 characters each
        if (
            len(some) + nulls == len(values)
            and len(lines) == 17 * len(some)
            and _HEX_LINES.fullmatch(lines)
        ):
            return
        for i, value in enumerate(values):
            if value is not None or not gaps:
                self.checksum(value, f"{place}/{i}")

    def checksum(self, value: object, place: str) -> None:
        """A CRC-64 as hexadecimal digits."""
        if not isinstance(value, str) or not _HEX.fullmatch(value):
            self.wrong(place, value, "16 hexadecimal digits in lower case")

    def plain(self, value: object, place: str) -> None:
        """A dict as plain data."""
        if not isinstance(value, dict):
            self.wrong(place, value, "an object")
            return
        for inner, text in faults(value, place):
            self.add(inner, text)
        mark = next((k for k in value if isinstance(k, str) and k.startswith("$")), "$dict")
        if mark != "$dict" and len(value) == 1:
            self.add(place, f"is a {mark} value; expected a dict")


def encodable(text: str) -> bool:
    """Whether a text has no half of a surrogate pair."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
