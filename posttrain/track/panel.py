"""The live panel: what the run is doing now, how it has gone so far, and what the model says."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from posttrain.track.console import CURVES, Progress, Work, clock
from posttrain.track.gpus import Gpus
from posttrain.track.text import printable, shortened
from posttrain.track.warnings import RunWarning

BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 108
"""Of the panel, where the terminal has as much."""
_PHASES = 4
"""Phases whose share of the step is shown."""


class LivePanel:
    """For people. Redraws itself, so that the elapsed time moves during a long phase."""

    def __init__(self, progress: Progress, console: Console | None = None) -> None:
        self._progress = progress
        self._console = console or Console(stderr=True)
        self._gpus = Gpus()
        # stdout is for data: only what others print to stderr is kept above the panel.
        self._live = Live(
            get_renderable=self.render, console=self._console, refresh_per_second=4, redirect_stdout=False
        )
        self._live.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._progress.update(step, metrics)
        if "perf/memory_gib" in metrics:
            self._progress.shown["memory"] = f"{float(metrics['perf/memory_gib']):.1f} GiB of a worker at most"

    def note(self, text: str) -> None:
        self._console.print(Text(printable(text)))

    def warn(self, warning: RunWarning) -> None:
        self._console.print(Text(printable(warning.message), style="yellow"))

    def working(self, work: Work) -> None:
        """The panel draws itself from the progress."""

    def close(self) -> None:
        self._live.stop()
        self._gpus.close()

    def render(self) -> Panel:
        """The panel as it is now. Text of others is shown as text: no markup, no control characters."""
        progress = self._progress
        width = min(self._console.width, _WIDTH)
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        for label, text in self._rows(width - 20):
            grid.add_row(Text(printable(label, "")), Text(printable(text, "")))
        rows = Table.grid()
        if progress.total_steps:
            rows.add_row(ProgressBar(total=progress.total_steps, completed=progress.step, width=width - 6))
        rows.add_row(grid)
        return Panel(rows, title=Text(printable(progress.title, "")), title_align="left", width=width)

    def _rows(self, width: int) -> Iterable[tuple[str, str]]:
        progress = self._progress
        eta = f"   eta {progress.eta}" if progress.eta else ""
        yield "step", f"{progress.counter}{eta}   elapsed {clock(time.monotonic() - progress.started)}"
        yield "phase", self._phase()
        for label, text in list(progress.shown.items()):
            curve = sparkline(progress.curves[label]) if label in CURVES and label in progress.curves else ""
            yield label, f"{text:<9}{curve}".rstrip()
        if progress.in_flight is not None:
            states = {state: count for state, count in progress.in_flight().items() if count}
            yield "episodes", ", ".join(f"{count} {state}" for state, count in states.items()) or "none in flight"
        if self._gpus.text:
            yield "gpu", self._gpus.text
        for kind, (reward, text) in list(progress.samples.items()):
            yield f"{kind} sample", shortened(f"{reward:.3g} · {text}", width)

    def _phase(self) -> str:
        progress = self._progress
        shares = [f"{name} {100 * share:.0f} %" for name, share in list(progress.shares().items())[:_PHASES]]
        if not progress.open_phases:
            return " · ".join(shares) or "-"
        name, since = progress.open_phases[-1]
        return f"{name} {clock(time.monotonic() - since)}" + (
            f"   of this step: {' · '.join(shares)}" if shares else ""
        )


def sparkline(values: Iterable[float]) -> str:
    """One bar a value, from the lowest to the highest; a value that is not finite is a gap."""
    values = list(values)
    finite = [v for v in values if v - v == 0.0]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    top = len(BARS) - 1
    return "".join(" " if v - v != 0.0 else BARS[round((v - low) / span * top) if span else 0] for v in values)
