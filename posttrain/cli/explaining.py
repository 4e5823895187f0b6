"""Command that explains a config key: config explain."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from posttrain.cli.console import echo


def explain(
    key: Annotated[
        str, typer.Argument(help="A key (train.optim.lr), a section (train.optim), or its name in another trainer.")
    ],
    preset: Annotated[
        str | None, typer.Option("--preset", "-p", help="Also show the value in this preset and its origin.")
    ] = None,
) -> None:
    """Explain a config key: meaning, type and bounds, default, the commands that read it, its names elsewhere."""
    from posttrain.config.describe import described
    from posttrain.config.keys import known_key

    found = known_key(key)
    if found != key:
        echo(f"{key} is called {found} here", err=True)
    values = _values(preset) if preset is not None else {}
    keys = [one for one in described() if one.key == found or one.key.startswith(f"{found}.")]
    if keys[0].key != found:
        width = max(len(one.key) for one in keys)
        for one in keys:
            echo(f"{one.key:<{width}}  {values.get(one.key, one.default.strip('`'))}")
        return
    _explain(keys[0], values.get(found))


def _explain(one: Any, value: str | None) -> None:
    """Print the description of a key; ``value``: its value in the preset, with the origin."""
    from posttrain.config.aliases import ALIASES
    from posttrain.config.verl.names import theirs_of

    lines = {
        "type": one.type.replace("`", ""),
        "default": one.default.strip("`"),
        "read by": ", ".join(one.read_by),
        "elsewhere": ", ".join(ALIASES.get(one.key, ())),
        "in verl": ", ".join(theirs_of(one.key)),
        "value": value,
    }
    echo(one.key)
    echo(f"  {one.about.replace('`', '')}")
    for name, text in lines.items():
        if text:
            echo(f"  {name + ':':<11}{text}")


def _values(preset: str) -> dict[str, str]:
    """Return each key's value in a preset with its origin, as text."""
    import functools
    import json

    from posttrain.config.keys import leaf_keys
    from posttrain.config.preset_files import load_preset
    from posttrain.config.presets import resolve

    command: Any = load_preset(preset).command
    resolved = resolve(command, preset)
    values = {key: functools.reduce(getattr, key.split("."), resolved.config) for key in leaf_keys()}
    return {
        key: f"{'none' if value is None else json.dumps(value)}  ({resolved.provenance[key]})"
        for key, value in values.items()
    }
