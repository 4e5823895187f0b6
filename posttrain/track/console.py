"""How a run looks on stderr: one live panel on a terminal, one plain line a step elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.panel import Panel

COLUMNS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("critic/score/mean",), "{:.3f}"),
    ("loss", ("actor/pg_loss", "train/loss"), "{:.4f}"),
    ("grad norm", ("actor/grad_norm", "train/grad_norm"), "{:.3f}"),
    ("tokens/s", ("perf/throughput",), "{:.0f}"),
)
"""(label, the metric names that may fill it, format)."""

BARS = "▁▂▃▄▅▆▇█"


class View(Protocol):
    """What the tracker talks to."""

    def phase(self, name: str) -> None: ...
    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


@dataclass
class Progress:
    """What both views know about the run so far."""

    title: str
    total_steps: int | None
    step: int = 0
    phase: str = ""
    seconds: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=20))
    """Of the last reports: steps since the one before, and seconds."""
    shown: dict[str, str] = field(default_factory=dict)
    """Label -> text of the newest value."""
    curve: deque[float] = field(default_factory=lambda: deque(maxlen=48))
    """Rewards, or losses where there is no reward."""

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        # A run that goes on has not done the steps before its first.
        steps = max(0, step - self.step) if self.seconds else min(step, 1)
        self.step = step
        # Starting the workers happens once and says nothing about the steps to come.
        self.seconds.append((steps, float(metrics["timing_s/step"]) - float(metrics.get("timing_s/start", 0.0))))
        for label, names, style in COLUMNS:
            name = next((name for name in names if name in metrics), None)
            if name is not None:
                self.shown[label] = style.format(float(metrics[name]))
        self.shown |= {name: f"{float(v):.3f}" for name, v in metrics.items() if name.startswith("val")}
        value = next((metrics[n] for n in ("critic/score/mean", "actor/pg_loss", "train/loss") if n in metrics), None)
        if value is not None:
            self.curve.append(float(value))

    @property
    def eta(self) -> str:
        """Time left by the mean of the last steps; empty while nothing is known."""
        steps = sum(count for count, _ in self.seconds)
        if not steps or self.total_steps is None:
            return ""
        seconds = sum(seconds for _, seconds in self.seconds)
        return clock(max(self.total_steps - self.step, 0) * seconds / steps)

    @property
    def counter(self) -> str:
        return f"{self.step}/{self.total_steps}" if self.total_steps else str(self.step)


def make_view(title: str, total_steps: int | None) -> View:
    """The live panel when stderr is a terminal, plain lines otherwise."""
    progress = Progress(title, total_steps)
    return LivePanel(progress) if sys.stderr.isatty() else PlainLines(progress)


class PlainLines:
    """For pipes and log files."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def phase(self, name: str) -> None:
        self._progress.phase = name

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

    def close(self) -> None:
        """Nothing to take down."""

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class LivePanel:
    """For people. Redraws itself, so that the elapsed time moves during a long phase."""

    def __init__(self, progress: Progress, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._progress = progress
        self._phase_start = time.monotonic()
        self._console = console or Console(stderr=True)
        # stdout is for data: only what others print to stderr is kept above the panel.
        self._live = Live(
            get_renderable=self.render, console=self._console, refresh_per_second=4, redirect_stdout=False
        )
        self._live.start()

    def phase(self, name: str) -> None:
        self._progress.phase = name
        self._phase_start = time.monotonic()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._progress.update(step, metrics)

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()

    def render(self) -> Panel:
        from rich.panel import Panel
        from rich.table import Table

        progress = self._progress
        phase = f"{progress.phase} {clock(time.monotonic() - self._phase_start)}" if progress.phase else "-"
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim")
        grid.add_column()
        grid.add_row("step", progress.counter + (f"   eta {progress.eta}" if progress.eta else ""))
        grid.add_row("phase", phase)
        for label, text in progress.shown.items():
            grid.add_row(label, text)
        if progress.curve:
            grid.add_row("reward curve" if "reward" in progress.shown else "loss curve", sparkline(progress.curve))
        return Panel(grid, title=progress.title, title_align="left", expand=False)


def sparkline(values: deque[float]) -> str:
    """One bar a value, from the lowest to the highest; a value that is not finite is a gap."""
    finite = [v for v in values if v - v == 0.0]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    top = len(BARS) - 1
    return "".join(" " if v - v != 0.0 else BARS[round((v - low) / span * top) if span else 0] for v in values)


def clock(seconds: float) -> str:
    """`m:ss`, or `h:mm:ss` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
