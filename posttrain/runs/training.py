"""What the `sft`, `prefer` and `rl` loops share: how a run opens, saves, resumes and ends."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from posttrain import __version__
from posttrain.config import Config
from posttrain.config.presets import Resolved
from posttrain.core.errors import (
    ConfigError,
    DataError,
    DeadlineError,
    Interrupted,
    PosttrainError,
    RunError,
    WorkerError,
    presented,
)  # fmt: skip
from posttrain.core.files import replacing
from posttrain.core.registry import some
from posttrain.core.text import printable
from posttrain.models.load import ModelSource
from posttrain.runs import probe
from posttrain.runs.run import RunDir, Status, StopSignal
from posttrain.runs.saving import Saves, check_room
from posttrain.tracking.log import RunLog
from posttrain.tracking.report.background import Reporter
from posttrain.tracking.rules import rules_of
from posttrain.tracking.tracker import Tracker
from posttrain.train import checkpoint
from posttrain.train.checkpoint import Checkpoint

if TYPE_CHECKING:
    from posttrain.cluster.trainers import TrainerGroup
    from posttrain.data.pack import PackedBatch
    from posttrain.train.spec import LossSpec


T = TypeVar("T")

_REPORT_S: dict[Status, float] = {"finished": 60.0, "failed": 20.0, "interrupted": 1.0}
"""Longest wait for the report, by how the run ended: somebody who pressed Ctrl-C does not wait for it."""

_LOOK_S = 0.1
"""Between two looks whether somebody asked to stop."""


@dataclass
class EarlyStop:
    """When a run ends because its validation loss gets no better."""

    patience: int | None
    """Validations in a row without a better loss; None: never."""
    min_delta: float
    """By how much a better loss is lower."""
    best: float = math.inf
    best_step: int = 0
    without_better: int = 0
    """Validations since then."""

    @property
    def reached(self) -> bool:
        return self.patience is not None and self.without_better >= self.patience

    def validated(self, step: int, loss: float) -> None:
        """Take note of a validation. A loss that is not finite is no better."""
        if loss < self.best - self.min_delta:
            self.best, self.best_step, self.without_better = loss, step, 0
        else:
            self.without_better += 1

    def state(self) -> dict[str, float | None]:
        """What a checkpoint keeps."""
        best = self.best if math.isfinite(self.best) else None  # JSON has no infinity
        return {"best": best, "best_step": self.best_step, "without_better": self.without_better}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.best = math.inf if state["best"] is None else float(state["best"])
        self.best_step, self.without_better = int(state["best_step"]), int(state["without_better"])


@dataclass
class TrainingRun:
    """One training run on disk. ``step`` counts finished steps; the loop is ``for step in run.steps()``."""

    cfg: Config
    folder: RunDir
    source: ModelSource
    tracker: Tracker
    stop: StopSignal
    total_steps: int
    reporter: Reporter | None = None
    """Keeps the report of the run; None: nobody does."""
    step: int = 0
    skipped_steps: int = 0
    """Updates left out so far because their gradient was not finite."""
    skipped_in_a_row: int = 0

    def __post_init__(self) -> None:
        early_stop = self.cfg.train.early_stop
        self.early_stop = EarlyStop(early_stop.patience, early_stop.min_delta)
        self.saves = Saves(self.cfg, self.folder.checkpoints, self.source, self.tracker)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Finish the checkpoint that is being written, while the workers are still there; not where they may not
        answer, nor where the user would wait for it."""
        if error is None:
            await self.saves.settle()
        elif isinstance(error, Exception) and not isinstance(error, WorkerError | DeadlineError):
            try:
                await self.saves.settle()
            except RunError as failure:
                error.add_note(f"besides: {failure}")
        else:
            self.saves.drop()

    async def resume(self, models: Mapping[str, TrainerGroup]) -> dict[str, Any] | None:
        """Load the newest sound checkpoint of a reopened run, or the one that the run is to begin with, into
        ``models``, by the names of their folders.

        Returns:
            Its loader state, or None when there is none.

        Raises:
            ConfigError: there is no room for checkpoints.
        """
        if (warning := check_room(self.cfg, self.folder.checkpoints, models)) is not None:
            self.tracker.note(f"warning: {warning}")
        for change in self.folder.changes:
            self.tracker.note(f"config: {change}")
        found = self._find_checkpoint()
        self.step = found.step if found else 0
        self.saves.resumed(self.step)
        if found is not None:
            await self._load(found, models)
        if self.cfg.checkpoint.background:
            for group in models.values():
                await group.prepare_save()
        return None if found is None else found.read("loader.json")

    def _find_checkpoint(self) -> Checkpoint | None:
        found = self.folder.start
        if self.folder.resumed:
            own, problems = checkpoint.newest(self.folder.checkpoints)
            for problem in problems:
                self.tracker.note(f"warning: {problem}")
            found = own or found
            self.tracker.rewind(found.step if found else 0)
            if found is None:
                self.tracker.note("resuming from the start: no checkpoint yet")
        return found

    async def _load(self, found: Checkpoint, models: Mapping[str, TrainerGroup]) -> None:
        for name in models:
            if not (found.path / name).is_dir():
                raise ConfigError(
                    f"{found.path} has no {name}", hint="it was made by an algorithm without one: start from its model"
                )
        for name, group in models.items():
            await group.load(str(found.path / name))
            await group.check_finite(f"the run does not go on from {found.path}: remove that folder")
        meta = found.read("meta.json")
        self.skipped_steps = int(meta["skipped_steps"])
        self.early_stop.restore(meta["early_stop"])
        self.tracker.note(f"resuming after step {found.step} from {found.path}")

    def describe(self, actor: TrainerGroup) -> None:
        """Tell what is trained, and how."""
        train = self.cfg.train
        self.tracker.note(actor.describe())
        if dropout := actor.metadata["dropout"]:
            asked = ", ".join(f"{name} = {value:g}" for name, value in dropout.items())
            self.tracker.note(f"warning: the model's config asks for {asked}; training is without dropout")
        if train.param_dtype == "bfloat16" and not train.optim.stochastic_rounding:
            self.tracker.note(
                "weights are kept in bfloat16: steps smaller than 1/512 of a weight are lost "
                "(train.optim.stochastic_rounding keeps them on average)"
            )

    def steps(self) -> Iterator[int]:
        """Numbers of the steps still to do, from 1. Ends early, after a finished step, when the user asks to stop or
        `train.early_stop` says so."""
        while self.step < self.total_steps and not self.stop.requested and not self.early_stop.reached:
            yield self.step + 1
            self.step += 1
        if self.early_stop.reached:
            stop = self.early_stop
            self.tracker.note(
                f"stopped early after step {self.step} of {self.total_steps}: val/loss has not fallen below "
                f"{stop.best:.4f} (step {stop.best_step}) in {stop.without_better} validations"
            )

    async def update(self, actor: TrainerGroup, batch: PackedBatch, loss: LossSpec) -> dict[str, float]:
        """One optimizer step of the present step of the run; its metrics (``TrainWorker.update``).

        An update whose gradient is not finite is skipped and counted, and the run goes on.

        Raises:
            RunError: that happened `train.max_skipped_steps` times in a row. The last batch is in the run's folder.
        """
        await self.saves.check()
        result = await actor.update(batch, loss)
        if not result["skipped"]:
            self.skipped_in_a_row = 0
            return result
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        step, norm = self.step + 1, result["grad_norm"]
        names = await actor.nonfinite_gradients()
        where = f"not finite in {some(names)}" if names else "it overflows, and every part of it is finite"
        self.tracker.note(f"step {step}: update skipped, gradient norm {norm:g}: {where}")
        if self.skipped_in_a_row >= self.cfg.train.max_skipped_steps:
            file = self.folder.path / f"nonfinite_step_{step}.pt"
            write_batch(file, batch)
            raise RunError(
                f"{self.skipped_in_a_row} updates in a row were skipped, the last at step {step}: gradient norm "
                f"{norm:g}, {where}; its batch is in {file}",
                hint="look at the batch, lower train.optim.lr, or allow more with train.max_skipped_steps; the run can "
                "go on from its last checkpoint",
            )
        return result

    @asynccontextmanager
    async def profiled(self, actor: TrainerGroup) -> AsyncIterator[None]:
        """Trace the updates of the present step where `run.profile` asks for it, into ``profile/`` of the run."""
        step = self.step + 1
        if step not in self.cfg.run.profiled_steps:
            yield
            return
        await actor.start_profile()
        yield
        folder = self.folder.path / "profile"
        with self.tracker.phase("profile"):
            await actor.stop_profile(str(folder), step)
        self.tracker.note(f"wrote the trace of step {step} to {folder}")

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What ``work`` returns, or None if somebody asks to stop first: then it is cancelled."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done() and not self.stop.requested:
                await asyncio.wait([task], timeout=_LOOK_S)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
        return None if task.cancelled() else task.result()

    def due(self, every: int | None, step: int) -> bool:
        """Whether something that happens every so many steps, and after the last one, happens after this step."""
        return step == self.total_steps or (every is not None and step % every == 0)

    async def save(self, step: int, models: Mapping[str, TrainerGroup], loader: Mapping[str, Any]) -> None:
        """Begin the checkpoint of a finished step, if there is none: of each of ``models`` a folder, ``actor`` among
        them. Waits until training may go on; see ``Saves``.

        Raises:
            RunError: weights are not finite, or give no finite numbers. The checkpoints before stay as they are.
        """
        if step == self.saves.step:
            return
        with self.tracker.phase("save"):
            meta = {"step": step, "config": self.cfg.model_dump(mode="json"), "versions": self.folder.versions}
            meta |= {"world_size": len(models["actor"].actors)}
            meta |= {"skipped_steps": self.skipped_steps, "early_stop": self.early_stop.state()}
            consequence = f"step {step} is not saved, {self._last_sound()}"
            for group in models.values():
                await group.check_finite(consequence)
            said = await probe.take(
                models["actor"], self.source, scores=self.cfg.trains_reward_model, consequence=consequence
            )
            await self.saves.begin(step, models, {"loader.json": loader, "meta.json": meta, checkpoint.PROBE: said})

    def _last_sound(self) -> str:
        """The checkpoint that the run can go on from, for a message."""
        if not self.saves.step:
            return "and there is no checkpoint before it"
        return f"the checkpoint before it is {self.folder.checkpoints / f'global_step_{self.saves.step}'}"

    def finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a finished step; they may make its checkpoint the best."""
        self.saves.scored(step, metrics)
        self.tracker.log(step, metrics)
        if self.reporter is not None and self.saves.step == step:
            self.reporter.refresh()

    def again(self) -> TrainingRun:
        """The same run, to be started again from its last checkpoint."""
        folder = replace(self.folder, resumed=True, changes=())
        return TrainingRun(self.cfg, folder, self.source, self.tracker, self.stop, self.total_steps, self.reporter)

    def raise_if_interrupted(self) -> None:
        if self.step < self.total_steps and not self.early_stop.reached:
            raise self.stop.interrupted(f"step {self.step} of {self.total_steps}")


def train(run: TrainingRun, loop: Callable[[TrainingRun], Coroutine[Any, Any, None]]) -> None:
    """Run a command's loop, again from the last checkpoint where a worker died or hung, `run.restarts` times."""
    left = run.cfg.run.restarts
    while True:
        try:
            return asyncio.run(loop(run))
        except (WorkerError, DeadlineError) as error:
            if not left or run.stop.requested:
                raise
            left -= 1
            run.tracker.note(f"{error}\nstarting again from the last checkpoint; run.restarts allows {left} more")
            run = run.again()


