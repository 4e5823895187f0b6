"""The commands as functions, for notebooks and other programs: a preset in, a result out.

A preset is the name of a shipped one, the path of a ``.toml`` file, or a dict that holds what such a file would
(``{"extends": "tiny-arith", "train.steps": 10}``). Keyword arguments are the command's options. Functions raise what
``core.errors`` has and never end the process, and they may be called where an event loop runs, as in a notebook.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, TypeVar, Unpack, get_type_hints

from pydantic import TypeAdapter, ValidationError

from posttrain.config import Command, RunConfig
from posttrain.config.presets import Resolved, resolve
from posttrain.core.defaults import WeightsDtype
from posttrain.core.errors import ConfigError
from posttrain.core.quiet import quiet_libraries
from posttrain.core.registry import load_plugins, unknown
from posttrain.core.signals import call_in_thread
from posttrain.runs.run import run_folder
from posttrain.tracking.report.folder import RunFolder
from posttrain.tracking.report.frames import LoadedRun

if TYPE_CHECKING:
    from posttrain.evaluation.tables import Report
    from posttrain.prep.command import PrepReport

T = TypeVar("T")
Preset = str | Path | Mapping[str, Any]


class RunOptions(TypedDict, total=False):
    """Options of every command with a preset. Each stands for the key of the config that its annotation names."""

    name: Annotated[str, "run.name"]
    model: Annotated[str, "model.path"]
    seed: Annotated[int, "run.seed"]
    overwrite: Annotated[bool, "run.overwrite"]
    console: Annotated[Literal["auto", "panel", "plain", "json", "quiet"], "run.console"]
    plugins: Annotated[Sequence[str], "plugins"]


class TrainingOptions(RunOptions, total=False):
    """Options of ``run_sft``."""

    data: Annotated[str | Path, "data.train"]
    steps: Annotated[int, "train.steps"]
    workers: Annotated[int, "cluster.workers"]
    resume: Annotated[str, "run.resume"]
    profile: Annotated[str, "run.profile"]


class PreferenceOptions(TrainingOptions, total=False):
    """Options of ``run_preference``."""

    method: Annotated[Literal["dpo", "reward_model"], "prefer.method"]


class RlOptions(TrainingOptions, total=False):
    """Options of ``run_rl``."""

    algo: Annotated[str, "algo.name"]
    tools: Annotated[Sequence[str], "rollout.tools"]
    env: Annotated[str, "rollout.env"]
    agent: Annotated[str, "rollout.agent"]
    replay: Annotated[str, "rollout.replay"]
    rollout_only: Annotated[bool, "rollout.only"]
    replay_schedule: Annotated[str, "rollout.replay_schedule"]
    examine: Annotated[int, "reward.examine"]


class SamplingOptions(RunOptions, total=False):
    """Options of ``run_generate`` and ``run_eval`` that say what is sampled."""

    data: Annotated[str | Path, "generate.data"]
    limit: Annotated[int, "generate.limit"]
    endpoint: Annotated[str, "generate.endpoint.url"]
    n: Annotated[int, "rollout.n"]
    temperature: Annotated[float, "rollout.temperature"]
    tools: Annotated[Sequence[str], "rollout.tools"]
    env: Annotated[str, "rollout.env"]
    agent: Annotated[str, "rollout.agent"]


class GenerateOptions(SamplingOptions, total=False):
    """Options of ``run_generate``."""

    out: Annotated[str | Path, "generate.out"]


class EvalOptions(SamplingOptions, total=False):
    """Options of ``run_eval``."""

    pass_at: Annotated[Sequence[int], "eval.pass_at"]
    examine: Annotated[int, "reward.examine"]


class PrepOptions(TypedDict, total=False):
    """Options of ``run_prep``; see ``posttrain.prep.command.Options``."""

    limit: int
    train_rows: int
    test_rows: int
    seed: int
    splits: Sequence[str]
    template: str
    tokenizer: str
    tools: Sequence[str]
    demos: str
    val_fraction: float
    decontaminate: Sequence[str]


@dataclass(frozen=True)
class TrainingResult:
    """A training run that has ended."""

    path: Path
    """The run's folder."""
    step: int
    """The last step."""
    checkpoint: Path | None
    """The newest checkpoint; None where the run writes none (``rollout_only``)."""
    metrics: Mapping[str, float] = field(repr=False)
    """Metrics of the last step."""

    @property
    def name(self) -> str:
        return self.path.name

    def load(self) -> LoadedRun:
        """Return the whole run, as ``load_run`` does."""
        return LoadedRun(RunFolder.read(self.path))


@dataclass(frozen=True)
class GenerateResult:
    """Responses that were sampled."""

    file: Path
    """Parquet: the rows of the prompts with a column ``responses`` (docs/evaluate.md)."""


@dataclass(frozen=True)
class EvalResult:
    """The scores of responses."""

    file: Path
    """The responses."""
    scores: Mapping[str, float]
    """``pass@k``, ``mean@n`` ... over all problems, by name; a score that no problem has is left out."""
    report: Report = field(repr=False)
    """The scores with intervals, by data source and level too."""


