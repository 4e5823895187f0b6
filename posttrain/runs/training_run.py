"""The object that a training loop works on: its steps, updates, checkpoints, and how it goes on after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from posttrain.config import Config
from posttrain.core.errors import ConfigError, DeadlineError, RunError, WorkerError
from posttrain.core.files import replacing
from posttrain.core.registry import some
from posttrain.models.load import ModelSource, digest, locate
from posttrain.runs import probe
from posttrain.runs.checkpoints import RunCheckpoints, check_disk_space
from posttrain.runs.early_stop import EarlyStop
from posttrain.runs.resume import early_stop_after
from posttrain.runs.run import RunDir, StopSignal, weights_of
from posttrain.tracking.metrics import read_metrics
from posttrain.tracking.report.background import Reporter
from posttrain.tracking.tracker import Tracker
from posttrain.train import checkpoint
from posttrain.train.checkpoint import Checkpoint

if TYPE_CHECKING:
    from posttrain.cluster.cluster import Cluster
    from posttrain.cluster.trainers import TrainerGroup
    from posttrain.data.pack import PackedBatch
    from posttrain.train.spec import LossSpec


T = TypeVar("T")

Loop = Callable[["TrainingRun"], Coroutine[Any, Any, None]]
"""Trains until the run is done, stopped or failed; called once for each start of the workers."""

_STOP_POLL_S = 0.1
"""Seconds between two checks for a request to stop."""


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
    """Keeps the run's report up to date; None: `run.report` is off."""
    ahead: Cluster | None = None
    """The cluster that has been started ahead for the first attempt."""
    step: int = 0
    skipped_steps: int = 0
    """Updates skipped so far because their gradient was not finite."""
    skipped_in_a_row: dict[str, int] = field(default_factory=dict)
    """By model: a critic's updates come between the actor's."""
    unlogged: dict[str, float] | None = None
    """Metrics of ``step``, as far as its checkpoint knows them, where the run ended before it logged them: the loop
    does what is left of the step, and calls ``finished``."""

    def __post_init__(self) -> None:
        early_stop = self.cfg.train.early_stop
        self.early_stop = EarlyStop(early_stop.patience, early_stop.min_delta)
        self.checkpoints = RunCheckpoints(self.cfg, self.folder.checkpoints, self.source, self.tracker)
        # Of `run:NAME` another checkpoint may be the newest when this run is resumed.
        self.base = _digests(self.source) if self.cfg.needs_first_weights else {}
        teacher = self.cfg.algo.teacher if self.cfg.command == "rl" else ""
        self.teacher = _digests(locate(weights_of(self.cfg.run.dir, teacher, "algo.teacher"))) if teacher else {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Finish the checkpoint that is being written, while its workers still run. Abandon it where they may not
        answer, and where the user would have to wait for it."""
        if error is None:
            await self.checkpoints.settle()
        elif isinstance(error, Exception) and not isinstance(error, WorkerError | DeadlineError):
            try:
                await self.checkpoints.settle()
            except RunError as failure:
                error.add_note(f"besides: {failure}")
        else:
            self.checkpoints.drop()

    async def resume(self, models: Mapping[str, TrainerGroup]) -> dict[str, Any] | None:
        """Load the newest intact checkpoint of a reopened run, or the one that the run is to start from.

        Args:
            models: that it is loaded into, by the names of their folders in it.

        Returns:
            Its loader state, and its folder as ``checkpoint``; None when there is none.

        Raises:
            ConfigError: the disk cannot hold a checkpoint, the checkpoint lacks one of ``models``, or it belongs to
                other weights than those that `model.path`, or `algo.teacher`, stands for now.
        """
        if (warning := check_disk_space(self.cfg, self.folder.checkpoints, models)) is not None:
            self.tracker.note(f"warning: {warning}")
        for change in self.folder.changes:
            self.tracker.note(f"config: {change}")
        found = self._find_checkpoint()
        self.step = found.step if found else 0
        self.checkpoints.resumed(self.step)
        if found is not None:
            await self._load(found, models)
        if self.cfg.checkpoint.background:
            for group in models.values():
                await group.prepare_save()
        return None if found is None else found.read("loader.json") | {"checkpoint": str(found.path)}

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
        meta = found.read("meta.json")
        if self.cfg.needs_first_weights:
            _check_unchanged(found, "model.path", self.cfg.model.path, meta.get("base"), self.base)
        teacher, own = self.cfg.algo.teacher, found.path.parent == self.folder.checkpoints
        if own and meta.get("teacher") and meta["config"]["algo"]["teacher"] == teacher:
            _check_unchanged(found, "algo.teacher", teacher, meta["teacher"], self.teacher)
        for name, group in models.items():
            await group.load(str(found.path / name))
            await group.check_finite(f"the run does not go on from {found.path}: remove that folder")
        self.skipped_steps = int(meta["skipped_steps"])
        self.early_stop = early_stop_after(found, self.cfg)
        if found.path.parent == self.folder.checkpoints:
            if not self.tracker.logged(found.step):
                self.unlogged = meta.get("metrics")
            # The run may have ended between the checkpoint's completion and its comparison with the best.
            rows = (row for row in read_metrics(self.folder.path) if row["step"] == found.step)
            if (row := next(rows, None)) is not None and self.cfg.checkpoint.best in row:
                self.checkpoints.scored(found.step, row)
        self.tracker.note(f"resuming after step {found.step} from {found.path}")

    def describe(self, actor: TrainerGroup) -> None:
        """Note which model is trained, and how."""
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
        """Yield the numbers of the steps still to do, from 1. Ends early, after a finished step, when the user asks to
        stop or `train.early_stop` says so."""
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
        """Take one optimizer step within the current step; returns its metrics (see ``TrainWorker.update``).

        An update whose gradient is not finite is skipped and counted, and the run goes on.

        Raises:
            RunError: that happened `train.max_skipped_steps` times in a row. The last batch is in the run's folder.
        """
        await self.checkpoints.check()
        result = await actor.update(batch, loss)
        if not result["skipped"]:
            self.skipped_in_a_row[actor.role] = 0
            return result
        self.skipped_steps += 1
        in_a_row = self.skipped_in_a_row[actor.role] = self.skipped_in_a_row.get(actor.role, 0) + 1
        step, norm = self.step + 1, result["grad_norm"]
        names = await actor.nonfinite_gradients()
        where = f"not finite in {some(names)}" if names else "it overflows, and every part of it is finite"
        self.tracker.note(f"step {step}: update skipped, gradient norm {norm:g}: {where}")
        if in_a_row >= self.cfg.train.max_skipped_steps:
            file = self.folder.path / f"nonfinite_step_{step}.pt"
            write_batch(file, batch)
            raise RunError(
                f"{in_a_row} updates in a row were skipped, the last at step {step}: gradient norm "
                f"{norm:g}, {where}; its batch is in {file}",
                hint="look at the batch, lower train.optim.lr, or allow more with train.max_skipped_steps; the run can "
                "go on from its last checkpoint",
            )
        return result

    @asynccontextmanager
    async def profiled(self, actor: TrainerGroup) -> AsyncIterator[None]:
        """Profile the updates of the current step, into ``profile/`` of the run, where `run.profile` asks for it."""
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
        """Return what ``work`` returns, or cancel it and return None if the user asks to stop first."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done() and not self.stop.requested:
                await asyncio.wait([task], timeout=_STOP_POLL_S)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
        return None if task.cancelled() else task.result()

    def due(self, every: int | None, step: int) -> bool:
        """Return whether work that is due every ``every`` steps, and after the last one, is due after ``step``."""
        return step == self.total_steps or (every is not None and step % every == 0)

    async def save(
        self,
        step: int,
        models: Mapping[str, TrainerGroup],
        loader: Mapping[str, Any],
        files: Mapping[str, checkpoint.State] = MappingProxyType({}),
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Begin the checkpoint of a finished step, unless it has one. Returns when training may go on; the workers
        write meanwhile.

        Args:
            models: by the names of their folders, ``actor`` among them.
            loader: the position in the data and other state of the loop, as JSON.
            files: more of that state, in files of its own.
            metrics: of a step that is not logged yet, as far as they are known. A run that ends before ``finished``
                goes on with them as ``unlogged``. None: they are logged.

        Raises:
            RunError: weights are not finite, or give no finite numbers. The checkpoints before stay as they are.
        """
        if step == self.checkpoints.step:
            return
        with self.tracker.phase("save"):
            meta = {"step": step, "config": self.cfg.model_dump(mode="json"), "versions": self.folder.versions}
            meta |= {"world_size": len(models["actor"].actors), "base": self.base, "teacher": self.teacher}
            meta |= {"skipped_steps": self.skipped_steps, "early_stop": self.early_stop.state()}
            meta["metrics"] = None if metrics is None else {name: float(value) for name, value in metrics.items()}
            consequence = f"step {step} is not saved, {self._last_sound()}"
            for group in models.values():
                await group.check_finite(consequence)
            said = await probe.take(
                models["actor"], self.source, scores=self.cfg.trains_reward_model, consequence=consequence
            )
            await self.checkpoints.begin(
                step, models, {"loader.json": loader, **files, "meta.json": meta, checkpoint.PROBE: said}
            )

    def _last_sound(self) -> str:
        """Name the checkpoint that the run can resume from, for a message."""
        if not self.checkpoints.step:
            return "and there is no checkpoint before it"
        return f"the checkpoint before it is {self.folder.checkpoints / f'global_step_{self.checkpoints.step}'}"

    def finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a finished step, and compare its checkpoint, if it has one, with the best."""
        self.checkpoints.scored(step, metrics)
        self.tracker.log(step, metrics)
        if self.reporter is not None and self.checkpoints.step == step:
            self.reporter.refresh()

    def again(self) -> TrainingRun:
        """Return this run, ready to start again from its last checkpoint."""
        folder = replace(self.folder, resumed=True, changes=())
        return TrainingRun(self.cfg, folder, self.source, self.tracker, self.stop, self.total_steps, self.reporter)

    def raise_if_interrupted(self) -> None:
        """Raise ``Interrupted`` where the user stopped the run before its last step."""
        if self.step < self.total_steps and not self.early_stop.reached:
            raise self.stop.interrupted(f"step {self.step} of {self.total_steps}")


def _digests(source: ModelSource) -> dict[str, str]:
    """Return the digest of each checkpoint of ours that a model's weights come from, by its folder."""
    return {str(file.parent): digest(file) for file in source.manifests}


def _check_unchanged(
    found: Checkpoint, key: str, path: str, before: Mapping[str, str] | None, now: Mapping[str, str]
) -> None:
    """Raise ``ConfigError`` where ``path``, the value of ``key``, stands for other weights than ``before``, when the
    checkpoint was made. That says nothing where the run had no use for them, or is of a version that kept none."""
    if before and list(before.values()) != list(now.values()):
        raise ConfigError(
            f"{found.path} belongs to the weights that were in {some(list(before))}, and {key} = {path!r} now stands "
            f"for {some(list(now))}, which holds others",
            hint="put them back, as the newest checkpoint of that run; or start again with --overwrite",
        )


def train(run: TrainingRun, loop: Loop) -> None:
    """Run ``loop``, again from the last checkpoint where a worker died or hung, at most `run.restarts` times."""
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


def write_batch(file: Path, batch: PackedBatch) -> None:
    """Write the columns that a batch has, by name, for ``torch.load(file, weights_only=True)``; images are a dict."""
    import torch

    columns = {f.name: column for f in fields(batch) if (column := getattr(batch, f.name)) is not None}
    if batch.images is not None:
        columns["images"] = vars(batch.images)
    with replacing(file) as temporary, temporary.open("wb") as opened:
        torch.save(columns, opened)
