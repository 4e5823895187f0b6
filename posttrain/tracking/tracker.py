"""The one object a loop reports to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from posttrain.core.errors import Interrupted
from posttrain.core.types import Failure, Trajectory
from posttrain.tracking.boards import MLflow, TensorBoard, WeightsAndBiases
from posttrain.tracking.console import Mode, View, make_view
from posttrain.tracking.log import LOGS, LogLines, RunLog
from posttrain.tracking.metrics import MetricsFile, MetricsSink
from posttrain.tracking.progress import Progress, Work
from posttrain.tracking.rules import Rule
from posttrain.tracking.warnings import RunWarnings


class Tracker:
    """Times phases, writes metrics and shows progress. A context manager.

    Args:
        run_path: folder of the run, whose metrics and log are written; None: they are only shown.
        title: name shown on the panel.
        total_steps: for the counter and the ETA; None: unknown.
        loggers: as `run.logger`.
        config: of the run, for loggers that show it beside the metrics.
        console: as `run.console`.
        rules: what to warn of (``posttrain.tracking.rules``).

    Raises:
        ConfigError: a logger does not start.
    """

    def __init__(
        self,
        run_path: Path | None,
        title: str,
        total_steps: int | None,
        loggers: Sequence[str],
        config: Mapping[str, Any] | None = None,
        console: Mode = "auto",
        rules: Mapping[str, Rule] | None = None,
    ) -> None:
        self._sinks = [] if run_path is None else open_sinks(run_path, loggers, config or {})
        self._warnings = RunWarnings(run_path, rules or {})
        self._errors: dict[Failure, str] = {}
        self._progress = Progress(title, total_steps, warnings=self._warnings.newest)
        self._view: View | None = make_view(self._progress, console) if "console" in loggers else None
        self._log: View | None = None
        if run_path is not None:
            self._log = LogLines(Progress(title, total_steps), RunLog(run_path / LOGS))
        self._timings: dict[str, float] = {}
        self._step_start = time.monotonic()

    def __enter__(self) -> Self:
        self._step_start = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(failed=isinstance(error, Exception) and not isinstance(error, Interrupted))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show ``name`` and add its seconds to ``timing_s/<name>`` of this step. Phases nest."""
        start = time.monotonic()
        self._progress.open_phases.append((name, start))
        try:
            yield
        finally:
            self._progress.open_phases.pop()
            seconds = time.monotonic() - start
            self._timings[f"timing_s/{name}"] = self._timings.get(f"timing_s/{name}", 0.0) + seconds
            self._progress.took(name, seconds)

    def share(self, name: str) -> float:
        """Return the share of the present step, up to now, that went into a phase."""
        return self._timings.get(f"timing_s/{name}", 0.0) / max(time.monotonic() - self._step_start, 1e-9)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """End a step: its metrics with the phases' timings go to the file and the console."""
        now = time.monotonic()
        row = {**metrics, **self._timings, "timing_s/step": now - self._step_start}
        self._timings.clear()
        self._step_start = now
        for sink in self._sinks:
            sink.write(step, row)
        for view in self._views():
            view.step(step, row)
        raised = self._warnings.observe(step, row, dict(self._errors))
        self._errors.clear()
        self._progress.warnings = self._warnings.newest
        for warning in raised:
            for view in self._views():
                view.warn(warning)

    def failed(self, errors: Mapping[Failure, str]) -> None:
        """Keep the first message of each kind of failure in the present step, for the warnings that it may raise."""
        self._errors = {**errors, **self._errors}

    @contextmanager
    def counting(self, name: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """Announce something that takes a while and show how far it is.

        Args:
            total: of its parts, which are called ``unit``.

        Yields:
            What to call with the number of parts that are done since the call before.
        """
        work = Work(name, total, unit, time.monotonic())
        self._progress.work = work

        def advance(parts: int) -> None:
            work.done += parts
            if parts:
                self._working(work)

        self._working(work)
        try:
            yield advance
        finally:
            self._progress.work = None

    def _working(self, work: Work) -> None:
        for view in self._views():
            view.working(work)

    def rewind(self, step: int) -> None:
        """Forget the steps after ``step``, from which the run continues: they are written again."""
        self._warnings.rewind(step)
        for sink in self._sinks:
            sink.rewind(step)

    def logged(self, step: int) -> bool:
        """Return whether `metrics.jsonl` has the metrics of a step; True where the run does not write it."""
        return all(sink.has(step) for sink in self._sinks if isinstance(sink, MetricsFile))

    def note(self, text: str) -> None:
        """Show one line to the reader."""
        for view in self._views():
            view.note(text)

    def _views(self) -> Iterator[View]:
        return (view for view in (self._view, self._log) if view is not None)

    def watch(self, in_flight: Callable[[], Mapping[str, int]]) -> None:
        """Show how many episodes are in which state; asked from another thread whenever the panel is drawn."""
        self._progress.in_flight = in_flight

    def sampled(self, groups: Sequence[Sequence[Trajectory]]) -> None:
        """Show the best and the worst of these episodes, shortened."""
        self._progress.sampled(groups)

    def close(self, *, failed: bool = False) -> None:
        """Take the panel down and close what is written to; ``failed``: the run did. Safe to call twice."""
        if self._view is not None:
            self._view.close()
            self._view = None
        for sink in self._sinks:
            sink.close(failed=failed)


def open_sinks(run_path: Path, loggers: Sequence[str], config: Mapping[str, Any]) -> list[MetricsSink]:
    """Return the sinks that `run.logger` names, without the console."""
    makers: dict[str, Callable[[], MetricsSink]] = {
        "jsonl": lambda: MetricsFile(run_path),
        "tensorboard": lambda: TensorBoard(run_path),
        "wandb": lambda: WeightsAndBiases(run_path, config),
        "mlflow": lambda: MLflow(run_path, config),
    }
    return [make() for name, make in makers.items() if name in loggers]
