"""`posttrain plan`: what a run will take, before it starts and without a GPU; and what it took, beside that.

The arithmetic is in ``posttrain.plan``. Here is what it is given: the config, the model's sizes, the machine, and
what can be told of the data. Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tomli

from posttrain.algos import ADVANTAGES
from posttrain.config import Config
from posttrain.config.keys import flatten_tree
from posttrain.config.preset_files import load_preset, presets_dir
from posttrain.config.presets import config_of, import_algorithms, resolve
from posttrain.core.errors import ConfigError, DataError, ModelError, UserError
from posttrain.core.machines import Machine, gpu_named, machine_stored, this_machine
from posttrain.core.registry import nearest
from posttrain.core.sizes import GIB
from posttrain.data.loader import total_steps
from posttrain.engines.choice import EngineChoice, choose_engine
from posttrain.models.config_json import read_config_file
from posttrain.models.load import locate, read_config
from posttrain.models.processors import processor_settings
from posttrain.plan.advice import Problem, Replan, Settings, assignments, changed
from posttrain.plan.batch import Lengths, assumed_lengths, longest_of, sequences_of_step
from posttrain.plan.compare import Pair, compare, lengths_of, waits_of
from posttrain.plan.estimate import Plan, Question
from posttrain.plan.images import NO_IMAGES, ImageLoad, images_of, sizing_of
from posttrain.plan.known import known_models
from posttrain.plan.layout import Kernels, Shapes, sync_budget
from posttrain.plan.problems import impossible, problems, too_large
from posttrain.plan.shape import ModelShape, shape_of
from posttrain.plan.table import as_data, render
from posttrain.plan.tower import TowerShape
from posttrain.runs.run import find_run, weights_of
from posttrain.tracking.metrics import FILE_NAME, with_current_names

_OVER_BUDGET = 1.05
"""A weight update that takes more than this times its budget is worth a warning."""


@dataclass(frozen=True)
class PlanOptions:
    """What the command line says beside the config."""

    gpu: str | None = None
    gpus: int | None = None
    nodes: int = 1
    length: float | None = None
    """Mean tokens of a sequence"""


@dataclass(frozen=True)
class Known:
    """What a command has found out that has looked at its data."""

    of_step: tuple[int, ...] = ()
    """Tokens of each sequence of the first step; empty: that is not known before"""
    prompt: float = 0.0
    """Mean tokens of a sequence that carry no loss: in `rl` its prompt"""
    steps: int | None = None
    """Steps of the run"""


def show(cfg: Config, asked: PlanOptions | None = None, as_json: bool = False, *, known: Known | None = None) -> str:
    """The plan of a run, as text or as one JSON line.

    Raises:
        UserError: the model cannot be found here, or a GPU of this name.
    """
    asked = asked or PlanOptions()
    question = question_of(cfg, asked, known)
    plan = Plan(question)
    found = problems(plan, replans(question, asked, known))
    return json.dumps(as_data(plan, found)) if as_json else render(plan, found)


def show_run(folder: Path, asked: PlanOptions, as_json: bool) -> str:
    """A run's figures beside those that a plan predicts with the lengths that it had, for the machine that it ran on or
    the one that was described.

    Raises:
        UserError: there is no run, it has no metrics, or its model cannot be found.
    """
    cfg = stored_config(folder)
    question, notes = _question_of_run(cfg, folder, asked)
    pairs = compared(question, folder)
    if as_json:
        rows = [{"metric": p.name, "predicted": p.predicted, "measured": p.measured, "off": p.off} for p in pairs]
        told = {"machine": question.machine.describe(), "notes": notes, "compared": rows}
        return json.dumps({"run": cfg.run.name, "command": cfg.command, **told})
    width = max(len(pair.name) for pair in pairs)
    lines = [f"posttrain {cfg.command} {cfg.run.name}", f"predicted for: {question.machine.describe()}"]
    lines += [f"note: {note}" for note in notes]
    lines += [f"  {'':<{width}}  predicted   measured    off"]
    lines += [f"  {p.name:<{width}}  {p.predicted:>9.4g}  {p.measured:>9.4g}  {p.off:>+4.0%}" for p in pairs]
    return "\n".join(lines)


def _question_of_run(cfg: Config, folder: Path, asked: PlanOptions) -> tuple[Question, list[str]]:
    """What a run was, and what to know of the comparison: it may have been made on another machine."""
    try:
        state = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder / 'run.json'} cannot be read: {error}", hint="is it the folder of a run?"
        ) from error
    host, here, kept = str(state.get("host", "")), socket.gethostname(), "machine" in state
    theirs = machine_stored(None if cfg.cluster.device == "cpu" else state["machine"]) if kept else None
    question = question_of(cfg, asked, machine=theirs if asked == PlanOptions(length=asked.length) else None)
    notes: list[str] = []
    if theirs is not None and theirs.gpu != question.machine.gpu:
        notes.append(f"the run was made on another machine: {theirs.describe()}; its times and memory are of that one")
    elif theirs is None and asked.gpu is None and host != here:
        notes.append(
            f"the run was made on another machine, {host or 'of unknown name'}, and this is {here}: times and memory "
            "are predicted for this one; --gpu names the run's"
        )
    return question, [*notes, *question.notes]


def compared(question: Question, folder: Path) -> list[Pair]:
    """What is both predicted and measured of a run. Raises ``DataError`` where it has no metrics yet."""
    file = folder / FILE_NAME
    try:
        rows = [with_current_names(json.loads(line), file) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}", hint="run.logger must have had jsonl in it") from error
    lengths = lengths_of(question.cfg, rows)
    if lengths is None:
        raise DataError(f"{file} has no steps yet", hint="wait for the first step")
    lengths = replace(lengths, images=question.lengths.images)
    return compare(Plan(replace(question, lengths=lengths, typical=True, waits=waits_of(question.cfg, rows))), rows)


def closing_line(cfg: Config, folder: Path) -> str | None:
    """The same in one line, for the end of a run; None: there is nothing to say, as on a CPU."""
    if cfg.cluster.device == "cpu":
        return None
    try:
        pairs = compared(question_of(cfg, PlanOptions()), folder)
    except UserError:
        return None  # without metrics, or of a model that plan does not know
    except Exception as error:  # whatever it is: a run that has been trained does not fail for it
        return f"warning: nothing was compared with the plan: {type(error).__name__}: {error}"
    if len(pairs) < 2:
        return None
    return "predicted / measured: " + ", ".join(pair.describe() for pair in pairs)


def stored_config(folder: Path) -> Config:
    """The config of a run. Raises ``ConfigError``."""
    file = folder / "config.toml"
    try:
        tree = tomli.loads(file.read_text(encoding="utf-8"))
        import_algorithms(tree.get("plugins"), [flatten_tree(tree)])
        return config_of(tree, str(file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", hint="was it made by this version?") from error


def run_folder(cfg_dir: str, name: str) -> Path:
    """The folder of a run, by its name or as a path. Raises ``ConfigError``."""
    return Path(name) if (Path(name) / "config.toml").is_file() else find_run(cfg_dir, name)


# ---------------------------------------------------------------------- what a plan is given


def question_of(
    cfg: Config, asked: PlanOptions, known: Known | None = None, *, machine: Machine | None = None
) -> Question:
    """What is known of a run before it starts. ``machine``: where it is; None: what was asked for. Raises
    ``UserError``."""
    shapes, notes = shapes_of(cfg)
    return _question(cfg, shapes, machine or machine_of(cfg, asked), asked, known or Known(), notes)


def _question(
    cfg: Config,
    shapes: Shapes,
    machine: Machine,
    asked: PlanOptions,
    known: Known,
    of_models: Sequence[str],
    images: ImageLoad | None = None,
) -> Question:
    kernels, notes = kernels_of(cfg, machine, described=asked.gpu is not None)
    images = images or (_images(cfg, tower) if (tower := shapes.actor.tower) else NO_IMAGES)
    lengths = replace(_lengths(cfg, asked.length, images), images=images)
    if known.of_step:
        mean = sum(known.of_step) / len(known.of_step)
        lengths = replace(lengths, mean=mean, prompt=known.prompt, source="the first batch")
    elif known.prompt:
        mean = known.prompt + cfg.rollout.max_response_tokens
        lengths = replace(lengths, mean=mean, prompt=known.prompt, source="the prompts, and the longest answers")
    return Question(
        cfg,
        shapes,
        machine,
        kernels,
        lengths,
        steps=_steps(cfg) if known.steps is None else known.steps,
        of_step=known.of_step or None,
        notes=(*of_models, *notes),
    )


def replans(question: Question, asked: PlanOptions, known: Known | None = None) -> Replan:
    """What plans the run of ``question`` again, with other settings."""

    def replan(settings: Settings) -> Plan | None:
        cfg = changed(question.cfg, settings)
        if cfg is None:
            return None
        machine = question.machine if asked.gpu is None else machine_of(cfg, asked)
        again = _question(cfg, question.shapes, machine, asked, known or Known(), (), question.lengths.images)
        if again.of_step is not None and sequences_of_step(cfg) != sequences_of_step(question.cfg):
            again = replace(again, of_step=None)  # of a batch of another size only the mean is known
        return Plan(again)

    return replan


def shapes_of(cfg: Config) -> tuple[Shapes, list[str]]:
    """The models that a run loads, and what had to be assumed of them. Raises ``UserError``."""
    notes: list[str] = []

    def shape(path: str, key: str = "model.path") -> ModelShape:
        if path.endswith(".json"):
            return shape_of(read_config_file(Path(path)), path)
        start = _start_of(cfg, path, key)
        if start != path:
            notes.append(f"{key} = {path!r} is not here yet: it is taken to be like {start!r}, which its preset trains")
        found, note = _sizes(weights_of(cfg.run.dir, start, key))
        notes.extend(note)
        return shape_of(found, path)

    advantage = ADVANTAGES.get(cfg.algo.advantage)
    rl = cfg.command == "rl"
    shapes = Shapes(
        shape(cfg.model.path),
        critic=shape(cfg.critic.path, "critic.path") if rl and advantage.critic and cfg.critic.path else None,
        teacher=shape(cfg.algo.teacher, "algo.teacher") if rl and advantage.teacher else None,
        reward=shape(cfg.reward.model.path, "reward.model.path") if rl and cfg.reward.model.path else None,
    )
    return shapes, list(dict.fromkeys(notes))


def _start_of(cfg: Config, path: str, key: str) -> str:
    """The model path, or of a run of a shipped preset that was not made yet the one that this preset starts from."""
    try:
        weights_of(cfg.run.dir, path, key)
    except UserError:
        name = path.removeprefix("run:").removesuffix("/best")
        if not path.startswith("run:") or not (presets_dir() / f"{name}.toml").is_file():
            raise
        command: Any = load_preset(name).command
        return _start_of(cfg, resolve(command, name).config.model.path, key)
    return path


def _sizes(path: str) -> tuple[dict[str, Any], list[str]]:
    """The config of a model, and what had to be assumed of it: a hub's model that is not in the local cache is looked
    up in the table of public models. Raises ``ModelError``."""
    try:
        return read_config(locate(path)), []
    except ModelError as error:
        models = known_models()
        if path in models:
            return models[path], [f"{path} is not in the local cache: its sizes are those that posttrain ships"]
        if close := nearest(path, models):
            raise ModelError(error.message, hint=f"did you mean {close!r}? Else {error.hint}") from error
        raise


def machine_of(cfg: Config, asked: PlanOptions) -> Machine:
    """The machine that was described, else this one."""
    if asked.gpu is None:
        if asked.gpus is not None or asked.nodes > 1:
            raise ConfigError("--gpus and --nodes say how many, and --gpu of what", hint="--gpu h200")
        return Machine(None) if cfg.cluster.device == "cpu" else this_machine()
    gpu = gpu_named(asked.gpu)
    engines = cfg.rollout.replicas * cfg.rollout.tensor_parallel
    own = cfg.samples and (cfg.cluster.placement == "separate" or not cfg.trains)
    wanted = (cfg.cluster.workers if cfg.trains else 0) + (engines if own else 0)
    return Machine(gpu, asked.gpus or max(1, -(-wanted // asked.nodes)), asked.nodes)


def kernels_of(cfg: Config, machine: Machine, *, described: bool = False) -> tuple[Kernels, list[str]]:
    """What computes there, and what had to be assumed. ``described``: it is not this machine."""
    on_gpu = machine.gpu is not None
    itemsize = {"float32": 4, "bfloat16": 2}.get(cfg.train.dtype, 2 if on_gpu else 4)
    compiled = cfg.train.compile == "on" or (cfg.train.compile == "auto" and on_gpu)
    asked, notes = cfg.train.attention, []
    repeats = on_gpu and asked == "torch"
    if on_gpu and asked == "auto" and not any(map(_installed, ("flash-attn-4", "flash-attn-3", "flash-attn"))):
        repeats = True
        notes.append("flash-attn is not installed here: attention of core torch is assumed, which takes more memory")
    auto = choose_engine("auto", gpu=on_gpu)
    if described and on_gpu and auto.name == "hf":
        auto = EngineChoice("sglang", "assumed to be installed there")
    return Kernels(compiled, itemsize, repeats, auto), notes


def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _lengths(cfg: Config, mean: float | None, images: ImageLoad) -> Lengths:
    """Given, or of the data's card and its images, or the longest that the config allows."""
    if mean is not None:
        return assumed_lengths(cfg, mean)
    of_card = _card_mean(cfg)
    assumed = assumed_lengths(cfg)
    if of_card is None:
        return assumed
    of_card += images.count * max(0.0, images.tokens - 1)  # the card is of text, with a token or a few for an image
    if cfg.command in ("sft", "prefer"):
        return Lengths(min(of_card, longest_of(cfg)), assumed.longest, source="the data's card")
    mean = of_card + cfg.rollout.max_response_tokens
    return Lengths(mean, assumed.longest, of_card, "prompts of the data's card, and the longest answers")


