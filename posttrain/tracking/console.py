"""How a run looks on stderr: one live panel on a terminal (``posttrain.tracking.panel``), one line a step elsewhere."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Literal, Protocol

from posttrain.core.text import printable
from posttrain.tracking.progress import Progress, Work, clock
from posttrain.tracking.warnings import RunWarning

Mode = Literal["auto", "panel", "plain", "json", "quiet"]

WORK_EVERY_S = 15.0
"""Between two plain lines on how far some work is."""


class View(Protocol):
    """What the tracker talks to. What a run is doing, it reads from the ``Progress`` it was made with."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def note(self, text: str) -> None: ...
    def warn(self, warning: RunWarning) -> None: ...
    def working(self, work: Work) -> None: ...
    def close(self) -> None: ...


def make_view(progress: Progress, mode: Mode) -> View:
    """Return the view of `run.console`."""
    if mode == "panel" or (mode == "auto" and sys.stderr.isatty()):
        from posttrain.tracking.panel import LivePanel

        return LivePanel(progress)
    if mode == "json":
        return JsonLines(progress)
    return QuietLines(progress) if mode == "quiet" else PlainLines(progress)


class PlainLines:
    """For pipes and log files."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._told = -math.inf
        """When it last told how far some work is."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        progress = self._progress
        progress.shown.clear()
        progress.update(step, metrics)
        phases = [
            f"{name.removeprefix('timing_s/')} {float(seconds):.1f}"
            for name, seconds in metrics.items()
            if name.startswith("timing_s/") and name != "timing_s/step"
        ]
        parts = [f"step {progress.counter}", *(f"{label} {text}" for label, text in progress.shown.items())]
        parts.append(f"{float(metrics['timing_s/step']):.1f} s" + (f" ({', '.join(phases)})" if phases else ""))
        if progress.eta:
            parts.append(f"eta {progress.eta}")
        self._print("  ".join(parts))

    def note(self, text: str) -> None:
        self._print(text)

    def warn(self, warning: RunWarning) -> None:
        self._print(warning.message)

    def working(self, work: Work) -> None:
        """Tell of it at its beginning and then now and then."""
        now = time.monotonic()
        if work.done and now - self._told < WORK_EVERY_S:
            return
        self._told = now
        self._tell(work)

    def close(self) -> None:
        """Nothing to take down."""

    def _tell(self, work: Work) -> None:
        if work.done:
            elapsed = clock(time.monotonic() - work.started)
            self._print(f"{work.name}: {work.counter}  elapsed {elapsed}  eta {work.eta}")
        else:
            self._print(f"{work.name}: {work.total:,} {work.unit}")

    def _print(self, text: str) -> None:
        print(printable(text), file=sys.stderr, flush=True)


class QuietLines(PlainLines):
    """Only what went wrong."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._progress.update(step, metrics)

    def note(self, text: str) -> None:
        if text.startswith("warning"):
            self._print(text)

    def working(self, work: Work) -> None:
        """Nothing is wrong with it."""


class JsonLines(PlainLines):
    """For programs: an object a line, with all metrics of a step, a ``note``, a ``warning`` or ``progress``."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._progress.update(step, metrics)
        values = {name: float(value) for name, value in metrics.items()}
        finite = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        self._print(json.dumps({"step": step, "total_steps": self._progress.total_steps, **finite}))

    def note(self, text: str) -> None:
        self._print(json.dumps({"note": text}))

    def warn(self, warning: RunWarning) -> None:
        values = asdict(warning)
        self._print(json.dumps({"warning": values.pop("name"), **values}))

    def _tell(self, work: Work) -> None:
        self._print(json.dumps({"progress": work.name, "done": work.done, "total": work.total, "unit": work.unit}))