def open_tracker(cfg: Config, folder: RunDir, total_steps: int) -> Tracker:
    """What the run reports to. Raises ``ConfigError`` where one of `run.logger` does not start."""
    title = f"{cfg.command} {cfg.run.name}"
    config, rules = cfg.model_dump(mode="json"), rules_of(cfg)
    tracker = Tracker(folder.path, title, total_steps, cfg.run.logger, config, cfg.run.console, rules)
    for note in folder.notes:
        tracker.note(note)
    return tracker


@contextmanager
def reading_validation() -> Iterator[None]:
    """Name the key in an error of the validation set: a preset's is still there when `--data` names other data."""
    try:
        yield
    except DataError as error:
        raise DataError(
            f"data.val: {error.message}",
            hint=f"{error.hint}; --data replaces data.train alone: --set data.val=FILE, or --set data.val= for none",
        ) from error


def validation_note(resolved: Resolved, count: int, unit: str) -> str:
    """Return a line that says what the run is validated on and when.

    Args:
        count: of the validation set.
        unit: what it is counted in.
    """
    cfg, origin = resolved.config, resolved.provenance
    if not count:
        return f"no validation: {f'none of the {unit} of data.val are usable' if cfg.data.val else 'data.val is empty'}"
    files = [cfg.data.val] if isinstance(cfg.data.val, str) else cfg.data.val
    every = cfg.train.val_every
    when = "after the last step" if every is None else f"every {every} steps and after the last"
    text = f"validation on {count:,} {unit} of {', '.join(files)}, {when}"
    if origin["data.val"].startswith("preset") and not origin["data.train"].startswith("preset"):
        text += (
            f"; data.val is still that of {origin['data.val']}: {origin['data.train'].removeprefix('flag ')} replaces "
            "data.train alone (--set data.val=FILE, or --set data.val= for none)"
        )
    return text


