"""What a run will take: plan."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from posttrain.cli.console import echo
from posttrain.cli.options import (
    AlgoOption,
    PresetOption,
    SetOption,
    StepsOption,
    WorkersOption,
    resolve_for,
)
from posttrain.core.errors import ConfigError

_PLANNED = "give a preset of sft, prefer or rl: `posttrain presets` lists them"


def plan(
    preset: PresetOption = None,
    set_: SetOption = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Folder, hub id, builtin:tiny, run:NAME or a config.json."),
    ] = None,
    algo: AlgoOption = None,
    workers: WorkersOption = None,
    steps: StepsOption = None,
    gpu: Annotated[
        str | None, typer.Option(help="GPU to plan for: h200, h100, b200, a100, ...; without it, this machine's.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="How many a node; without it, as many as the config asks for.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="How many nodes.")] = 1,
    length: Annotated[
        float | None,
        typer.Option(min=1, help="Mean tokens of a sequence; without it, of the data's card, or the longest."),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A run, or its folder: what it has measured beside what is predicted."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line.")] = False,
) -> None:
    """Tell what a run will take, without a GPU and without weights: memory, batches, time, and what will not work."""
    from posttrain.config import RunConfig
    from posttrain.config.presets import load_preset
    from posttrain.plan import command as plan

    asked = plan.PlanOptions(gpu, gpus, nodes, length)
    if run is not None:
        if preset is not None:
            raise ConfigError("--run and --preset exclude each other", hint="a run has its own config")
        echo(plan.show_run(plan.run_folder(RunConfig().dir, run), asked, as_json))
        return
    command: Any = "rl" if preset is None else load_preset(preset).command
    if command not in ("sft", "prefer", "rl"):
        raise ConfigError(f"preset {preset} is for {command}, and plan is about runs that train", hint=_PLANNED)
    flags = {"model.path": model, "algo.name": algo, "cluster.workers": workers, "train.steps": steps}
    resolved = resolve_for(command, preset, set_, flags)
    echo(plan.show(resolved.config, asked, as_json))
