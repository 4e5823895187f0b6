"""The driver's part of a run's checkpoints: when one begins, when it is complete, and which one is the best.

``train.saver`` writes the workers' part, and ``train.checkpoint`` defines the folder.
"""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.config import Config
from posttrain.core.errors import ConfigError, DeadlineError, PosttrainError, RunError, WorkerError, presented
from posttrain.core.files import write_text, writing
from posttrain.models.export import save_text_side, save_whole
from posttrain.models.load import ModelSource, locate
from posttrain.train import checkpoint
from posttrain.train.checkpoint import Best, Wanted

if TYPE_CHECKING:
    from posttrain.cluster.trainers import TrainerGroup
    from posttrain.tracking.tracker import Tracker

_POLL_S = (0.02, 1.0)
"""First and longest wait, in seconds, between two polls of the workers."""


@dataclass
class RunCheckpoints:
    """Write one checkpoint at a time into ``checkpoints``, while training goes on."""

    cfg: Config
    checkpoints: Path
    source: ModelSource
    tracker: Tracker
    step: int = 0
    """Step of the last checkpoint that was begun."""
    _writing: asyncio.Task[None] | None = None
    _scores: dict[int, float] = field(default_factory=dict)
    """Step -> value of `checkpoint.best`: of the last finished step, and of the one whose checkpoint is written."""
    _finished: int = 0
    """Step of the last complete checkpoint."""
    _wanted: Wanted = field(default_factory=Wanted)
    """The one that is being written may be abandoned by it."""

    async def begin(
        self, step: int, models: Mapping[str, TrainerGroup], states: Mapping[str, checkpoint.State]
    ) -> None:
        """Begin the checkpoint of a finished step. Waits for the one before, and until a copy of all weights is made.

        Args:
            models: by the names of their folders, ``actor`` among them.
            states: files of the driver, by name.

        Raises:
            RunError: the one before could not be written, or this one could not be begun.
        """
        await self.settle()
        with _of_step(step):
            folder = checkpoint.begin(self.checkpoints, step)
            for name, group in models.items():
                await group.save(str(folder / name), background=self.cfg.checkpoint.background)
        self.step, self._wanted = step, Wanted()
        self._writing = asyncio.create_task(self._finish(folder, step, models, states))
        if not self.cfg.checkpoint.background:
            await self.settle()

    async def settle(self) -> None:
        """Wait for the checkpoint that is being written. Raises ``RunError`` where it could not be."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    async def check(self) -> None:
        """Raise ``RunError`` if the checkpoint that was being written has failed meanwhile."""
        if self._writing is not None and self._writing.done():
            await self.settle()

    def drop(self) -> None:
        """Abandon the checkpoint that is being written: ``checkpoint.remove_unfinished`` removes it."""
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
            self._wanted.abandon()  # its thread knows of no cancellation

    def scored(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the value of `checkpoint.best` of the last finished step, and compare it with the best once that step's
        checkpoint is complete: also one that begins later, because the user has asked to stop."""
        name = self.cfg.checkpoint.best
        if not name:
            return
        if name in metrics:
            writing = {s: value for s, value in self._scores.items() if s == self.step}
            self._scores = writing | {step: float(metrics[name])}
            self._choose()
        elif step == self.step:
            self.tracker.note(
                f"warning: step {step} has no metric {name!r} (checkpoint.best): its checkpoint cannot become the best"
            )

    def resumed(self, step: int) -> None:
        """Continue after ``step``, which has a checkpoint unless it is 0."""
        self.step = self._finished = step
        best = checkpoint.read_best(self.checkpoints)
        if best is not None and best.step > step:  # it was rolled back, or its checkpoint is broken
            (self.checkpoints / "best.json").unlink()

    async def _finish(
        self, folder: Path, step: int, models: Mapping[str, TrainerGroup], states: Mapping[str, checkpoint.State]
    ) -> None:
        written: dict[str, checkpoint.Digest] = {}
        with _of_step(step):
            for name, group in models.items():
                written |= {f"{name}/{file}": digest for file, digest in (await self._written(group)).items()}
            await asyncio.to_thread(self._commit, folder, step, states, written, self._wanted)
        self._finished = step
        self._choose()

    async def _written(self, group: TrainerGroup) -> dict[str, checkpoint.Digest]:
        """Return the files of all workers of a model, once they have written them."""
        wait, longest = _POLL_S
        try:
            async with asyncio.timeout(self.cfg.cluster.step_deadline_s):
                while (files := await group.saved()) is None:
                    await asyncio.sleep(wait)
                    wait = min(2 * wait, longest)
        except TimeoutError:
            raise DeadlineError(
                f"the {group.role} workers have not written their checkpoint within cluster.step_deadline_s = "
                f"{self.cfg.cluster.step_deadline_s:g} s",
                hint="is the disk slow or gone? the checkpoint before is whole",
            ) from None
        return files

    def _commit(
        self,
        folder: Path,
        step: int,
        states: Mapping[str, checkpoint.State],
        written: Mapping[str, checkpoint.Digest],
        wanted: Wanted,
    ) -> None:
        wanted.check()
        texts = folder / "actor" / "huggingface"
        save_text_side(self.source, texts, reward_model=self.cfg.trains_reward_model)
        if self.cfg.checkpoint.save_hf:
            save_whole(locate(str(folder), trust_remote_code=self.source.trust_remote_code), texts)
        checkpoint.commit(folder, step, states, self.cfg.checkpoint.keep, written, wanted)

    def _choose(self) -> None:
        """Record the last complete checkpoint as the best, if its value is."""
        value = self._scores.pop(self._finished, None)
        if value is None or not math.isfinite(value):
            return
        best = checkpoint.read_best(self.checkpoints)
        sign = 1.0 if self.cfg.checkpoint.best_mode == "max" else -1.0
        if best is None or best.metric != self.cfg.checkpoint.best or sign * value > sign * best.value:
            checkpoint.write_best(self.checkpoints, Best(self._finished, self.cfg.checkpoint.best, value))