@dataclass(frozen=True)
class MergeResult:
    """A model that transformers loads: ``AutoModelForCausalLM.from_pretrained(result.path)``."""

    checkpoint: str
    """What was merged."""
    path: Path


def run_prep(
    name: str,
    source: str | Path | None = None,
    out: str | Path | None = None,
    *,
    plugins: Sequence[str] = (),
    overwrite: bool = False,
    **options: Unpack[PrepOptions],
) -> PrepReport:
    """Turn the raw data of a data set into checked parquet, as `posttrain prep` does.

    Args:
        name: of the data set.
        source: raw files: a file, a folder or a glob; None: the hub, or generated.
        out: folder to write to; None: ``data/<name>``.
        plugins: files or modules to import first.
        overwrite: replace files that are there.
        options: see ``PrepOptions``.

    Raises:
        UserError: a bad name, option, source or row. Nothing is written then.
    """
    from posttrain.prep import command as prep

    hints = get_type_hints(prep.Options)
    _check_names(options, hints)
    _check_types({"name": name, "plugins": plugins, **options}, {"name": str, "plugins": Sequence[str], **hints})
    _check_path("source", source)
    _check_path("out", out)

    def run() -> PrepReport:
        load_plugins(plugins)
        places = (None if path is None else str(path) for path in (source, out))
        return prep.run(name, *places, overwrite=overwrite, **options)

    return _call(run)


def run_sft(preset: Preset | None = None, **options: Unpack[TrainingOptions]) -> TrainingResult:
    """Fine-tune on conversations, as `posttrain sft` does.

    Args:
        preset: see the module; None: the one that the command takes.
        options: see ``TrainingOptions``.

    Raises:
        UserError: bad config, data or model. Nothing is written then.
        RunError: the run failed; the same call resumes it.
        Interrupted: somebody asked it to stop (Ctrl-C, an interrupted cell); likewise.
    """
    from posttrain.sft import command as sft

    return _train("sft", sft.run, preset, options, TrainingOptions)


def run_preference(preset: Preset | None = None, **options: Unpack[PreferenceOptions]) -> TrainingResult:
    """Train on pairs of answers, as `posttrain prefer` does. Arguments and errors are those of ``run_sft``, options
    those of ``PreferenceOptions``."""
    from posttrain.preference import command as prefer

    return _train("prefer", prefer.run, preset, options, PreferenceOptions)


def run_rl(preset: Preset | None = None, **options: Unpack[RlOptions]) -> TrainingResult:
    """Train with reinforcement learning, as `posttrain rl` does. Arguments and errors are those of ``run_sft``, options
    those of ``RlOptions``."""
    from posttrain.rl import command as rl

    return _train("rl", rl.run, preset, options, RlOptions)


def run_generate(preset: Preset | None = None, **options: Unpack[GenerateOptions]) -> GenerateResult:
    """Sample responses to a parquet of prompts, as `posttrain generate` does. Errors are those of ``run_sft``.

    Args:
        preset: see the module; None: the one that the command takes.
        options: see ``GenerateOptions``.
    """
    from posttrain.generation import command as generate

    resolved = _resolve("generate", preset, options, GenerateOptions)
    return GenerateResult(_call(lambda: generate.run(resolved)))


def run_eval(
    file: str | Path | None = None,
    preset: Preset | None = None,
    *,
    failures: str | Path | None = None,
    **options: Unpack[EvalOptions],
) -> EvalResult:
    """Grade responses, as `posttrain eval` does. Errors are those of ``run_sft``.

    Args:
        file: responses, as of ``GenerateResult.file``; None: they are sampled first, unless an earlier call with the
            same settings has sampled them.
        preset: with a file, a dict of the config's ``reward``, ``sandbox`` and ``eval``; without one, what
            ``run_generate`` takes.
        failures: file (.md, .jsonl or .parquet) for each response that is not right.
        options: see ``EvalOptions``. Those that say what is sampled are for calls without a file.

    Raises:
        ConfigError: also for a file together with options of sampling.
    """
    from posttrain.evaluation import command as evaluate

    _check_path("file", file)
    if file is None:
        resolved = evaluate.with_run_name(_resolve("generate", preset, options, EvalOptions))
    else:
        sampling = {*get_type_hints(SamplingOptions)} - {"seed", "plugins", "console", "overwrite"}
        if unused := sorted({*options} & sampling):
            names = ", ".join(f"{name}=" for name in unused)
            verb = "is an option" if len(unused) == 1 else "are options"
            raise ConfigError(
                f"{names} {verb} of sampling and cannot go with a file", hint="leave out the file, or the options"
            )
        resolved = _resolve("eval", preset, options, EvalOptions)

    target = None if failures is None else Path(failures)
    read = evaluate.files_of(resolved.config) if file is None else [file]
    evaluate.check_output(resolved.config, None, target, read=read)

    def run() -> Report:
        load_plugins(resolved.config.plugins)
        responses = evaluate.sample(resolved) if file is None else Path(file)
        return evaluate.score(responses, resolved.config, target)

    report = _call(run)
    scores = {name: value for name, value in report.overall.items() if "@" in name and value is not None}
    return EvalResult(Path(report.file), scores, report)


