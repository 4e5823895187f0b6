"""The live panel: what the run is doing now, how it has gone so far, and what the model says."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from textwrap import wrap

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from posttrain.core.text import printable, shortened
from posttrain.tracking.gpus import Gpus
from posttrain.tracking.progress import Progress, Work, clock
from posttrain.tracking.warnings import FILE_NAME, RunWarning

BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 150
"""Width of the panel, where the terminal has as much."""
_FRAME, _LABEL, _GAP, _VALUE = 4, 11, 2, 9
"""Columns of the frame, of labels, after these, and of a number before its curve."""
_PHASES, _WARNINGS, _LINES = 4, 4, 3
"""Phases whose share of the step is shown; warnings that are, and lines of each."""


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
        """Return the panel as it is now. Text of others is shown as text: no markup, no control characters."""
        progress = self._progress
        width = min(self._console.width, _WIDTH)
        grid = Table.grid(padding=(0, _GAP, 0, 0))
        beside = max(width - _LABEL - _GAP - _FRAME, 1)
        grid.add_column(style="dim", no_wrap=True, width=_LABEL)
        grid.add_column(no_wrap=True, overflow="ellipsis", width=beside)
        for label, text in self._rows(beside):
            grid.add_row(Text(printable(label, "")), Text(printable(text, "")))
        for label, text in self._warnings(beside):
            grid.add_row(Text(label, style="yellow"), Text(printable(text, ""), style="yellow"))
        rows = Table.grid()
        if progress.total_steps:
            rows.add_row(ProgressBar(total=progress.total_steps, completed=progress.step, width=width - _FRAME))
        rows.add_row(grid)
        return Panel(rows, title=Text(printable(progress.title, "")), title_align="left", width=width)

    def _rows(self, width: int) -> Iterable[tuple[str, str]]:
        """Yield label and text of each row; texts that can be made shorter have at most ``width`` characters."""
        progress = self._progress
        eta = f"   eta {progress.eta}" if progress.eta else ""
        yield "step", f"{progress.counter}{eta}   elapsed {clock(time.monotonic() - progress.started)}"
        yield from self._phase(width)
        if (work := progress.work) is not None:
            yield "progress", f"{work.name} {work.counter}" + (f"   eta {work.eta}" if work.eta else "")
        yield from self._numbers(width)
        if progress.in_flight is not None:
            states = {state: count for state, count in progress.in_flight().items() if count}
            yield "episodes", ", ".join(f"{count} {state}" for state, count in states.items()) or "none in flight"
        if self._gpus.text:
            yield "gpu", self._gpus.text if len(self._gpus.text) <= width else self._gpus.range
        for kind, (reward, text) in list(progress.samples.items()):
            yield f"{kind} sample", shortened(f"{reward:.3g} · {text}", width)

    def _warnings(self, width: int) -> Iterable[tuple[str, str]]:
        """Yield the last warnings, each in a few lines."""
        warnings = self._progress.warnings
        for warning in warnings[-_WARNINGS:]:
            first, *rest = wrap(f"step {warning.step}: {warning.text}", width, max_lines=_LINES, placeholder=" …")
            yield "warning", first
            yield from (("", line) for line in rest)
        if (more := len(warnings) - _WARNINGS) > 0:
            yield "", f"and {more} more, in {FILE_NAME} of the run"

    def _numbers(self, width: int) -> Iterable[tuple[str, str]]:
        """Yield the newest values, with as much of their course as fits; those of validation by source and name."""
        validated = "validation"
        for label, text in list(self._progress.shown.items()):
            if label.startswith("val"):
                yield validated, f"{text:<{_VALUE - 1}} {label.removeprefix('val-core/').removeprefix('val/')}"
                validated = ""
            else:
                curve = list(self._progress.curves.get(label, ()))[-max(width - _VALUE, 1) :]
                yield label, f"{text:<{_VALUE}}{sparkline(curve)}".rstrip()

    def _phase(self, width: int) -> Iterable[tuple[str, str]]:
        """Yield what the run does now, and the shares of the step: in one row where they fit."""
        progress = self._progress
        shares = [f"{name} {100 * share:.0f} %" for name, share in list(progress.shares().items())[:_PHASES]]
        if not progress.open_phases:
            yield "phase", fitting(shares, width) or "-"
            return
        name, since = progress.open_phases[-1]
        now, of_step = f"{name} {clock(time.monotonic() - since)}", " · ".join(shares)
        if not shares:
            yield "phase", now
        elif len(both := f"{now}   of this step: {of_step}") <= width:
            yield "phase", both
        else:
            yield "phase", now
            yield "this step", fitting(shares, width)


def fitting(parts: Iterable[str], width: int) -> str:
    """Return the first parts, as many as fit side by side into ``width`` characters."""
    line = ""
    for part in parts:
        longer = f"{line} · {part}" if line else part
        if line and len(longer) > width:
            break
        line = longer
    return line


def sparkline(values: Iterable[float]) -> str:
    """Return one bar a value, from the lowest to the highest; a value that is not finite is a gap."""
    values = list(values)
    finite = [v for v in values if v - v == 0.0]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    top = len(BARS) - 1
    return "".join(" " if v - v != 0.0 else BARS[round((v - low) / span * top) if span else 0] for v in values)
