"""Responses and their grades: generate, eval."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.console import echo
from posttrain.cli.options import (
    ConsoleOption,
    EndpointOption,
    ExamineOption,
    LimitOption,
    ModelOption,
    NameOption,
    OverwriteOption,
    PluginOption,
    PresetOption,
    RepeatsOption,
    SeedOption,
    SetOption,
    TemperatureOption,
    ToolsOption,
    resolve_for,
    run_flags,
    sampling_flags,
)
from posttrain.core.errors import ConfigError


def generate(
    preset: PresetOption = None,
    set_: SetOption = None,
    name: NameOption = None,
    model: ModelOption = None,
    data: Annotated[str | None, typer.Option(help="Parquet of prompts (generate.data).")] = None,
    out: Annotated[str | None, typer.Option(help="Responses parquet (generate.out).")] = None,
    n: RepeatsOption = None,
    temperature: TemperatureOption = None,
    limit: LimitOption = None,
    endpoint: EndpointOption = None,
    tools: ToolsOption = None,
    seed: SeedOption = None,
    overwrite: OverwriteOption = False,
    plugin: PluginOption = None,
    console: ConsoleOption = None,
) -> None:
    """Sample responses to a parquet of prompts."""
    flags = run_flags(name, model, seed, overwrite, console, plugin) | {"generate.out": out}
    flags |= sampling_flags(data, limit, endpoint, n, temperature, tools)
    resolved = resolve_for("generate", preset, set_, flags)
    from posttrain.generation import command as generate

    echo(generate.run(resolved))


def evaluate(
    file: Annotated[
        Path | None, typer.Argument(help="Responses parquet; default: the newest one under runs/, or what is sampled.")
    ] = None,
    pass_at: Annotated[str, typer.Option("--pass-at", help="k of pass@k, separated by commas.")] = "1",
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", metavar="A B", help="Compare two responses files on the problems that both have."),
    ] = None,
    failures: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write each response that is not right, as .md, .jsonl or .parquet; - shows them."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line on stdout.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
    examine: ExamineOption = None,
    preset: PresetOption = None,
    set_: SetOption = None,
    name: NameOption = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Sample from this model first (model.path), and grade that.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Parquet of prompts to sample (generate.data).")] = None,
    n: RepeatsOption = None,
    temperature: TemperatureOption = None,
    limit: LimitOption = None,
    endpoint: EndpointOption = None,
    tools: ToolsOption = None,
    seed: SeedOption = None,
    overwrite: OverwriteOption = False,
    plugin: PluginOption = None,
) -> None:
    """Grade responses: pass@k, mean@N, best@N and maj@N by data source and level, with intervals.

    With --preset, --model or --data, responses are sampled first, as `posttrain generate` does it; what an earlier
    command of the same settings has sampled is taken as it is.
    """
    from posttrain.config.presets import resolve
    from posttrain.core.registry import load_plugins
    from posttrain.evaluation import command as evaluate
    from posttrain.evaluation.rows import newest_responses

    try:
        ks = [int(k) for k in pass_at.split(",")]
    except ValueError:
        raise ConfigError(f"--pass-at {pass_at!r} is not a list of whole numbers", hint="--pass-at 1,5") from None
    flags = {"eval.pass_at": ks, "plugins": plugin, "reward.examine": examine, "run.seed": seed}
    sampling = run_flags(name, model, None, overwrite)
    sampling |= sampling_flags(data, limit, endpoint, n, temperature, tools)
    if preset is None and model is None and data is None:
        given = [key for key, value in sampling.items() if value is not None]
        if given:
            raise ConfigError(f"{given[0]} is given, and nothing is sampled", hint="give --model, --data or --preset")
        resolved = resolve("eval", sets=set_ or [], flags=flags)
        load_plugins(resolved.config.plugins)
        if compare is not None:
            _refuse(file is not None or failures is not None, "--compare takes its two files and no other")
            evaluate.run_comparison(*compare, resolved.config, as_json, out)
            return
        if file is None:
            file = newest_responses()
            echo(f"evaluating {file}", err=True)
    else:
        _refuse(file is not None or compare is not None, "a file is given, and --preset, --model or --data")
        resolved = resolve_for("generate", preset, set_, sampling | flags)
        if name is None and not any(text.partition("=")[0].strip() == "run.name" for text in set_ or []):
            cfg = resolved.config
            sampling["run.name"] = evaluate.run_name(cfg.model.path, cfg.generate.data)
            resolved = resolve("generate", preset, set_ or [], sampling | flags)
        file = evaluate.sample(resolved)
    evaluate.run(file, resolved.config, as_json, out, failures)


def _refuse(found: bool, message: str) -> None:
    if found:
        raise ConfigError(message, hint="give one or the other")