def merge_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    *,
    overwrite: bool = False,
    adapter: bool = False,
    dtype: WeightsDtype | None = None,
    max_shard_size: str | None = None,
    check: bool = False,
    push: str | None = None,
    private: bool | None = None,
    runs: str | Path = RunConfig().dir,
) -> MergeResult:
    """Merge a sharded checkpoint into a folder of transformers, as `posttrain merge-ckpt` does.

    Args:
        checkpoint: a run's name, its folder, or a ``global_step_N`` folder.
        out: folder to write.
        overwrite: replace a model's folder that is there.
        adapter: write the adapter of a LoRA run alone, for peft.
        dtype: of the weights; None: ``defaults.MERGED_DTYPE``.
        max_shard_size: of a safetensors file, such as "500MB"; None: ``defaults.MERGED_SHARD_SIZE``.
        check: compare the result with what the trainer computed.
        push: repository of the Hugging Face hub to upload the result to.
        private: whether a new repository is private; None: yes.
        runs: folder of runs, for a run's name.

    Raises:
        UserError: no sound checkpoint, or ``out`` exists.
        RunError: the result differs from the trainer's model, or the upload failed.
    """
    from posttrain import merge_ckpt

    def run() -> Path:
        return merge_ckpt.run(
            str(checkpoint),
            str(out),
            overwrite=overwrite,
            adapter=adapter,
            dtype=dtype,
            max_shard_size=max_shard_size,
            check=check,
            push=push,
            private=private,
            runs=str(runs),
        )

    return MergeResult(str(checkpoint), _call(run))


def load_run(name: str | Path, runs: str | Path = RunConfig().dir) -> LoadedRun:
    """Return what a run has recorded so far: config, status, metrics and rollouts.

    Args:
        name: of the run, ``latest``, or the path of its folder.
        runs: folder of runs.

    Raises:
        ConfigError: there is no such run; the hint has the nearest name.
    """
    return LoadedRun(RunFolder.read(run_folder(runs, name)))


# ---------------------------------------------------------------------- shared


def _train(
    command: Command,
    run: Callable[[Resolved], Path],
    preset: Preset | None,
    options: Mapping[str, Any],
    declared: type[RunOptions],
) -> TrainingResult:
    """Run a command that trains and read from its folder how it ended."""
    from posttrain.train import checkpoint

    resolved = _resolve(command, preset, options, declared)
    path = _call(lambda: run(resolved))
    rows = RunFolder.read(path).rows
    last = {name: float(value) for name, value in rows[-1].items()} if rows else {}
    step = int(last.pop("step", 0))
    saved = checkpoint.last_step(path / "checkpoints")
    return TrainingResult(path, step, None if saved is None else path / "checkpoints" / f"global_step_{saved}", last)


def _resolve(
    command: Command, preset: Preset | None, options: Mapping[str, Any], declared: type[RunOptions]
) -> Resolved:
    """Return the config of a command. Raises ``ConfigError``, also for an option that the command does not have."""
    keys = {name: hint.__metadata__[0] for name, hint in get_type_hints(declared, include_extras=True).items()}
    _check_names(options, keys, "; keys of the config go into the preset: {'extends': NAME, KEY: value}")
    if not isinstance(preset, str | Path | Mapping | None):
        raise ConfigError(f"preset {preset!r} is no preset", hint="give a name, the path of a .toml file or a dict")
    flags = {keys[name]: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    return resolve(command, str(preset) if isinstance(preset, Path) else preset, flags=flags)


def _check_names(options: Mapping[str, Any], known: Iterable[str], more: str = "") -> None:
    """Raise ``ConfigError`` for an option that is not among ``known``; the hint ends with ``more``."""
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}", hint=unknown(name, known) + more)


def _check_types(options: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for an option whose value is not of its type."""
    for name, value in options.items():
        try:
            TypeAdapter(hints[name]).validate_python(value, strict=True)
        except ValidationError as error:
            listed = isinstance(value, str) and hints[name] == Sequence[str]
            hint = f"give a list: {name}=[{value!r}]" if listed else "see posttrain.api.PrepOptions for the types"
            raise ConfigError(f"{name} = {value!r}: {error.errors()[0]['msg']}", hint=hint) from None


def _check_path(name: str, value: object) -> None:
    """Raise ``ConfigError`` for what is no path, such as a frame of pandas."""
    if not isinstance(value, str | Path | None):
        raise ConfigError(
            f"{name} is a {type(value).__name__}, and no path",
            hint="write it to a file, a frame with to_parquet, and give its path",
        )


def _call(function: Callable[[], T]) -> T:
    """Call what a command calls: in a thread of its own where this one has a running event loop."""
    quiet_libraries()
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function()
    return call_in_thread(function)
