"""Options that several commands of the command line have, and what becomes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from posttrain.algos import BUNDLES
from posttrain.cli.console import echo

if TYPE_CHECKING:
    from posttrain.config.presets import Resolved

PresetOption = Annotated[str | None, typer.Option("--preset", "-p", help="A preset's name, or the path of a .toml.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one key; repeatable.")]
NameOption = Annotated[str | None, typer.Option("--name", help="Name of the run (run.name).")]
ModelOption = Annotated[str | None, typer.Option("--model", help="Folder, hub id, builtin:tiny or run:NAME.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="run.seed")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]
ResumeOption = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="auto|never|PATH",
        help="Go on with an unfinished run, refuse to, or go on from a checkpoint.",
    ),
]
StepsOption = Annotated[int | None, typer.Option("--steps", help="train.steps")]
WorkersOption = Annotated[int | None, typer.Option("--workers", help="Training workers (cluster.workers).")]
PluginOption = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="FILE",
        help="Import your own data, tools, graders and algorithms; repeatable (plugins).",
    ),
]
ExamineOption = Annotated[
    int | None, typer.Option("--examine", min=0, help="Print so many graded conversations (reward.examine).")
]
ProfileOption = Annotated[
    str | None, typer.Option(metavar="FIRST:LAST", help="Trace the updates of these steps (run.profile).")
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, print the plan, and stop. Nothing is written.")
]
ConsoleOption = Annotated[
    Literal["auto", "panel", "plain", "json", "quiet"] | None,
    typer.Option("--console", help="What is shown while it runs (run.console)."),
]
RepeatsOption = Annotated[int | None, typer.Option("--n", "-n", help="Responses per prompt (rollout.n).")]
TemperatureOption = Annotated[float | None, typer.Option("--temperature", help="rollout.temperature")]
LimitOption = Annotated[int | None, typer.Option("--limit", help="Only the first so many prompts (generate.limit).")]
EndpointOption = Annotated[
    str | None, typer.Option("--endpoint", help="An OpenAI-compatible server that samples (generate.endpoint.url).")
]
ToolsOption = Annotated[
    str | None, typer.Option("--tools", help="Tools, separated by commas; none: no tools (rollout.tools).")
]
AlgoOption = Annotated[
    str | None,
    typer.Option("--algo", help=f"RL algorithm, a bundle of algo.* values: {', '.join(BUNDLES.names())}."),
]


def resolve_for(
    command: Literal["sft", "prefer", "rl", "generate"],
    preset: str | None,
    sets: list[str] | None,
    flags: dict[str, Any],
) -> Resolved:
    """The config of a command, by default that of its first-run preset (which a line on stderr names)."""
    from posttrain.config.presets import default_preset, resolve

    if preset is None:
        preset, line = default_preset(command)
        echo(line, err=True)
    return resolve(command, preset, sets or [], flags)


def run_flags(
    name: str | None,
    model: str | None,
    seed: int | None,
    overwrite: bool,
    console: str | None = None,
    plugin: list[str] | None = None,
) -> dict[str, Any]:
    """Flags that sft, prefer, rl, generate and eval share, by config key; None where one was not given."""
    return {
        "plugins": plugin,
        "run.name": name,
        "run.seed": seed,
        "run.overwrite": overwrite or None,
        "run.console": console,
        "model.path": model,
    }


def training_flags(
    data: str | None, steps: int | None, workers: int | None, resume: str | None, profile: str | None
) -> dict[str, Any]:
    """Flags that sft, prefer and rl share, likewise."""
    return {
        "data.train": data,
        "train.steps": steps,
        "cluster.workers": workers,
        "run.resume": resume,
        "run.profile": profile,
    }


def sampling_flags(
    data: str | None,
    limit: int | None,
    endpoint: str | None,
    n: int | None,
    temperature: float | None,
    tools: str | None,
) -> dict[str, Any]:
    """Flags that generate and eval share, likewise."""
    return {
        "generate.data": data,
        "generate.limit": limit,
        "generate.endpoint.url": endpoint,
        "rollout.n": n,
        "rollout.temperature": temperature,
        "rollout.tools": tools_of(tools),
    }


def tools_of(text: str | None) -> list[str] | None:
    """The names in a list separated by commas; `none` has none."""
    if text is None:
        return None
    return [name.strip() for name in text.split(",") if name.strip()] if text.strip() != "none" else []
