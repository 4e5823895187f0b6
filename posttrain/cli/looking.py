"""Commands on presets, machines and finished runs: presets, doctor, report, version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain import __version__
from posttrain.cli.console import echo
from posttrain.cli.options import OverwriteOption
from posttrain.config import RunConfig


def presets_list(context: typer.Context) -> None:
    """List the shipped presets: name, command, description."""
    if context.invoked_subcommand is not None:
        return
    from posttrain.config.preset_files import list_presets

    found = list_presets()
    width = max(len(preset.name) for preset in found)
    for preset in found:
        echo(f"{preset.name:<{width}}  {preset.command:<8}  {preset.description}")


def presets_show(
    name: Annotated[str, typer.Argument(help="A preset's name, or the path of a .toml.")],
    provenance: Annotated[bool, typer.Option("--provenance", help="Show the origin of each value.")] = False,
) -> None:
    """Print a preset's resolved config as TOML."""
    from posttrain.config.preset_files import load_preset
    from posttrain.config.presets import resolve
    from posttrain.config.writing import dump_toml

    command: Any = load_preset(name).command
    resolved = resolve(command, name)
    echo(dump_toml(resolved.config, resolved.provenance if provenance else None), nl=False)


def presets_migrate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A preset of yours; it is replaced.")],
) -> None:
    """Give renamed keys of a preset file their current names. Comments and layout stay."""
    from posttrain.config.migrate import migrate

    renamed = migrate(file)
    for old, new in renamed.items():
        echo(f"{file}: {old} -> {new}")
    if not renamed:
        echo(f"{file}: no renamed keys, nothing to change")


def doctor(
    dir_: Annotated[str | None, typer.Option("--dir", help="Folder of runs to check (run.dir).")] = None,
    address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Ray cluster that must answer (cluster.address).")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Do not start Ray.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line.")] = False,
) -> None:
    """Check whether this machine is fit for a run: ok, warn or fail, with hints. Exit code 1 if a check fails."""
    from posttrain.doctor import command as doctor
    from posttrain.doctor.base import worst

    found = []
    for finding in doctor.run(dir_, address, quick=quick):
        found.append(finding)
        if not as_json:
            echo(f"{finding.status:<4}  {finding.name}: {finding.detail}")
            if finding.hint and finding.status != "ok":
                echo(f"      hint: {finding.hint}")
    if as_json:
        echo(json.dumps({"status": worst(found), "findings": [f.as_dict() for f in found]}))
    if worst(found) == "fail":
        raise typer.Exit(1)


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Names of runs, or paths of their folders.")],
    out: Annotated[Path | None, typer.Option(help="Output file; default: report.html in the run's folder.")] = None,
    root: Annotated[str, typer.Option("--dir", help="Folder that contains the runs (run.dir).")] = RunConfig().dir,
    overwrite: OverwriteOption = False,
) -> None:
    """Write one HTML page on one or more runs: curves, time, distributions, trajectories, config."""
    from posttrain.runs import report

    echo(report.run(runs, root, out, overwrite=overwrite))


def version(as_json: Annotated[bool, typer.Option("--json", help="One JSON line.")] = False) -> None:
    """Print the version."""
    echo(json.dumps({"posttrain": __version__}) if as_json else __version__)
