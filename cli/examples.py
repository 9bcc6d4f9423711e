"""How does the help of a command show examples?

Between the text and the options, a line each; ``docs/cli.md`` shows the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click


class Verb(click.Command):
    """A command with examples.

    Parameters
    ----------
    examples
        Command lines.
    """

    def __init__(self, *args: Any, examples: Iterable[str], **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.examples = tuple(examples)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the text and the examples."""
        super().format_help_text(ctx, formatter)
        write(self.examples, formatter)


def write(examples: Iterable[str], formatter: click.HelpFormatter) -> None:
    """Write examples as lines that aren't wrapped."""
    formatter.write_paragraph()
    for example in examples:
        formatter.write(f"    {example}\n")
