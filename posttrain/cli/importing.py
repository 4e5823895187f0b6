"""Command that imports configs of other trainers: import-verl."""

from __future__ import annotations

from typing import Annotated

import typer

from posttrain.cli.console import echo
from posttrain.cli.options import OverwriteOption
from posttrain.core.errors import ConfigError


def import_verl(
    script: Annotated[str, typer.Argument(help="Launch script of verl. It is read and never executed.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]", help="Arguments of the script: $1, $2, ...")
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="FILE.toml", help="Write the preset to this file instead of stdout.")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Environment variable of the script; repeatable."),
    ] = None,
    root: Annotated[
        str | None, typer.Option(metavar="DIR", help="Working directory of the script; default: the current one.")
    ] = None,
    keys: Annotated[bool, typer.Option("--keys", help="Report the outcome of every key.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings as one JSON line instead of the preset.")
    ] = False,
    overwrite: OverwriteOption = False,
) -> None:
    """Turn a launch script of verl into a preset, and name the keys that have no counterpart."""
    import os

    from posttrain.interop.verl import command as import_verl

    variables = {name: os.environ[name] for name in ("HOME", "USER") if name in os.environ}
    for text in env or []:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--env {text!r} is not of the form NAME=VALUE", hint="for example --env NNODES=2")
        variables[name] = value
    found = import_verl.run(script, arguments or [], out=out, variables=variables, root=root, overwrite=overwrite)
    for line in import_verl.report(found, every=keys):
        echo(line, err=True)
    if as_json:
        echo(import_verl.as_json(found))
    elif out is not None:
        echo(import_verl.command_line(found, out))
    else:
        echo(import_verl.preset_text(found), nl=False)
    import_verl.check(found, out)
