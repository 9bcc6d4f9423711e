"""Is this a well-formed pickle that can be loaded without harm to memory?

:func:`scan` walks over the opcodes before they are loaded. It refuses what would let a damaged
or hostile stream take far more memory than it has bytes (an operand longer than the stream, a
memo index far beyond it: C's unpickler allocates the memo up to the highest index) and what has
no place in a checkpoint (the extension registry, out-of-band buffers, bytes after the end).
:func:`check_tree` looks at the loaded value: no cycles, no deep nesting, no "billion laughs", so
that whoever walks over it may recurse.

The opcodes are those of CPython's ``pickletools``, protocols 0 to 5.
"""

from __future__ import annotations

import gc
import re
from typing import Any, Final

#: Runs of opcodes whose length is known at once. A memo index below 65536 is always harmless.
_RUN: Final = re.compile(
    rb"(?:"
    rb"[(012NRQabd}el\]ost)u\x81\x85-\x89\x8f-\x94]"  # no operand
    rb"|[Khq].|M..|[Jj].{4}|r..\x00\x00|[G\x95].{8}"  # 1, 2, 4 and 8 bytes
    rb"|[FILSVg][^\n]*\n|[ci][^\n]*\n[^\n]*\n"  # one and two lines
    rb")*+",
    re.DOTALL,
)
#: Opcodes with a counted operand: how many bytes the count takes.
_COUNT_BYTES: Final = {
    **dict.fromkeys(b"U\x8cC\x8a", 1),
    **dict.fromkeys(b"TXB\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}
_STOP, _PROTO, _PUT, _LONG_BINPUT = b".\x80pr"
_HIGHEST_PROTOCOL: Final = 5

MAX_DEPTH: Final = 200
"""How deep containers may be nested."""


class BadPickleError(Exception):
    """The stream, or the value in it, is damaged or absurd."""


def scan(data: bytes) -> None:
    """Check the opcodes of a pickle.

    Parameters
    ----------
    data
        One pickle, from its first byte to its last.

    Raises
    ------
    BadPickleError
        It isn't one whole pickle, or loading it could exhaust memory.
    """
    at = 0
    while True:
        run = _RUN.match(data, at)
        assert run is not None, "the pattern matches the empty string too"
        at = run.end()
        if at >= len(data):
            raise BadPickleError("it ends without its last opcode")
        if data[at] == _STOP:
            break
        at = _skip(data, at)
        if at > len(data):
            raise BadPickleError("it ends in the middle of an operand")
    if at + 1 != len(data):
        raise BadPickleError(f"{len(data) - at - 1} bytes follow its end")


def _skip(data: bytes, at: int) -> int:
    """Where the next opcode is, after one that isn't part of a run."""
    code = data[at]
    count_bytes = _COUNT_BYTES.get(code)
    if count_bytes is not None:
        begin = at + 1 + count_bytes
        return begin + int.from_bytes(data[at + 1 : begin], "little")
    if code == _LONG_BINPUT:
        _check_memo(int.from_bytes(data[at + 1 : at + 5], "little"), data)
        return at + 5
    if code == _PUT:
        end = data.find(b"\n", at)
        text = data[at + 1 : end]
        if end < 0 or not text.isdigit() or len(text) > 20:
            raise BadPickleError(f"a memo index is {text[:20]!r}")
        _check_memo(int(text), data)
        return end + 1
    if code == _PROTO:
        if data[at + 1 : at + 2] > bytes([_HIGHEST_PROTOCOL]):
            raise BadPickleError(f"its protocol is {data[at + 1]}, above {_HIGHEST_PROTOCOL}")
        return at + 2
    raise BadPickleError(f"an opcode {data[at : at + 1]!r} at byte {at}")


def _check_memo(index: int, data: bytes) -> None:
    if index > len(data):
        raise BadPickleError(f"a memo index {index} in a pickle of {len(data)} bytes")


_SIZED: Final = (dict, list, tuple, set, frozenset)
_FIELDS: Final = 8  # most references of an object that isn't sized, its class among them
_PART: Final = 4096  # nodes looked into at once


class _Kinds(dict[type, bool]):
    """Which types are of one of some kinds."""

    def __init__(self, kinds: tuple[type, ...], but: tuple[type, ...] = ()) -> None:
        self._kinds, self._but = kinds, but

    def __missing__(self, one: type) -> bool:
        found = self[one] = issubclass(one, self._kinds) and not issubclass(one, self._but)
        return found


def check_tree(
    value: object,
    records: tuple[type, ...],
    closed: tuple[type, ...],
    *,
    most: int,
) -> None:
    """Check that a loaded value can be walked over, by walking over it level by level.

    Parameters
    ----------
    value
        What was loaded.
    records, closed
        Types that hold values in slots, besides dicts, lists, tuples and sets; and those of them
        into which nobody looks.
    most
        How many references a walk that visits shared values again may follow.

    Raises
    ------
    BadPickleError
        It holds itself, is nested deeper than :data:`MAX_DEPTH`, or a walk would not end soon.
    """
    walked, sized = _Kinds((*_SIZED, *records), closed), _Kinds(_SIZED)
    level = [value] if walked[type(value)] else []
    for _ in range(MAX_DEPTH):
        if not level:
            return
        deeper: list[object] = []
        for at in range(0, len(level), _PART):
            part = level[at : at + _PART]
            with_length: list[Any] = [node for node in part if sized[type(node)]]
            # a dict holds keys and values
            most -= 2 * sum(map(len, with_length)) + _FIELDS * (len(part) - len(with_length))
            if most < 0:
                raise BadPickleError("shared values unfold to more than its bytes could hold")
            # what the collector would follow: a hundred thousand nodes in a millisecond or two
            deeper += [one for one in gc.get_referents(*part) if walked[type(one)]]
        level = deeper
    raise BadPickleError(f"values are nested deeper than {MAX_DEPTH}, or one holds itself")
