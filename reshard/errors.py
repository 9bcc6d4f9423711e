"""Which errors can a user meet, and which exit code does each one have?

Every error that a person can cause or suffer is a :class:`ReshardError`: it says **what** is
wrong, **where** (file, rank, tensor) and **what to do**. Broken promises of our own are plain
``assert``. The command line turns the class into an exit code; the codes are documented in
``docs/errors.md`` and frozen by a test.
"""

from __future__ import annotations

from typing import ClassVar


class ReshardError(Exception):
    """Base of all errors for users.

    Parameters
    ----------
    what
        One sentence: what is wrong, with both values when two disagree.
    where
        The file, rank or tensor that it is about.
    hint
        What to do about it.
    """

    exit_code: ClassVar[int] = 70
    kind: ClassVar[str] = "error"

    def __init__(self, what: str, *, where: object = None, hint: str | None = None) -> None:
        self.what = what
        self.where = None if where is None else str(where)
        self.hint = hint
        super().__init__(self._message())

    def _message(self) -> str:
        text = self.what
        if self.where is not None:
            text = f"{self.where}: {text}"
        if self.hint is not None:
            text = f"{text}\n  {self.hint}"
        return text


class NotFoundError(ReshardError):
    """There is no checkpoint at that path, or no tensor of that name."""

    exit_code = 3
    kind = "not-found"


class CorruptError(ReshardError):
    """The checkpoint is damaged: truncated, a flipped bit, a file that isn't what it says."""

    exit_code = 4
    kind = "corrupt"


class IncompleteError(CorruptError):
    """Something is missing: a rank, a chunk, some elements of a tensor."""

    kind = "incomplete"


class InconsistentError(CorruptError):
    """Parts disagree: two runs in one folder, another world size, overlapping pieces."""

    kind = "inconsistent"


class UnsafeError(ReshardError):
    """The file asks for something that must not be done: to run code, to leave its folder."""

    exit_code = 5
    kind = "unsafe"


class RequestError(ReshardError):
    """What was asked for doesn't fit the checkpoint (``--from`` wrong, a loss not allowed)."""

    exit_code = 6
    kind = "request"


class TargetError(ReshardError):
    """The target can't be written: it exists, the disk is full, no permission."""

    exit_code = 7
    kind = "target"


class UnsupportedError(ReshardError):
    """A valid checkpoint (or a newer version of one) that this release can't handle."""

    exit_code = 8
    kind = "unsupported"
