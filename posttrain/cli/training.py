"""Commands that train: sft, prefer, rl, quickstart."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from posttrain.cli.console import echo
from posttrain.cli.options import (
    AlgoOption,
    ConsoleOption,
    DryRunOption,
    ExamineOption,
    ModelOption,
    NameOption,
    OverwriteOption,
    PluginOption,
    PresetOption,
    ProfileOption,
    ResumeOption,
    SeedOption,
    SetOption,
    StepsOption,
    ToolsOption,
    WorkersOption,
    resolve_for,
    run_flags,
    tools_of,
    training_flags,
)


def sft(
    preset: PresetOption = None,
    set_: SetOption = None,
    name: NameOption = None,
    model: ModelOption = None,
    data: Annotated[str | None, typer.Option(help="Parquet of conversations (data.train).")] = None,
    steps: StepsOption = None,
    workers: WorkersOption = None,
    seed: SeedOption = None,
    overwrite: OverwriteOption = False,
    resume: ResumeOption = None,
    profile: ProfileOption = None,
    plugin: PluginOption = None,
    console: ConsoleOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Fine-tune on conversations."""
    flags = run_flags(name, model, seed, overwrite, console, plugin)
    flags |= training_flags(data, steps, workers, resume, profile)
    resolved = resolve_for("sft", preset, set_, flags)
    from posttrain.sft import command as sft

    echo(sft.dry_run(resolved) if dry_run else sft.run(resolved))


def prefer(
    preset: PresetOption = None,
    set_: SetOption = None,
    method: Annotated[
        Literal["dpo", "reward_model"] | None, typer.Option(help="Train a policy or a reward model (prefer.method).")
    ] = None,
    name: NameOption = None,
    model: ModelOption = None,
    data: Annotated[str | None, typer.Option(help="Parquet of preferences (data.train).")] = None,
    steps: StepsOption = None,
    workers: WorkersOption = None,
    seed: SeedOption = None,
    overwrite: OverwriteOption = False,
    resume: ResumeOption = None,
    profile: ProfileOption = None,
    plugin: PluginOption = None,
    console: ConsoleOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Train on pairs of answers, of which one is preferred: DPO, or a reward model."""
    flags = run_flags(name, model, seed, overwrite, console, plugin) | {"prefer.method": method}
    flags |= training_flags(data, steps, workers, resume, profile)
    resolved = resolve_for("prefer", preset, set_, flags)
    from posttrain.preference import command as prefer

    echo(prefer.dry_run(resolved) if dry_run else prefer.run(resolved))


def rl(
    preset: PresetOption = None,
    set_: SetOption = None,
    algo: AlgoOption = None,
    tools: ToolsOption = None,
    name: NameOption = None,
    model: ModelOption = None,
    data: Annotated[str | None, typer.Option(help="Parquet of prompts (data.train).")] = None,
    steps: StepsOption = None,
    workers: WorkersOption = None,
    replay: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Train from traces (file, folder, glob), without sampling (rollout.replay)."),
    ] = None,
    rollout_only: Annotated[
        bool, typer.Option("--rollout-only", help="Sample, grade and write traces, without training (rollout.only).")
    ] = False,
    examine: ExamineOption = None,
    seed: SeedOption = None,
    overwrite: OverwriteOption = False,
    resume: ResumeOption = None,
    profile: ProfileOption = None,
    plugin: PluginOption = None,
    console: ConsoleOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Train with reinforcement learning on multi-turn episodes."""
    flags = run_flags(name, model, seed, overwrite, console, plugin)
    flags |= {"algo.name": algo, "rollout.tools": tools_of(tools), "reward.examine": examine}
    flags |= training_flags(data, steps, workers, resume, profile)
    flags |= {"rollout.replay": replay, "rollout.only": rollout_only or None}
    resolved = resolve_for("rl", preset, set_, flags)
    from posttrain.rl import command as rl

    echo(rl.dry_run(resolved) if dry_run else rl.run(resolved))


def quickstart(
    seed: Annotated[int, typer.Option(min=0, help="Seeds data, training and sampling.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON line on stdout.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for everything it makes.")] = Path("runs/quickstart"),
    overwrite: OverwriteOption = False,
) -> None:
    """Run the whole pipeline on the tiny model and print a table."""
    from posttrain import quickstart

    quickstart.run(seed, out, as_json, overwrite)
