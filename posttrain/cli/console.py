"""What commands print."""

from __future__ import annotations

import typer

from posttrain.core.text import printable


def echo(text: object, *, err: bool = False, nl: bool = True) -> None:
    """Print ``text`` on stdout, or on stderr: messages and names that come from files, models and services may hold
    what a terminal obeys."""
    typer.echo(printable(str(text)), err=err, nl=nl)