def check_disk_space(cfg: Config, checkpoints: Path, models: Mapping[str, TrainerGroup]) -> str | None:
    """Check, before the first step, that a checkpoint can be written to the disk.

    Returns:
        A warning, where the disk can hold one checkpoint but not all that `checkpoint.keep` asks for.

    Raises:
        ConfigError: the folder cannot be written to, or the disk cannot hold a single checkpoint.
        RunError: the disk is full or broken.
    """
    with writing(checkpoints, hint="choose a place: --set run.dir=DIR"):
        probe = checkpoint.begin(checkpoints, 0)
        write_text(probe / "probe", "", synced=True)
        shutil.rmtree(probe)
        free = shutil.disk_usage(checkpoints).free
    size = sum(group.metadata["checkpoint_bytes"] for group in models.values())
    if cfg.checkpoint.save_hf:
        size += 4 * models["actor"].metadata["parameters"]
    kept = cfg.checkpoint.keep + 1 + bool(cfg.checkpoint.best)  # one more while it is written
    there = len(list(checkpoints.glob("global_step_*")))
    what = f"a checkpoint takes {_gib(size)}, and {checkpoints} has {_gib(free)} free"
    if free < size:
        raise ConfigError(what, hint="free some disk space, or choose another place: --set run.dir=DIR")
    if free < (kept - there) * size:
        return f"{what}: {kept} of them, as checkpoint.keep asks for, do not fit"
    return None


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g} GiB"


@contextmanager
def _of_step(step: int) -> Iterator[None]:
    """Raise a disk error as ``RunError`` that names the step of the checkpoint."""
    try:
        yield
    except (WorkerError, DeadlineError):  # no matter of the disk: a run may start again after it
        raise
    except (OSError, PosttrainError) as error:
        told = presented(error)
        hint = "; ".join(text for text in (told.hint, "it goes on from the checkpoint before") if text)
        message = f"the checkpoint of step {step} could not be written: {told.message}"
        raise RunError(message, hint=hint, who=told.who) from error