def check_profile(cfg: Config, total_steps: int) -> None:
    """Raise ``ConfigError`` where `run.profile` begins after the last step."""
    steps = cfg.run.profiled_steps
    if steps and steps.start > total_steps:
        raise ConfigError(
            f"run.profile = {cfg.run.profile!r}, and the run has {total_steps} steps", hint="name earlier steps"
        )


def write_batch(file: Path, batch: PackedBatch) -> None:
    """Write the columns that a batch has, by name, for ``torch.load(file, weights_only=True)``."""
    import torch

    columns = {f.name: column for f in fields(batch) if (column := getattr(batch, f.name)) is not None}
    with replacing(file) as temporary, temporary.open("wb") as opened:
        torch.save(columns, opened)


def update_speed(results: Sequence[Mapping[str, float]], tokens: int, actor: TrainerGroup) -> dict[str, float]:
    """How fast the optimizer steps of one step of a run were, and what they took: the `perf/` metrics of all loops.

    Args:
        results: of ``TrainerGroup.update``, one an optimizer step.
        tokens: of all their batches.
        actor: who made them.
    """
    seconds = sum(r["seconds"] for r in results)
    workers = len(actor.actors)
    metrics = {
        "perf/throughput": tokens / seconds,
        "perf/tokens_per_second_per_gpu": tokens / seconds / workers,
        "perf/padding": 1.0 - tokens / sum(r["tokens_run"] for r in results),
        "perf/memory_gib": max(r["memory_gib"] for r in results),
    }
    if (peak := actor.metadata.get("peak_flops")) is not None:
        metrics["perf/mfu"] = sum(r["flops"] for r in results) / (seconds * workers * peak)
    return metrics