def _images(cfg: Config, tower: TowerShape) -> ImageLoad:
    """Images of the data, cut as the model's processor says where that is here."""
    settings: dict[str, Any] = {}
    folder = None
    with suppress(UserError):  # of a model that is known by its sizes alone
        source = locate(weights_of(cfg.run.dir, _start_of(cfg, cfg.model.path, "model.path"), "model.path"))
        folder = Path(source.path) if Path(source.path).is_dir() else None
        settings = processor_settings(source) if source.builtin or folder else {}
    return images_of(cfg, tower, sizing_of(settings, tower, folder))


def _card_mean(cfg: Config) -> float | None:
    """Mean tokens of a row of the training data, where `prep --tokenizer` has measured them."""
    if not isinstance(cfg.data.train, str):
        return None
    try:
        card = json.loads(Path(f"{cfg.data.train}.card.json").read_text(encoding="utf-8"))
        measured = [v for k, v in card["lengths"].items() if k.endswith("in the chat template, tokens")]
        return float(measured[0]["mean"]) if measured else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _steps(cfg: Config) -> int | None:
    """Return the steps of the run; None where the data is not here."""
    if cfg.train.steps is not None:
        return cfg.train.steps
    if cfg.rollout.replay or not cfg.data.train:
        return None
    import pyarrow.parquet as pq

    from posttrain.data.shards import shard_files

    try:
        rows = sum(pq.read_metadata(file).num_rows for file in shard_files(cfg.data.train))
    except (DataError, OSError, ValueError):
        return None
    return total_steps(rows, cfg.data.batch_size, cfg.train.epochs, None)


