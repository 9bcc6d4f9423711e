"""How are results printed: as text for people, as one JSON document for programs?

Results go to stdout, warnings and progress to stderr. Names come from files that somebody else
wrote, so nothing of them reaches a terminal but characters that can be seen.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import click

Row = Sequence[str]


@dataclass(frozen=True, slots=True)
class Output:
    """Where a command prints.

    Parameters
    ----------
    json
        One JSON document on stdout instead of text.
    quiet
        Warnings and errors only.
    verbose
        More detail.
    color
        ``"auto"``, ``"always"`` or ``"never"``.
    """

    json: bool = False
    quiet: bool = False
    verbose: bool = False
    color: str = "auto"

    @property
    def text(self) -> bool:
        """Whether text is printed on stdout."""
        return not (self.json or self.quiet)

    def line(self, text: str = "") -> None:
        """A line of the result."""
        if self.text:
            print(text)

    def note(self, text: str) -> None:
        """Something to know, on stderr."""
        if not self.quiet:
            print(shown(text), file=sys.stderr)

    def warn(self, text: str) -> None:
        """A warning, on stderr."""
        self._labelled("warning:", "yellow", text)

    def error(self, text: str) -> None:
        """Something that is wrong, on stderr."""
        self._labelled("error:", "red", text)

    def _labelled(self, label: str, color: str, text: str) -> None:
        if colored(self.color, sys.stderr):
            label = click.style(label, fg=color, bold=True)
        print(f"{label} {shown(text)}", file=sys.stderr)

    def table(self, rows: Iterable[Row], *, indent: int = 0, right: Sequence[int] = ()) -> None:
        """Rows with aligned columns; those of ``right`` are aligned at their ends."""
        if self.text:
            for text in aligned(list(rows), right):
                print(" " * indent + text)

    def document(self, content: Mapping[str, Any]) -> None:
        """The result as JSON, if that is asked for."""
        if self.json:
            print(json.dumps(content, indent=2, allow_nan=False))

    def strong(self, text: str) -> str:
        """Text that stands out."""
        return self._styled(text, bold=True)

    def good(self, text: str) -> str:
        """Text about something that is as it should be."""
        return self._styled(text, fg="green")

    def bad(self, text: str) -> str:
        """Text about something that is wrong, or differs."""
        return self._styled(text, fg="red")

    def faint(self, text: str) -> str:
        """Text that needn't be read."""
        return self._styled(text, dim=True)

    def _styled(self, text: str, **style: Any) -> str:
        return click.style(text, **style) if colored(self.color, sys.stdout) else text


def colored(wish: str, stream: TextIO) -> bool:
    """Whether to write colours: ``auto`` does on a terminal, unless NO_COLOR is set.

    Source: no-color.org (any value but an empty one counts).
    """
    if wish != "auto":
        return wish == "always"
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not plain and stream.isatty()


def shown(text: object, *, lines: bool = False) -> str:
    """Text of unknown origin, safe for a terminal: what can't be seen is escaped.

    Parameters
    ----------
    text
        Anything.
    lines
        Whether line breaks stay.
    """
    raw = str(text)
    if raw.isprintable():
        return raw
    return "".join(
        c if c.isprintable() or (lines and c == "\n") else c.encode("unicode_escape").decode()
        for c in raw
    )


def aligned(rows: Sequence[Row], right: Sequence[int] = ()) -> list[str]:
    """Rows as lines whose columns are aligned, two spaces apart."""
    widths: list[int] = []
    for row in rows:
        widths += [0] * (len(row) - len(widths))
        widths[: len(row)] = [max(w, _width(c)) for w, c in zip(widths, row, strict=False)]
    lines = []
    for row in rows:
        cells = []
        for column, cell in enumerate(row):
            space = " " * (widths[column] - _width(cell))
            cells.append(space + cell if column in right else cell + space)
        lines.append("  ".join(cells).rstrip())
    return lines


def _width(cell: str) -> int:
    return len(click.unstyle(cell))


def size(nbytes: int) -> str:
    """A number of bytes in decimal units, three digits: ``1.07 GB``."""
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    if units[0] == "B":
        return f"{nbytes} B"
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {units[0]}"


def span(low: int, high: int) -> str:
    """A range of bytes; one number if they are alike."""
    return size(low) if size(low) == size(high) else f"{size(low)} to {size(high)}"


def duration(seconds: float) -> str:
    """A time: ``40 ms``, ``0.4 s``, ``12 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if seconds < 0.0995:
        return f"{max(1, round(seconds * 1000))} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def rate(nbytes: int, seconds: float) -> str:
    """Bytes a second."""
    return f"{size(round(nbytes / max(seconds, 1e-9)))}/s"


def count(number: int, one: str, many: str | None = None) -> str:
    """A number and what it counts: ``1 tensor``, ``24 tensors``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def some(items: Sequence[str], most: int = 5) -> str:
    """Some of many: ``a, b, c and 7 more``."""
    text = ", ".join(map(shown, items[:most]))
    return f"{text} and {len(items) - most:,} more" if len(items) > most else text
