"""What a plan is given: the config, the sizes of the models, the machine, and what can be told of the data.

A file that is not here yet (a model of the hub, the checkpoint of a run, the data) is no error where something can be
assumed in its place; the plan says what was. Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from posttrain.algos import ADVANTAGES
from posttrain.config import Config
from posttrain.config.preset_files import load_preset, presets_dir
from posttrain.config.presets import resolve
from posttrain.core.errors import ConfigError, DataError, ModelError, UserError
from posttrain.core.machines import Machine, gpu_named, this_machine
from posttrain.core.registry import nearest
from posttrain.data.loader import total_steps
from posttrain.engines.choice import EngineChoice, choose_engine
from posttrain.models.config_json import read_config_file
from posttrain.models.load import locate, read_config
from posttrain.models.processors import processor_settings
from posttrain.plan.advice import Replan, Settings, changed
from posttrain.plan.batch import Lengths, assumed_lengths, longest_of, sequences_of_step
from posttrain.plan.estimate import Plan, Question
from posttrain.plan.images import NO_IMAGES, ImageLoad, images_of, sizing_of
from posttrain.plan.known import known_models
from posttrain.plan.layout import Kernels, Shapes
from posttrain.plan.shape import ModelShape, shape_of
from posttrain.plan.tower import TowerShape
from posttrain.runs.run import weights_of


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


def question_of(
    cfg: Config, asked: PlanOptions, known: Known | None = None, *, machine: Machine | None = None
) -> Question:
    """Return what is known of a run before it starts. ``machine``: where it is; None: what was asked for. Raises
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
    """Return what plans the run of ``question`` again, with other settings."""

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
    """Return the sizes of the models that a run loads, and what had to be assumed of them. Raises ``UserError``."""
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
    """Return the model path, or of a run of a shipped preset that was not made yet the one that this preset starts
    from. Raises ``UserError``."""
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
    """Return the config of a model, and what had to be assumed of it: a hub's model that is not in the local cache is
    looked up in the table of public models. Raises ``ModelError``."""
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
    """Return the machine that was described, else this one. Raises ``ConfigError``."""
    if asked.gpu is None:
        if asked.gpus is not None or asked.nodes > 1:
            raise ConfigError("--gpus and --nodes need --gpu", hint="name the GPU to plan for, such as --gpu h200")
        return Machine(None) if cfg.cluster.device == "cpu" else this_machine()
    gpu = gpu_named(asked.gpu)
    engines = cfg.rollout.replicas * cfg.rollout.tensor_parallel
    own = cfg.samples and (cfg.cluster.placement == "separate" or not cfg.trains)
    wanted = (cfg.cluster.workers if cfg.trains else 0) + (engines if own else 0)
    return Machine(gpu, asked.gpus or max(1, -(-wanted // asked.nodes)), asked.nodes)


def kernels_of(cfg: Config, machine: Machine, *, described: bool = False) -> tuple[Kernels, list[str]]:
    """Return what computes there, and what had to be assumed. ``described``: it is not this machine."""
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
    """Return lengths as given, or of the data's card and its images, or the longest that the config allows."""
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
    return Lengths(mean, assumed.longest, of_card, "prompts of the data's card, and the longest answers", assumed.turns)


def _images(cfg: Config, tower: TowerShape) -> ImageLoad:
    """Return the images of the data, cut as the model's processor says where that is here."""
    settings: dict[str, Any] = {}
    folder = None
    with suppress(UserError):  # of a model that is known by its sizes alone
        source = locate(weights_of(cfg.run.dir, _start_of(cfg, cfg.model.path, "model.path"), "model.path"))
        folder = Path(source.path) if Path(source.path).is_dir() else None
        settings = processor_settings(source) if source.builtin or folder else {}
    return images_of(cfg, tower, sizing_of(settings, tower, folder))


def _card_mean(cfg: Config) -> float | None:
    """Return the mean tokens of a row of the training data, where `prep --tokenizer` has measured them."""
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
