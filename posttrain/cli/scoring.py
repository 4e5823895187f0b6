"""Commands that sample and grade responses: generate, eval."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.console import echo
from posttrain.cli.options import PRESET, SAMPLING, Settings, with_settings
from posttrain.config import EvalConfig
from posttrain.core.errors import ConfigError

_PASS_AT = ",".join(map(str, EvalConfig().pass_at))
_SAMPLED = frozenset({"model.path", "generate.data", "rollout.env", "rollout.agent"})
"""Keys that say what is sampled."""


@with_settings(
    *(*PRESET, "run.name", "model.path", "generate.data", "generate.out", *SAMPLING),
    *("run.seed", "run.overwrite", "plugins", "run.console"),
)
def generate(settings: Settings) -> None:
    """Sample responses to a parquet of prompts, or episodes of an environment or agent."""
    resolved = settings.resolve("generate")
    from posttrain.cluster.begin import begin_processes

    with begin_processes(resolved.config):
        from posttrain.generation import command as generate

        echo(generate.run(resolved))


@with_settings(
    *("reward.examine", *PRESET, "run.name", "model.path", "generate.data", *SAMPLING),
    *("run.seed", "run.overwrite", "plugins"),
    about={
        "model.path": "Sample from this model first (model.path), and grade that.",
        "generate.data": "Parquet of prompts to sample (generate.data).",
    },
)
def evaluate(
    file: Annotated[
        Path | None, typer.Argument(help="Responses parquet; default: the sampled one, or the newest one in run.dir.")
    ] = None,
    pass_at: Annotated[
        str | None, typer.Option("--pass-at", help="k of pass@k, separated by commas.", show_default=_PASS_AT)
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", metavar="A B", help="Compare two responses files on their common problems."),
    ] = None,
    failures: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the wrong responses as .md, .jsonl or .parquet; - shows them."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line on stdout.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
    *,
    settings: Settings,
) -> None:
    """Grade responses: pass@k, mean@N, best@N and maj@N by data source and level, with intervals.

    With --preset, --model, --data, --env or --agent, responses are sampled first, as with `posttrain generate`.
    Responses that an earlier command sampled with the same settings are reused.
    """
    flags = {"eval.pass_at": None if pass_at is None else _whole_numbers(pass_at)}
    if settings.preset is not None or settings.flags.keys() & _SAMPLED:
        _refuse(
            file is not None or compare is not None, "a file is given, and --preset, --model, --data, --env or --agent"
        )
        resolved = settings.resolve("generate", flags, ("eval", "generate"))
        from posttrain.cluster.begin import begin_processes

        with begin_processes(resolved.config):
            from posttrain.evaluation import command as evaluate

            resolved = evaluate.with_run_name(resolved)
            sampled = evaluate.files_of(resolved.config)
            evaluate.check_output(resolved.config, out, failures, read=sampled, as_json=as_json)
            file = evaluate.sample(resolved)
        evaluate.run(file, resolved.config, as_json, out, failures)
        return
    resolved = settings.resolve("eval", flags)
    from posttrain.core.registry import load_plugins
    from posttrain.evaluation import command as evaluate
    from posttrain.evaluation.rows import newest_responses

    load_plugins(resolved.config.plugins)
    if compare is not None:
        _refuse(file is not None, "--compare takes its two files and no other")
        _refuse(failures is not None, "--compare writes no failures, and --failures is given too")
        for key in ("eval.pass_at", "reward.examine"):
            _refuse(resolved.provenance[key] != "default", f"--compare does not read {key}, which is given too")
        evaluate.check_output(resolved.config, out, None, read=compare, as_json=as_json)
        evaluate.run_comparison(*compare, resolved.config, as_json, out)
        return
    if file is None:
        file = newest_responses(Path(resolved.config.run.dir))
        echo(f"evaluating {file}", err=True)
    evaluate.check_output(resolved.config, out, failures, read=[file], as_json=as_json)
    evaluate.run(file, resolved.config, as_json, out, failures)


def _whole_numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"--pass-at {text!r} is not a list of whole numbers", hint="--pass-at 1,5") from None


def _refuse(found: bool, message: str) -> None:
    if found:
        raise ConfigError(message, hint="give one or the other")