@contextmanager
def recorded(cfg: Config, folder: RunDir) -> Iterator[Reporter | None]:
    """Write into its folder how the run ended, and why if it failed, whatever happens, and its report, where
    `run.report` asks for it. Saves that did not come to their end are removed."""

    def say(text: str) -> None:  # the view has been taken down, or is about to be
        print(json.dumps({"note": text}) if cfg.run.console == "json" else printable(text), file=sys.stderr)

    console = "console" in cfg.run.logger and cfg.run.console != "quiet"
    reporter = Reporter(folder.path, say) if cfg.run.report else None
    log = RunLog(folder.logs)
    log.write(f"posttrain {__version__} {cfg.command} {cfg.run.name}, process {os.getpid()}")
    status: Status = "failed"
    failure: PosttrainError | None = None
    try:
        try:
            yield reporter
        finally:  # first, because it may make the room to say why
            checkpoint.remove_unfinished(folder.checkpoints)
        status = "finished"
    except (KeyboardInterrupt, Interrupted) as stopped:
        status = "interrupted"
        log.write(str(stopped) or "interrupted")
        raise
    except BaseException as error:
        failure = presented(error)
        log.write("".join(traceback.format_exception(error)) + f"error: {failure}")
        raise
    finally:
        try:
            folder.finish(status, failure)
        except PosttrainError as error:  # of two failures the first is the one to hear of
            if failure is None:
                raise
            say(f"warning: {folder.path} does not say why the run failed: {error.message}")
        if reporter is not None and reporter.finish(_REPORT_S[status]) and console and status == "finished":
            say(f"report: {reporter.file}")
