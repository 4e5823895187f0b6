"""The command line: parse, resolve the config, call one ``run``. Imports nothing heavy; commands import what they need.

Data goes to stdout, everything else to stderr. Exit codes: 0 (also after SIGTERM, when the run has saved), 1 for a
failed run, 2 for bad input, 130 for Ctrl-C.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec

import typer

from posttrain import __version__
from posttrain.defaults import MERGED_DTYPE, MERGED_SHARD_SIZE, WeightsDtype
from posttrain.errors import ConfigError, Interrupted, PosttrainError
from posttrain.options import (
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
)

if TYPE_CHECKING:
    from posttrain.presets import Resolved

P = ParamSpec("P")

app = typer.Typer(
    name="posttrain",
    help="From raw data to a better language model: prep, sft, prefer, rl, generate, eval, merge-ckpt.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
presets_app = typer.Typer(help="List the shipped presets, or show one.", invoke_without_command=True)
app.add_typer(presets_app, name="presets")

_debug = False


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Turn what a command raises into one message on stderr and an exit code."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except (typer.Exit, typer.Abort):
            raise
        except Interrupted as stopped:
            _fail(f"{stopped}; the same command goes on from there", None, stopped.exit_code)
        except KeyboardInterrupt:
            _fail("interrupted", None, 130)
        except PosttrainError as error:
            _fail(f"error: {error.message}", error.hint, error.exit_code)
        except BrokenPipeError:
            # The reader (`| head`) has gone. Point stdout elsewhere, or Python complains again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except Exception as error:
            _fail(f"error: {type(error).__name__}: {error}", "run with --debug for the traceback", 1)

    return wrapper


def _fail(message: str, hint: str | None, code: int) -> None:
    if _debug:
        traceback.print_exc(file=sys.stderr)
    typer.echo(message, err=True)
    if hint is not None:
        typer.echo(f"hint: {hint}", err=True)
    raise typer.Exit(code) from None


@app.callback()
def _main(debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False) -> None:
    global _debug
    _debug = debug


@app.command()
@guarded
def prep(
    name: Annotated[str | None, typer.Argument(help="Name of the data set; --list shows them.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the data sets.")] = False,
    source: Annotated[
        str | None, typer.Option(help="Raw files: a file, a folder or a glob; without it, the hub.")
    ] = None,
    out: Annotated[str | None, typer.Option(help="Folder to write to; default data/NAME.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many rows of each split.")] = None,
    split: Annotated[list[str] | None, typer.Option(help="Only this split; repeatable.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of generated data.")] = 0,
    train_rows: Annotated[int | None, typer.Option(min=1, help="Generated data: rows to train on.")] = None,
    test_rows: Annotated[int | None, typer.Option(min=1, help="Generated data: held-out rows.")] = None,
    val_fraction: Annotated[
        float, typer.Option(help="Share of the train split, by a hash of the prompt, that goes into val files.")
    ] = 0.0,
    template: Annotated[
        str | None,
        typer.Option(help="Chat template that must render every row: a .jinja file, or a model that has one."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Model whose tokenizer measures the rows, for the card's lengths.")
    ] = None,
    tools: Annotated[
        str | None, typer.Option(help="Tools, separated by commas, that go into SFT rows and tools_kwargs.")
    ] = None,
    decontaminate: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Drop training rows whose prompt overlaps this parquet or set; repeatable."),
    ] = None,
    plugin: PluginOption = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Turn raw data into checked parquet."""
    from posttrain import prep
    from posttrain.datasets import DATASETS
    from posttrain.registry import load_plugins

    load_plugins(plugin or [])
    if list_:
        prep.print_list()
        return
    if name is None:
        raise ConfigError("which data set?", hint=f"one of: {', '.join(DATASETS.names())}")
    report = prep.run(
        name,
        source,
        out,
        limit=limit,
        splits=split or (),
        seed=seed,
        train_rows=train_rows,
        test_rows=test_rows,
        val_fraction=val_fraction,
        template=template,
        tokenizer=tokenizer,
        tools=_tools(tools) or (),
        decontaminate=decontaminate or (),
        overwrite=overwrite,
    )
    for reason, rows in report.dropped.items():
        typer.echo(f"{rows} rows dropped: {reason}", err=True)
    for file, rows in report.rows.items():
        typer.echo(f"{Path(report.out) / file}  {rows} rows")


@app.command()
@guarded
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
) -> None:
    """Fine-tune on conversations."""
    flags = _run_flags(name, model, seed, overwrite, resume)
    flags |= {"data.train": data, "train.steps": steps, "cluster.workers": workers, "run.profile": profile}
    resolved = _resolve("sft", preset, set_, flags)
    from posttrain import sft

    typer.echo(sft.run(resolved))


@app.command()
@guarded
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
) -> None:
    """Train on pairs of answers, of which one is preferred: DPO, or a reward model."""
    flags = _run_flags(name, model, seed, overwrite, resume) | {"prefer.method": method}
    flags |= {"data.train": data, "train.steps": steps, "cluster.workers": workers, "run.profile": profile}
    resolved = _resolve("prefer", preset, set_, flags)
    from posttrain import prefer

    typer.echo(prefer.run(resolved))


