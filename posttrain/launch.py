"""The course of a training command: check everything, then show the plan (`--dry-run`) or create the run and train.

`sft`, `prefer` and `rl` each bring a function that checks their config and data and returns a ``TrainingJob``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from posttrain.cluster.early import start_early
from posttrain.config.presets import Resolved
from posttrain.core.registry import load_plugins
from posttrain.models.load import ModelSource
from posttrain.plan import command as plan
from posttrain.plan.budget import memory_warning
from posttrain.plan.inputs import Known
from posttrain.runs.preflight import check_steps, with_engine
from posttrain.runs.recording import open_tracker, recorded
from posttrain.runs.resume import branch
from posttrain.runs.run import RunTarget, StopSignal
from posttrain.runs.training_run import Loop, TrainingRun, train
from posttrain.tracking.log import LOGS
from posttrain.tracking.tracker import Tracker


@dataclass(frozen=True)
class TrainingJob(ABC):
    """A training run that has been checked and has written nothing yet."""

    resolved: Resolved
    source: ModelSource
    steps: int

    @abstractmethod
    def notes(self) -> Iterator[str]:
        """Yield what the user should know before the first step."""

    @abstractmethod
    def known(self) -> Known:
        """Return what the data tells the plan of the run."""

    @abstractmethod
    def opened(self, tracker: Tracker) -> AbstractContextManager[Loop]:
        """Open what all attempts of the run share; gives the loop of one attempt."""


Prepare = Callable[[Resolved], TrainingJob]
"""Checks all that can be checked before something is written. Raises ``UserError``."""


def run(resolved: Resolved, prepare: Prepare) -> Path:
    """Train as the config says; returns the run's folder.

    Raises:
        UserError: bad config, data or model, before anything is written.
        RunError: a worker failed or weights did not arrive; the run can be resumed.
    """
    load_plugins(resolved.config.plugins)
    resolved = with_engine(resolved)
    cfg = resolved.config
    target = RunTarget.find(resolved)
    with start_early(cfg, target.path / LOGS) as ahead:
        job = prepare(resolved)
        check_steps(cfg, job.steps)
        target.check_steps(job.steps)
        folder = target.open()
        with recorded(cfg, folder) as reporter, StopSignal() as stop, open_tracker(cfg, folder, job.steps) as tracker:
            for note in job.notes():
                tracker.note(note)
            if (warning := memory_warning(cfg)) is not None:
                tracker.note(warning)
            with job.opened(tracker) as loop:
                train(TrainingRun(cfg, folder, job.source, tracker, stop, job.steps, reporter, ahead), loop)
            if (line := plan.closing_line(cfg, folder.path)) is not None:
                tracker.note(line)
    return folder.path


def dry_run(resolved: Resolved, prepare: Prepare) -> str:
    """Return the plan of a run after all its checks; nothing is started or written. Raises ``UserError``."""
    load_plugins(resolved.config.plugins)
    resolved = with_engine(resolved)
    branch(RunTarget.named(resolved).start, resolved)
    job = prepare(resolved)
    check_steps(resolved.config, job.steps)
    return plan.show(resolved.config, known=job.known())
