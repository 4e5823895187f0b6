"""Commands that only look: presets, version."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from posttrain import __version__


def presets_list(context: typer.Context) -> None:
    """List the shipped presets: name, command, description."""
    if context.invoked_subcommand is not None:
        return
    from posttrain.presets import list_presets

    found = list_presets()
    width = max(len(preset.name) for preset in found)
    for preset in found:
        typer.echo(f"{preset.name:<{width}}  {preset.command:<8}  {preset.description}")


def presets_show(
    name: Annotated[str, typer.Argument(help="A preset's name, or the path of a .toml.")],
    provenance: Annotated[bool, typer.Option("--provenance", help="Say where each value came from.")] = False,
) -> None:
    """Print a preset's resolved config as TOML."""
    from posttrain.presets import dump_toml, load_preset, resolve

    command: Any = load_preset(name).command
    resolved = resolve(command, name)
    typer.echo(dump_toml(resolved.config, resolved.provenance if provenance else None), nl=False)


def version(as_json: Annotated[bool, typer.Option("--json", help="One JSON line.")] = False) -> None:
    """Print the version."""
    typer.echo(json.dumps({"posttrain": __version__}) if as_json else __version__)
