"""Options that several commands of the command line have."""

from __future__ import annotations

from typing import Annotated

import typer

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
    typer.Option("--plugin", metavar="FILE", help="Import your own data sets and graders; repeatable."),
]
ExamineOption = Annotated[
    int | None, typer.Option("--examine", min=0, help="Print so many graded conversations (reward.examine).")
]
ProfileOption = Annotated[
    str | None, typer.Option(metavar="FIRST:LAST", help="Trace the updates of these steps (run.profile).")
]
ToolsOption = Annotated[str | None, typer.Option("--tools", help="Tools, separated by commas (rollout.tools).")]