@app.command()
@guarded
def rl(
    preset: PresetOption = None,
    set_: SetOption = None,
    algo: Annotated[str | None, typer.Option(help="RL algorithm: a bundle of algo.* values.")] = None,
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
) -> None:
    """Train with reinforcement learning on multi-turn episodes."""
    flags = _run_flags(name, model, seed, overwrite, resume)
    flags |= {"algo.name": algo, "rollout.tools": _tools(tools), "reward.examine": examine}
    flags |= {"data.train": data, "train.steps": steps, "cluster.workers": workers, "run.profile": profile}
    flags |= {"rollout.replay": replay, "rollout.only": rollout_only or None}
    resolved = _resolve("rl", preset, set_, flags)
    from posttrain import rl

    typer.echo(rl.run(resolved))


@app.command()
@guarded
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
) -> None:
    """Sample responses to a parquet of prompts."""
    flags = _run_flags(name, model, seed, overwrite)
    flags |= {"generate.data": data, "generate.out": out, "generate.limit": limit, "rollout.n": n}
    flags |= {"rollout.temperature": temperature, "rollout.tools": _tools(tools)}
    flags["generate.endpoint.url"] = endpoint
    resolved = _resolve("generate", preset, set_, flags)
    from posttrain import generate

    typer.echo(generate.run(resolved))


@app.command("eval")
@guarded
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


@app.command("merge-ckpt")
@guarded
def merge_ckpt(
    checkpoint: Annotated[str, typer.Argument(help="A run's name, its folder, or a global_step_N folder.")],
    out: Annotated[str, typer.Option(help="Hugging Face folder to write.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="Write a LoRA run's adapter alone, for peft.")] = False,
    dtype: Annotated[
        WeightsDtype | None, typer.Option(help="Type of the weights that are written.", show_default=MERGED_DTYPE)
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(help="Largest safetensors file.", show_default=MERGED_SHARD_SIZE)
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Load the result with transformers, and compare it with the trainer.")
    ] = False,
    push: Annotated[
        str | None, typer.Option(metavar="NAMESPACE/NAME", help="Upload the result to the Hugging Face hub.")
    ] = None,
    private: Annotated[
        bool | None,
        typer.Option("--private/--public", help="Who sees a repository that --push makes.", show_default="private"),
    ] = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Merge a sharded checkpoint, ours or verl's, into a Hugging Face folder. Takes memory for the largest weight."""
    from posttrain import merge_ckpt

    typer.echo(
        merge_ckpt.run(
            checkpoint,
            out,
            overwrite=overwrite,
            adapter=adapter,
            dtype=dtype,
            max_shard_size=max_shard_size,
            check=check,
            push=push,
            private=private,
        )
    )


@app.command()
@guarded
def quickstart(
    seed: Annotated[int, typer.Option(help="Seeds data, training and sampling.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON line on stdout.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for everything it makes.")] = Path("runs/quickstart"),
    overwrite: OverwriteOption = False,
) -> None:
    """Run the whole pipeline on the tiny model and print a table."""
    from posttrain import quickstart

    quickstart.run(seed, out, as_json, overwrite)


@presets_app.callback()
@guarded
def presets_list(context: typer.Context) -> None:
    """List the shipped presets: name, command, description."""
    if context.invoked_subcommand is not None:
        return
    from posttrain.presets import list_presets

    found = list_presets()
    width = max(len(preset.name) for preset in found)
    for preset in found:
        typer.echo(f"{preset.name:<{width}}  {preset.command:<8}  {preset.description}")


@presets_app.command("show")
@guarded
def presets_show(
    name: Annotated[str, typer.Argument(help="A preset's name, or the path of a .toml.")],
    provenance: Annotated[bool, typer.Option("--provenance", help="Say where each value came from.")] = False,
) -> None:
    """Print a preset's resolved config as TOML."""
    from posttrain.presets import dump_toml, load_preset, resolve

    command: Any = load_preset(name).command
    resolved = resolve(command, name)
    typer.echo(dump_toml(resolved.config, resolved.provenance if provenance else None), nl=False)


@app.command()
@guarded
def version(as_json: Annotated[bool, typer.Option("--json", help="One JSON line.")] = False) -> None:
    """Print the version."""
    typer.echo(json.dumps({"posttrain": __version__}) if as_json else __version__)


def _resolve(
    command: Literal["sft", "prefer", "rl", "generate"],
    preset: str | None,
    sets: list[str] | None,
    flags: dict[str, Any],
) -> Resolved:
    from posttrain.presets import default_preset, resolve

    if preset is None:
        preset, line = default_preset(command)
        typer.echo(line, err=True)
    return resolve(command, preset, sets or [], flags)


def _run_flags(
    name: str | None, model: str | None, seed: int | None, overwrite: bool, resume: str | None = None
) -> dict[str, Any]:
    return {
        "run.name": name,
        "run.seed": seed,
        "run.overwrite": overwrite or None,
        "run.resume": resume,
        "model.path": model,
    }


def _tools(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def main() -> None:
    """Entry point of the console script. ``--debug`` may stand anywhere on the line."""
    # At its end Python searches the objects of all libraries for cycles: 0.1 s and more. Nothing of ours needs that.
    atexit.register(gc.freeze)
    args = [arg for arg in sys.argv[1:] if arg != "--debug"]
    app(args=["--debug", *args] if len(args) < len(sys.argv) - 1 else args)
