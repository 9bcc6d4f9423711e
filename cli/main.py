"""What does ``zreshard`` do with its words?

The first one names a verb, which is a module of this package; it is imported when it is asked for,
and imports the library when it runs, so that ``--help`` is instant. Whatever goes wrong ends in
:mod:`reshard.cli.failure`, which says so and gives the exit code.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from reshard import __version__
from reshard.cli.examples import write
from reshard.cli.failure import guarded

# numpy's linear algebra isn't used, and its threads take longer to start than much of our work
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

VERBS = {
    "convert": "convert",
    "plan": "convert",
    "consolidate": "consolidate",
    "inspect": "inspect",
    "verify": "verify",
    "diff": "diff",
}
"""Verb to the module that has it, in the order in which they are listed."""


EXAMPLES = (
    "zreshard inspect ckpt-8",
    "zreshard convert ckpt-8 ckpt-32 --from 8 --to 32",
    "zreshard verify ckpt-32 --against ckpt-8",
)


class Program(click.Group):
    """The group of all verbs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the verbs."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a verb."""
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"reshard.cli.{VERBS[cmd_name]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the text and examples."""
        super().format_help_text(ctx, formatter)
        write(EXAMPLES, formatter)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line and exit with its code."""
        words = sys.argv[1:] if args is None else list(args)
        if not standalone_mode or "_ZRESHARD_COMPLETE" in os.environ:
            return super().main(words, prog_name, complete_var, standalone_mode, **extra)

        def run() -> None:
            with self.make_context(prog_name or "zreshard", list(words), **extra) as context:
                self.invoke(context)

        code = guarded(run, words)
        gc.freeze()  # the process ends: nothing need be looked through once more
        sys.exit(code)


@click.group(
    cls=Program,
    no_args_is_help=False,
    epilog="Exit codes: 0 ok; 1 differences found; 2 wrong usage; 3 not found; 4 damaged or "
    "incomplete; 5 unsafe; 6 the request doesn't fit; 7 the target can't be written; "
    "8 unsupported; 70 a bug in zreshard; 130 interrupted.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="zreshard %(version)s")
def main() -> None:
    """Read, check and reshard the sharded checkpoints of training jobs, byte for byte."""
