"""Commands that train: sft, prefer, rl, quickstart."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.console import echo
from posttrain.cli.options import (
    PRESET,
    STARTING,
    TRAINING,
    DryRunOption,
    OverwriteOption,
    Settings,
    with_settings,
)


@with_settings(*PRESET, *TRAINING, *STARTING, about={"data.train": "Parquet of conversations (data.train)."})
def sft(settings: Settings, dry_run: DryRunOption = False) -> None:
    """Fine-tune on conversations."""
    resolved = settings.resolve("sft")
    from posttrain.cluster.begin import begin_processes

    with nullcontext() if dry_run else begin_processes(resolved.config):
        from posttrain.sft import command as sft

        echo(sft.dry_run(resolved) if dry_run else sft.run(resolved))


@with_settings(
    *PRESET, "prefer.method", *TRAINING, *STARTING, about={"data.train": "Parquet of preferences (data.train)."}
)
def prefer(settings: Settings, dry_run: DryRunOption = False) -> None:
    """Train on preferences between pairs of answers: DPO, or a reward model."""
    resolved = settings.resolve("prefer")
    from posttrain.cluster.begin import begin_processes

    with nullcontext() if dry_run else begin_processes(resolved.config):
        from posttrain.preference import command as prefer

        echo(prefer.dry_run(resolved) if dry_run else prefer.run(resolved))


@with_settings(
    *(*PRESET, "algo.name", "rollout.tools", "rollout.env", "rollout.agent", *TRAINING),
    *("rollout.replay", "rollout.only", "rollout.replay_schedule", "reward.examine", *STARTING),
    about={"data.train": "Parquet of prompts (data.train)."},
)
def rl(settings: Settings, dry_run: DryRunOption = False) -> None:
    """Train with reinforcement learning on multi-turn episodes."""
    resolved = settings.resolve("rl")
    from posttrain.cluster.begin import begin_processes

    with nullcontext() if dry_run else begin_processes(resolved.config):
        from posttrain.rl import command as rl

        echo(rl.dry_run(resolved) if dry_run else rl.run(resolved))


def quickstart(
    seed: Annotated[int, typer.Option(min=0, help="Seed of data, training and sampling.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line on stdout at the end.")] = False,
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("runs/quickstart"),
    overwrite: OverwriteOption = False,
    vision: Annotated[bool, typer.Option("--vision", help="With a tiny model that sees, on pictures.")] = False,
) -> None:
    """Run the whole pipeline on the tiny model and print a table."""
    from posttrain.cluster.forkserver import fork_ahead

    with fork_ahead():
        from posttrain import quickstart

        quickstart.run(seed, out, as_json, overwrite, quickstart.VISION if vision else quickstart.TEXT)
