"""What the `sft`, `prefer` and `rl` loops share: how a run opens, saves, resumes and ends."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.config import Config
from posttrain.errors import ConfigError, Interrupted, RunError
from posttrain.models.export import save_text_side, save_whole
from posttrain.models.load import ModelSource, locate
from posttrain.runs import RunDir, StopSignal
from posttrain.track.tracker import Tracker
from posttrain.train import checkpoint

if TYPE_CHECKING:
    from posttrain.cluster.trainers import TrainerGroup
    from posttrain.data.pack import PackedBatch
    from posttrain.train.spec import LossSpec


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
    step: int = 0
    saved_step: int = 0
    skipped_steps: int = 0
    """Updates left out so far because their gradient was not finite."""
    skipped_in_a_row: int = 0

    def __post_init__(self) -> None:
        early_stop = self.cfg.train.early_stop
        self.early_stop = EarlyStop(early_stop.patience, early_stop.min_delta)

    async def resume(self, models: Mapping[str, TrainerGroup]) -> dict[str, Any] | None:
        """Load the newest sound checkpoint of a reopened run into ``models``, by the names of their folders; its loader
        state, or None when there is none."""
        if not self.folder.resumed:
            return None
        found, problems = checkpoint.newest(self.folder.checkpoints)
        for problem in problems:
            self.tracker.note(f"warning: {problem}")
        self.step = self.saved_step = found.step if found else 0
        self.tracker.rewind(self.step)
        if found is None:
            self.tracker.note("resuming from the start: no checkpoint yet")
            return None
        for name, group in models.items():
            await group.load(str(found.path / name))
        meta = found.read("meta.json")
        self.skipped_steps = int(meta["skipped_steps"])
        self.early_stop.restore(meta["early_stop"])
        self.tracker.note(f"resuming after step {found.step} from {found.path}")
        return found.read("loader.json")

    def describe(self, actor: TrainerGroup) -> None:
        """Tell what is trained, and how."""
        train = self.cfg.train
        self.tracker.note(actor.describe())
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
        result = await actor.update(batch, loss)
        if not result["skipped"]:
            self.skipped_in_a_row = 0
            return result
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        step, norm = self.step + 1, result["grad_norm"]
        names = await actor.nonfinite_gradients()
        where = f"not finite in {_some(names)}" if names else "it overflows, and every part of it is finite"
        self.tracker.note(f"warning: step {step}: update skipped, gradient norm {norm:g}: {where}")
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

    def due(self, every: int | None, step: int) -> bool:
        """Whether something that happens every so many steps, and after the last one, happens after this step."""
        return step == self.total_steps or (every is not None and step % every == 0)

    async def save(self, step: int, models: Mapping[str, TrainerGroup], loader: Mapping[str, Any]) -> None:
        """Write the checkpoint of a finished step: of each of ``models`` a folder, ``actor`` among them."""
        if step == self.saved_step:
            return
        with self.tracker.phase("save"):
            folder = checkpoint.begin(self.folder.checkpoints, step)
            for name, group in models.items():
                await group.save(str(folder / name))
            texts = folder / "actor" / "huggingface"
            save_text_side(self.source, texts, reward_model=self.cfg.trains_reward_model)
            if self.cfg.checkpoint.save_hf:
                written = locate(str(folder), trust_remote_code=self.source.trust_remote_code)
                save_whole(written, texts)
            meta = {"step": step, "config": self.cfg.model_dump(mode="json"), "world_size": len(models["actor"].actors)}
            meta |= {"skipped_steps": self.skipped_steps, "early_stop": self.early_stop.state()}
            states = {"loader.json": loader, "meta.json": meta}
            checkpoint.commit(folder, step, states, self.cfg.checkpoint.keep)
        self.saved_step = step

    def raise_if_interrupted(self) -> None:
        if self.step < self.total_steps and not self.early_stop.reached:
            raise Interrupted(f"stopped after step {self.step} of {self.total_steps}")


def open_tracker(cfg: Config, folder: RunDir, total_steps: int) -> Tracker:
    """What the run reports to. Raises ``ConfigError`` where one of `run.logger` does not start."""
    title = f"{cfg.command} {cfg.run.name}"
    return Tracker(folder.path, title, total_steps, cfg.run.logger, cfg.model_dump(mode="json"))


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
    temporary = file.with_name(f".{file.name}.tmp")
    torch.save(columns, temporary)
    os.replace(temporary, file)


def _some(names: Sequence[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


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
    if (peak := actor.facts.get("peak_flops")) is not None:
        metrics["perf/mfu"] = sum(r["flops"] for r in results) / (seconds * workers * peak)
    return metrics


@contextmanager
def recorded(folder: RunDir) -> Iterator[None]:
    """Write how the run ended into its folder, whatever happens."""
    try:
        yield
    except (KeyboardInterrupt, Interrupted):
        folder.finish("interrupted")
        raise
    except BaseException:
        folder.finish("failed")
        raise
    folder.finish("finished")
