"""How does a command end when something goes wrong?

With an exit code that says which kind of thing it was, a message that says what, where and what to
do, and never a traceback: one of a bug goes to a file.
"""

from __future__ import annotations

import errno
import io
import json
import os
import platform
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import click

from reshard.cli.output import colored, shown
from reshard.errors import NotFoundError, ReshardError, TargetError

USAGE = 2
"""Exit code of words that make no command."""
BUG = 70
"""Exit code of a bug in zreshard (EX_SOFTWARE of sysexits.h)."""
INTERRUPTED = 130
"""Exit code after SIGINT, as shells give it."""
TERMINATED = 143
"""Exit code after SIGTERM, as shells give it."""
PIPE = 141
"""Exit code when nobody reads the output any more, as shells give it for SIGPIPE."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong, for a person and for a program."""

    kind: str
    what: str
    where: str | None
    hint: str | None
    exit_code: int

    def to_json(self) -> dict[str, object]:
        """The failure as plain data."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class Interrupted(KeyboardInterrupt):
    """An interrupt about which something can be said: what has, and hasn't, been done."""


class Terminated(KeyboardInterrupt):
    """SIGTERM: handled as an interrupt with another exit code."""


def guarded(run: Callable[[], None], words: Sequence[str]) -> int:
    """Run a command and answer for whatever it raises.

    Parameters
    ----------
    run
        The command.
    words
        Its words: they say how errors are shown when the command didn't get to read them.

    Returns
    -------
    int
        The exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with _signals():
            try:
                run()
            except click.exceptions.Exit as end:
                _flush()
                return end.exit_code
            except BaseException as error:  # noqa: BLE001 - each kind is answered for
                return _answer(error, words)
            _flush()
            return 0
    except BrokenPipeError:
        return _broken_pipe()


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _broken_pipe() -> int:
    """Leave quietly: what is still in the buffer goes nowhere."""
    with open(os.devnull, "wb") as nowhere:
        for stream in (sys.stdout, sys.stderr):
            try:
                os.dup2(nowhere.fileno(), stream.fileno())
            except (OSError, ValueError):  # a stream of a test has no descriptor
                continue
    return PIPE


def _answer(error: BaseException, words: Sequence[str]) -> int:
    if isinstance(error, BrokenPipeError):
        raise error
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else BUG
    failure = failure_of(error, words)
    show(failure, words, usage=error if isinstance(error, click.UsageError) else None)
    _flush()
    return failure.exit_code


def failure_of(error: BaseException, words: Sequence[str] = ()) -> Failure:
    """What an exception means to whoever gave the command."""
    if isinstance(error, ReshardError):
        return Failure(error.kind, error.what, error.where, error.hint, error.exit_code)
    if isinstance(error, click.ClickException):
        return Failure("usage", error.format_message(), None, None, USAGE)
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        return _interruption(error)
    if isinstance(error, OSError) and error.filename is not None:
        kind = TargetError if error.errno in _FULL else NotFoundError
        return failure_of(kind(f"can't be used: {error.strerror}", where=error.filename))
    if isinstance(error, MemoryError):
        hint = "give a smaller --max-memory, or fewer --workers"
        return Failure("memory", "there isn't enough memory", None, hint, BUG)
    return _bug(error, words)


def _interruption(error: BaseException) -> Failure:
    told = isinstance(error, Interrupted)
    stopped = isinstance(error.__cause__ if told else error, Terminated)
    kind, code = ("terminated", TERMINATED) if stopped else ("interrupted", INTERRUPTED)
    return Failure(kind, f"{kind}; {error}" if told else kind, None, None, code)


def _bug(error: BaseException, words: Sequence[str]) -> Failure:
    what = f"this is a bug in zreshard: {type(error).__name__}: {error}"
    fd, path = tempfile.mkstemp(prefix="zreshard-bug-", suffix=".txt")
    with open(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
        from reshard import __version__

        file.write(f"zreshard {__version__}, Python {platform.python_version()}, ")
        file.write(f"{platform.platform()}\ncommand: {list(words)!r}\n\n")
        file.writelines(traceback.format_exception(error))
    hint = f"the details are in {path}; please report it with that file"
    return Failure("bug", what, None, hint, BUG)


def show(failure: Failure, words: Sequence[str], usage: click.UsageError | None = None) -> None:
    """Print a failure: as JSON on stdout if that was asked for, else as text on stderr."""
    if "--json" in words:
        print(json.dumps({"error": failure.to_json()}, indent=2))
        return
    color = colored(_word_after(words, "--color") or "auto", sys.stderr)
    red = (lambda text: click.style(text, fg="red", bold=True)) if color else str
    where = "" if failure.where is None else f"{shown(failure.where)}: "
    lines = [f"{red('error:')} {where}{shown(failure.what, lines=True)}"]
    if failure.hint is not None:
        lines.append(f"  {shown(failure.hint, lines=True)}")
    if usage is not None and usage.ctx is not None:
        lines.append(f"  see: {usage.ctx.command_path} --help")
    print("\n".join(lines), file=sys.stderr)


def _word_after(words: Sequence[str], option: str) -> str | None:
    """The value of an option among words that weren't parsed."""
    for index, word in enumerate(words):
        if word == option:
            return words[index + 1] if index + 1 < len(words) else None
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None


@contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM interrupts as SIGINT does, and a second one doesn't wait for anything."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wanted = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, _interrupt) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, _leave)
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\ninterrupted again; a hidden .zreshard-partial folder may be left behind\n")
    os._exit(INTERRUPTED if number == signal.SIGINT else TERMINATED)