# ---------------------------------------------------------------------- the memory of a colocated run


@dataclass
class MemoryBudget:
    """What a weight update may take of the trainers' GPUs, and whether it did."""

    gib: float | None
    """None: not known"""
    note: Callable[[str], Any]
    warned: bool = False

    def check(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics of an update with the budget beside them. The first one above it is told of."""
        used = metrics.get("sync/gpu_used_gib")
        if used is None or self.gib is None:
            return metrics
        if used > _OVER_BUDGET * self.gib and not self.warned:
            self.warned = True
            self.note(
                f"warning: a weight update took {used:.1f} GiB of a GPU, and {self.gib:.1f} were reckoned with: "
                "does another program use it? (docs/plan.md)"
            )
        return metrics | {"sync/gpu_budget_gib": self.gib}


def check_budget(cfg: Config) -> float | None:
    """GiB that a weight update is to take of the trainers' fullest GPU; None: on a CPU, or of a cluster elsewhere, or
    where no engine shares it.

    Raises:
        ConfigError: weights and caches alone do not fit onto the GPUs of this machine.
    """
    plan = _plan_here(cfg)
    if plan is None:
        return None
    problem = impossible(plan, replans(plan.question, PlanOptions()))
    if problem is not None:
        raise ConfigError(problem.message, hint=f"{_fixes(problem)}; `posttrain plan` shows every moment")
    budget = sync_budget(plan.layout)
    return None if budget is None else budget / GIB


def memory_warning(cfg: Config) -> str | None:
    """Return what to tell of a run that has no room on this machine's GPUs, with micro-batches as large as they may be;
    None: it has, or it is not known."""
    plan = _plan_here(cfg)
    problem = None if plan is None else too_large(plan, replans(plan.question, PlanOptions()))
    if problem is None:
        return None
    hint = f"{_fixes(problem)}; `posttrain plan` shows every moment"
    return f"warning: by its plan this run {problem.message}\n  hint: {hint}"


def _plan_here(cfg: Config) -> Plan | None:
    """Return the plan of a run on this machine's GPUs; None: it runs on a CPU or elsewhere, or no plan can be made of
    its kind of model."""
    if cfg.cluster.device == "cpu" or cfg.cluster.address is not None:
        return None
    machine = this_machine()
    if not machine.memory:
        return None
    try:
        return Plan(question_of(cfg, PlanOptions(), machine=machine))
    except ModelError:
        return None


def _fixes(problem: Problem) -> str:
    """Return the settings that put a problem right, as they are typed, or what else helps."""
    fixes = [f"--set {' --set '.join(assignments(settings))}" for settings in problem.settings]
    return " or ".join(fixes) or problem.otherwise
