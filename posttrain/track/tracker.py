"""The one object a loop reports to."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from posttrain.track.console import View, make_view
from posttrain.track.metrics import FILE_NAME, MetricsFile


class Tracker:
    """Times phases, writes ``metrics.jsonl`` and shows progress. A context manager.

    Args:
        run_path: folder that gets ``metrics.jsonl``; None: no file.
        title: name shown on the panel.
        total_steps: for the counter and the ETA; None: unknown.
        loggers: any of ``console`` and ``jsonl``.
    """

    def __init__(self, run_path: Path | None, title: str, total_steps: int | None, loggers: Sequence[str]) -> None:
        self._file = MetricsFile(run_path / FILE_NAME) if run_path is not None and "jsonl" in loggers else None
        self._view: View | None = make_view(title, total_steps) if "console" in loggers else None
        self._timings: dict[str, float] = {}
        self._phases: list[str] = []
        self._step_start = time.monotonic()

    def __enter__(self) -> Self:
        self._step_start = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show ``name`` and add its seconds to ``timing_s/<name>`` of this step. Phases nest."""
        start = time.monotonic()
        self._phases.append(name)
        self._show_phase()
        try:
            yield
        finally:
            self._phases.pop()
            key = f"timing_s/{name}"
            self._timings[key] = self._timings.get(key, 0.0) + time.monotonic() - start
            self._show_phase()

    def share(self, name: str) -> float:
        """Share of the present step, up to now, that went into a phase."""
        return self._timings.get(f"timing_s/{name}", 0.0) / max(time.monotonic() - self._step_start, 1e-9)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """End a step: its metrics with the phases' timings go to the file and the console."""
        now = time.monotonic()
        row = {**metrics, **self._timings, "timing_s/step": now - self._step_start}
        self._timings.clear()
        self._step_start = now
        if self._file is not None:
            self._file.write(step, row)
        if self._view is not None:
            self._view.step(step, row)

    def note(self, text: str) -> None:
        """One line for the reader."""
        if self._view is not None:
            self._view.note(text)

    def close(self) -> None:
        """Take the panel down and close the file. Safe to call twice."""
        if self._view is not None:
            self._view.close()
            self._view = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _show_phase(self) -> None:
        if self._view is not None:
            self._view.phase(self._phases[-1] if self._phases else "")
