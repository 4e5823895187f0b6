"""Responses and their grades: generate, eval."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.options import (
    ConsoleOption,
    ExamineOption,
    ModelOption,
    NameOption,
    OverwriteOption,
    PluginOption,
    PresetOption,
    SeedOption,
    SetOption,
    ToolsOption,
    resolve_for,
    run_flags,
    tools_of,
)
from posttrain.errors import ConfigError


def generate(
    preset: PresetOption = None,
    set_: SetOption = None,
    name: NameOption = None,
    model: ModelOption = None,
    data: Annotated[str | None, typer.Option(help="Parquet of prompts (generate.data).")] = None,
    out: Annotated[str | None, typer.Option(help="Responses parquet (generate.out).")] = None,
    n: Annotated[int | None, typer.Option("--n", "-n", help="Responses per prompt (rollout.n).")] = None,
    temperature: Annotated[float | None, typer.Option(help="rollout.temperature")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many prompts (generate.limit).")] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="An OpenAI-compatible server that samples (generate.endpoint.url).")
    ] = None,
    tools: ToolsOption = None,
    seed: SeedOption = None,
    overwrite: OverwriteOption = False,
    console: ConsoleOption = None,
) -> None:
    """Sample responses to a parquet of prompts."""
    flags = run_flags(name, model, seed, overwrite)
    flags |= {"generate.data": data, "generate.out": out, "generate.limit": limit, "rollout.n": n}
    flags |= {"rollout.temperature": temperature, "rollout.tools": tools_of(tools)}
    flags |= {"generate.endpoint.url": endpoint, "run.console": console}
    resolved = resolve_for("generate", preset, set_, flags)
    from posttrain import generate

    typer.echo(generate.run(resolved))


def evaluate(
    file: Annotated[Path | None, typer.Argument(help="Responses parquet; default: the newest one under runs/.")] = None,
    pass_at: Annotated[str, typer.Option("--pass-at", help="k of pass@k, separated by commas.")] = "1",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line on stdout.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
    examine: ExamineOption = None,
    set_: SetOption = None,
    plugin: PluginOption = None,
) -> None:
    """Grade responses: pass@k by data source."""
    from posttrain import evaluate
    from posttrain.presets import resolve
    from posttrain.registry import load_plugins

    try:
        ks = [int(k) for k in pass_at.split(",")]
    except ValueError:
        raise ConfigError(f"--pass-at {pass_at!r} is not a list of whole numbers", hint="--pass-at 1,5") from None
    flags = {"eval.pass_at": ks, "plugins": plugin, "reward.examine": examine}
    resolved = resolve("eval", sets=set_ or [], flags=flags)
    load_plugins(resolved.config.plugins)
    if file is None:
        file = evaluate.newest_responses()
        typer.echo(f"evaluating {file}", err=True)
    evaluate.run(file, resolved.config, as_json, out)
