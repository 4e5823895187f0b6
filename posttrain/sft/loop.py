"""What `sft` and `prefer` share: steps over the samples of files. In each, a batch is given its loss weights, and the
model one update. A command brings its ``Objective``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from posttrain.cluster.cluster import Cluster
from posttrain.config import Config
from posttrain.config.presets import Resolved
from posttrain.core.errors import DataError
from posttrain.core.registry import load_plugins
from posttrain.data.loader import check_batch, total_steps
from posttrain.data.pack import PackedBatch
from posttrain.data.prefetch import Render, Rendered
from posttrain.data.samples import RenderConversations
from posttrain.data.shards import Shards
from posttrain.data.stream import Counts, Sample, SampleStream, render_all
from posttrain.plan import command as plan
from posttrain.runs.preflight import check_machine, check_supported, open_model
from posttrain.runs.run import RunPlace, StopSignal
from posttrain.runs.training import (
    TrainingRun,
    check_profile,
    open_tracker,
    reading_validation,
    recorded,
    train,
    update_speed,
    validation_note,
)
from posttrain.train.spec import LossSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.cluster.trainers import TrainerGroup
    from posttrain.models.load import ModelSource

Samples = Sequence[Sample] | Sequence[Rendered]


class Learner(Protocol):
    """The models of a run, and what a step does with its samples."""

    @property
    def actor(self) -> TrainerGroup: ...

    async def weigh(self, batch: PackedBatch) -> dict[str, float]:
        """Give a batch its loss weights. Returns metrics of the step; they replace those of the update."""
        ...

    async def validate(self, done: Callable[[int], None]) -> dict[str, float]:
        """Metrics over the whole validation set; ``loss`` is one of them. ``done`` is called with the number of samples
        that are done since the call before."""
        ...


class Objective(ABC):
    """What a command learns from the rows of files."""

    one: ClassVar[str]
    """A sample in messages."""
    many: ClassVar[str]

    @abstractmethod
    def shards(self, paths: str | Sequence[str]) -> Shards:
        """The rows of the files that ``paths`` names. Raises ``DataError``."""

    @abstractmethod
    def renderer(self, cfg: Config, tokenizer: PreTrainedTokenizerBase) -> Render:
        """How a row becomes a sample under this config."""

    @abstractmethod
    async def start(self, cluster: Cluster, run: TrainingRun, val: Sequence[Rendered]) -> Learner:
        """Start the models; ``val`` is what ``Learner.validate`` is about."""

    @abstractmethod
    def pack(self, samples: Samples) -> PackedBatch:
        """The batch that samples become."""

    def check(self, cfg: Config, source: ModelSource) -> None:
        """Whether this model can be trained so. Raises ``ConfigError``."""
        return


def run(resolved: Resolved, objective: Objective) -> Path:
    """Train as the config says; returns the run's folder.

    Raises:
        UserError: bad config, data or model, before anything is written. (Of streamed data a part is looked at then.)
        RunError: a worker failed; the run can be resumed.
    """
    cfg, place = resolved.config, RunPlace.find(resolved)
    source, data, val, steps = prepare(cfg, objective)
    place.check_steps(steps)
    folder = place.open()
    with recorded(cfg, folder) as reporter, StopSignal() as stop, open_tracker(cfg, folder, steps) as tracker, data:
        tracker.note(f"{describe(objective, data)}, {steps} steps")
        if (warning := check_batch(data.usable_rows, cfg.data.batch_size)) is not None:
            tracker.note(warning)
        tracker.note(validation_note(resolved, sum(not row.left_out for row in val), objective.many))
        for name, rows in ((data.shards.name, data.rendered or []), (str(cfg.data.val), val)):
            for note in notes(objective, name, Counts.of(rows), cfg):
                tracker.note(note)
        training = TrainingRun(cfg, folder, source, tracker, stop, steps, reporter)
        try:
            usable, beginning = [row for row in val if not row.left_out], data.state()
            train(training, lambda attempt: _train(attempt, objective, data, beginning, usable))
        finally:
            if data.rendered is None:
                for note in notes(objective, data.shards.name, data.counts, cfg):
                    tracker.note(note)
        if (line := plan.closing_line(cfg, folder.path)) is not None:
            tracker.note(line)
    return folder.path


def dry_run(resolved: Resolved, objective: Objective) -> str:
    """Everything up to the start of the workers, and then the plan, with the lengths of the first batch. Raises
    ``UserError`` as ``run`` does."""
    _, data, _, steps = prepare(resolved.config, objective)
    with data:
        batch = objective.pack(data.next().samples)
    without_loss = float((batch.loss_mask == 0).sum()) / batch.num_sequences
    return plan.show(resolved.config, known=plan.Known(tuple(batch.lengths), without_loss, steps))


class Prepared(NamedTuple):
    """What a run begins with."""

    source: ModelSource
    data: SampleStream
    val: list[Rendered]
    steps: int


def prepare(cfg: Config, objective: Objective) -> Prepared:
    """Check all that can be checked before something is written. Raises ``UserError``."""
    load_plugins(cfg.plugins)
    source, tokenizer = open_model(cfg)
    objective.check(cfg, source)
    check_supported(cfg)
    check_machine(cfg)
    data = open_stream(objective, cfg, tokenizer)
    with reading_validation():
        val = load_validation(objective, cfg, tokenizer) if cfg.data.val else []
    steps = total_steps(data.usable_rows, cfg.data.batch_size, cfg.train.epochs, cfg.train.steps)
    check_profile(cfg, steps)
    return Prepared(source, data, val, steps)


async def _train(
    run: TrainingRun, objective: Objective, data: SampleStream, beginning: Mapping[str, Any], val: Sequence[Rendered]
) -> None:
    """``beginning``: state of ``data`` before the first step."""
    cfg, tracker = run.cfg, run.tracker
    async with Cluster(cfg, run.folder.logs) as cluster, run:
        with tracker.phase("start"):
            learner = await objective.start(cluster, run, val)
        actor = learner.actor
        data.restore(await run.resume({"actor": actor}) or beginning)
        for step in run.steps():
            with tracker.phase("data"):
                batch = objective.pack(data.next().samples)
            weighed = await learner.weigh(batch)
            async with run.profiled(actor):
                with tracker.phase("update"):
                    result = await run.update(actor, batch, LossSpec())
            metrics = (
                _step_metrics(run, data, batch, result) | update_speed([result], batch.num_tokens, actor) | weighed
            )
            if val and run.due(cfg.train.val_every, step):
                with tracker.phase("validate"), tracker.counting("validation", len(val), objective.many) as done:
                    found = await learner.validate(done)
                metrics |= {f"val/{name}": value for name, value in found.items()}
                run.early_stop.validated(step, found["loss"])
            if run.due(cfg.train.save_every, step):
                await run.save(step, {"actor": actor}, data.state())
            metrics["perf/data_wait"] = tracker.share("data")
            run.finished(step, metrics)
        await run.save(run.step, {"actor": actor}, data.state())
    run.raise_if_interrupted()


def _step_metrics(
    run: TrainingRun, data: SampleStream, batch: PackedBatch, result: Mapping[str, float]
) -> dict[str, float]:
    return {
        "train/loss": result["loss"],
        "train/grad_norm": result["grad_norm"],
        "train/lr": result["lr"],
        "train/tokens": float(batch.num_tokens),
        "train/epoch": data.position / data.shards.rows,
        **{f"data/{name}": float(count) for name, count in asdict(data.counts).items()},
        "train/skipped_steps": float(run.skipped_steps),
    }


# ---------------------------------------------------------------------- samples


def conversation_renderer(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> RenderConversations:
    """How a conversation becomes tokens under this config."""
    return RenderConversations(tokenizer, cfg.data.max_length, cfg.data.truncation, cfg.data.chat_kwargs)


def open_stream(objective: Objective, cfg: Config, tokenizer: PreTrainedTokenizerBase) -> SampleStream:
    """The training samples: all of them rendered, or, where there are many, a look at the first.

    Raises:
        DataError: no such file, a bad row, a conversation that the chat template refuses, one that is too long under
            ``data.truncation = "error"``, or no sample left.
    """
    return SampleStream(
        objective.shards(cfg.data.train),
        objective.renderer(cfg, tokenizer),
        cfg.data,
        batch_size=cfg.data.batch_size,
        seed=cfg.run.seed,
    )


def load_validation(objective: Objective, cfg: Config, tokenizer: PreTrainedTokenizerBase) -> list[Rendered]:
    """The validation set, whole. Raises ``DataError`` as ``open_stream`` does."""
    shards = objective.shards(cfg.data.val)
    rows = render_all(shards, objective.renderer(cfg, tokenizer))
    if all(row.left_out for row in rows):
        raise DataError(
            f"{shards.name}: no {objective.one} with assistant tokens is left", hint="raise data.max_length"
        )
    return rows


def describe(objective: Objective, data: SampleStream) -> str:
    """How much there is to train on."""
    if data.rendered is None:
        files = len(data.shards.files)
        return f"{data.shards.rows:,} {objective.many} streamed from {files} file{'s' * (files > 1)}"
    return f"{data.usable_rows:,} {objective.many}, {sum(len(row.ids) for row in data.rendered):,} tokens"


def notes(objective: Objective, name: str, counts: Counts, cfg: Config) -> Iterator[str]:
    """One line for each reason why samples are not there as they were written."""
    of = f"of {counts.drawn} {objective.many}"
    if counts.too_long:
        yield (
            f"{name}: {counts.too_long} {of} are longer than data.max_length = {cfg.data.max_length} tokens, the "
            f"longest has {counts.longest} (data.truncation = {cfg.data.truncation})"
        )
    if counts.nothing_to_learn:
        yield f"{name}: {counts.nothing_to_learn} {of} left out: no assistant token to train on"
    if counts.straddling:
        yield f"{name}: {counts.straddling} tokens without loss: they are the assistant's only in part"
