"""`posttrain plan`: what a run will take, before it starts and without a GPU; and what it took, beside that.

The arithmetic is in ``posttrain.planning``. Here is what it is given: the config, the model's sizes, the machine, and
what can be told of the data. Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tomli

from posttrain.algos.catalog import ADVANTAGES
from posttrain.config import Config
from posttrain.data.loader import total_steps
from posttrain.errors import ConfigError, DataError, ModelError, UserError
from posttrain.models.config_json import read_config_file
from posttrain.models.load import locate, read_config
from posttrain.planning.batch import Lengths, assumed_lengths, longest_of
from posttrain.planning.compare import Pair, compare, lengths_of
from posttrain.planning.estimate import Plan, Question
from posttrain.planning.layout import Kernels, Shapes, sync_budget
from posttrain.planning.machines import Machine, gpu_named, this_machine
from posttrain.planning.problems import impossible, problems
from posttrain.planning.shape import ModelShape, shape_of
from posttrain.planning.sizes import GIB
from posttrain.planning.table import as_data, render
from posttrain.runs import find_run, weights_of
from posttrain.track.metrics import FILE_NAME

_OVER_BUDGET = 1.05
"""A weight update that takes more than this times its budget is worth a warning."""


@dataclass(frozen=True)
class Asked:
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
    """Of the run"""


def show(cfg: Config, asked: Asked | None = None, as_json: bool = False, *, known: Known | None = None) -> str:
    """The plan of a run, as text or as one JSON line.

    Raises:
        UserError: the model cannot be found here, or a GPU of this name.
    """
    question = question_of(cfg, asked or Asked(), known)
    plan = Plan(question)
    found = problems(plan)
    return json.dumps(as_data(plan, found)) if as_json else render(plan, found)


def show_run(folder: Path, asked: Asked, as_json: bool) -> str:
    """A run's figures beside those that a plan predicts with the lengths that it had.

    Raises:
        UserError: there is no run, it has no metrics, or its model cannot be found.
    """
    cfg = stored_config(folder)
    pairs = compared(cfg, folder, asked)
    if as_json:
        rows = [{"metric": p.name, "predicted": p.predicted, "measured": p.measured, "off": p.off} for p in pairs]
        return json.dumps({"run": cfg.run.name, "command": cfg.command, "compared": rows})
    width = max(len(pair.name) for pair in pairs)
    lines = [f"posttrain {cfg.command} {cfg.run.name}", f"  {'':<{width}}  predicted   measured    off"]
    lines += [f"  {p.name:<{width}}  {p.predicted:>9.4g}  {p.measured:>9.4g}  {p.off:>+4.0%}" for p in pairs]
    return "\n".join(lines)


def compared(cfg: Config, folder: Path, asked: Asked) -> list[Pair]:
    """What is both predicted and measured of a run. Raises ``DataError`` where it has no metrics yet."""
    file = folder / FILE_NAME
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}", hint="run.logger must have had jsonl in it") from error
    lengths = lengths_of(cfg, rows)
    if lengths is None:
        raise DataError(f"{file} has no steps yet", hint="wait for the first step")
    question = replace(question_of(cfg, asked), lengths=lengths, typical=True)
    return compare(Plan(question), rows)


def closing_line(cfg: Config, folder: Path) -> str | None:
    """The same in one line, for the end of a run; None: there is nothing to say, as on a CPU."""
    if cfg.cluster.device == "cpu":
        return None
    try:
        pairs = compared(cfg, folder, Asked())
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
        return Config.model_validate(tomli.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", hint="was it made by this version?") from error


def run_folder(cfg_dir: str, name: str) -> Path:
    """The folder of a run, by its name or as a path. Raises ``ConfigError``."""
    return Path(name) if (Path(name) / "config.toml").is_file() else find_run(cfg_dir, name)


# ---------------------------------------------------------------------- what a plan is given


def question_of(cfg: Config, asked: Asked, known: Known | None = None) -> Question:
    """What is known of a run before it starts. Raises ``UserError``."""
    shapes, machine = shapes_of(cfg), machine_of(cfg, asked)
    kernels, notes = kernels_of(cfg, machine)
    lengths, known = _lengths(cfg, asked.length), known or Known()
    if known.of_step:
        mean = sum(known.of_step) / len(known.of_step)
        lengths = replace(lengths, mean=mean, prompt=known.prompt, source="the first batch")
    elif known.prompt:
        mean = known.prompt + cfg.rollout.max_response_tokens
        lengths = Lengths(mean, lengths.longest, known.prompt, "the prompts, and the longest answers")
    return Question(
        cfg,
        shapes,
        machine,
        kernels,
        lengths,
        steps=_steps(cfg) if known.steps is None else known.steps,
        of_step=known.of_step or None,
        notes=tuple(notes),
    )


def shapes_of(cfg: Config) -> Shapes:
    """The models that a run loads. Raises ``UserError``."""

    def shape(path: str, key: str = "model.path") -> ModelShape:
        if path.endswith(".json"):
            return shape_of(read_config_file(Path(path)), path)
        return shape_of(read_config(locate(weights_of(cfg.run.dir, path, key))), path)

    facts = ADVANTAGES[cfg.algo.advantage]
    rl = cfg.command == "rl"
    return Shapes(
        shape(cfg.model.path),
        critic=shape(cfg.critic.path, "critic.path") if rl and facts.critic and cfg.critic.path else None,
        teacher=shape(cfg.algo.teacher, "algo.teacher") if rl and facts.teacher else None,
        reward=shape(cfg.reward.model.path, "reward.model.path") if rl and cfg.reward.model.path else None,
    )


def machine_of(cfg: Config, asked: Asked) -> Machine:
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


def kernels_of(cfg: Config, machine: Machine) -> tuple[Kernels, list[str]]:
    """What computes there, and what had to be assumed."""
    on_gpu = machine.gpu is not None
    itemsize = {"float32": 4, "bfloat16": 2}.get(cfg.train.dtype, 2 if on_gpu else 4)
    compiled = cfg.train.compile == "on" or (cfg.train.compile == "auto" and on_gpu)
    asked, notes = cfg.train.attention, []
    repeats = on_gpu and asked == "torch"
    if on_gpu and asked == "auto" and not any(map(_installed, ("flash-attn-4", "flash-attn-3", "flash-attn"))):
        repeats = True
        notes.append("flash-attn is not installed here: attention of core torch is assumed, which takes more memory")
    return Kernels(compiled, itemsize, repeats), notes


def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _lengths(cfg: Config, mean: float | None) -> Lengths:
    """Given, or of the data's card, or the longest that the config allows."""
    if mean is not None:
        return assumed_lengths(cfg, mean)
    of_card = _card_mean(cfg)
    assumed = assumed_lengths(cfg)
    if of_card is None:
        return assumed
    if cfg.command in ("sft", "prefer"):
        return Lengths(min(of_card, longest_of(cfg)), assumed.longest, source="the data's card")
    mean = of_card + cfg.rollout.max_response_tokens
    return Lengths(mean, assumed.longest, of_card, "prompts of the data's card, and the longest answers")


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
    """Of the run; None where the data is not here."""
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
    """GiB that a weight update is to take of the trainers' fullest GPU; None: on a CPU, or of a cluster elsewhere.

    Raises:
        ConfigError: weights and caches alone do not fit onto the GPUs of this machine.
    """
    machine = Machine(None)
    if cfg.cluster.device != "cpu" and cfg.cluster.address is None:
        machine = this_machine()
    if not machine.memory:
        return None
    try:
        question = replace(question_of(cfg, Asked()), machine=machine)
    except ModelError:
        return None  # a kind of model that no plan can be made of
    problem = impossible(question)
    if problem is not None:
        fix = f"--set {problem.fix}" if problem.fix else "use more GPUs or a smaller model"
        raise ConfigError(problem.message, hint=f"{fix}; `posttrain plan` shows every moment")
    budget = sync_budget(Plan(question).layout)
    return None if budget is None else budget / GIB
