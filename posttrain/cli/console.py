"""Print the output of commands."""

from __future__ import annotations

import typer

from posttrain.core.text import printable


def echo(text: object, *, err: bool = False, nl: bool = True) -> None:
    """Print ``text`` on stdout, or on stderr, without control characters: messages and names from files, models and
    services may contain escape sequences."""
    typer.echo(printable(str(text)), err=err, nl=nl)
