"""Command that predicts a run: plan."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from posttrain.cli.console import echo
from posttrain.cli.options import PRESET, Settings, with_settings
from posttrain.core.errors import ConfigError

_PLANNED = "give a preset of sft, prefer or rl: `posttrain presets` lists them"


@with_settings(
    *(*PRESET, "model.path", "algo.name", "cluster.workers", "train.steps"),
    about={"model.path": "Folder, hub id, builtin:tiny, run:NAME or a config.json."},
)
def plan(
    settings: Settings,
    gpu: Annotated[
        str | None, typer.Option(help="GPU to plan for: h200, h100, b200, a100, ...; default: this machine's.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs per node; default: as many as the config asks for.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    length: Annotated[
        float | None,
        typer.Option(min=1, help="Mean tokens per sequence; default: from the data's card, or the maximum length."),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name or folder of a run: compare its measurements with the prediction."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line.")] = False,
) -> None:
    """Predict memory, batches, time and problems of a run, without a GPU and without weights."""
    from posttrain.config import RunConfig
    from posttrain.config.keys import flag_name
    from posttrain.config.preset_files import load_preset
    from posttrain.plan import command as plan
    from posttrain.plan.inputs import PlanOptions
    from posttrain.runs.run import run_folder

    asked = PlanOptions(gpu, gpus, nodes, length)
    if run is not None:
        given = ["--preset"] * (settings.preset is not None) + ["--set"] * bool(settings.sets)
        given += [flag_name(key) for key in settings.flags]
        if given:
            raise ConfigError(f"--run and {given[0]} exclude each other", hint="a run has its own config")
        echo(plan.show_run(run_folder(RunConfig().dir, run), asked, as_json))
        return
    command: Any = "rl" if settings.preset is None else load_preset(settings.preset).command
    if command not in ("sft", "prefer", "rl"):
        raise ConfigError(f"preset {settings.preset} is for {command}, and plan is for runs that train", hint=_PLANNED)
    echo(plan.show(settings.resolve(command).config, asked, as_json))
