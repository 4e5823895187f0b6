"""What all views of a run show: how far it is, its newest values and how they have gone so far."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from posttrain.core.types import Trajectory
from posttrain.tracking.warnings import RunWarning

COLUMNS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("critic/score/mean", "rewards/margins"), "{:.3f}"),
    ("loss", ("actor/pg_loss", "train/loss"), "{:.4f}"),
    ("length", ("response_length/mean",), "{:.0f}"),
    ("grad norm", ("actor/grad_norm", "train/grad_norm"), "{:.3f}"),
    ("tokens/s", ("perf/throughput",), "{:.0f}"),
)
"""(label, the metric names that may fill it, format)."""
CURVES = ("reward", "loss", "length")
"""Labels of which the panel shows the course."""
ONCE = ("start", "engines", "first_sync", "warm_up")
"""Phases before the first update, which say nothing about the steps to come."""
INTERVAL = ("/low", "/high")
"""What the names of the ends of a metric's interval have after its own."""


@dataclass
class Work:
    """Something within a step that takes a while, and how far it is."""

    name: str
    total: int
    unit: str
    """What it is counted in."""
    started: float
    done: int = 0

    @property
    def counter(self) -> str:
        return f"{self.done:,} of {self.total:,} {self.unit}"

    @property
    def eta(self) -> str:
        """Time left at the speed so far; empty while nothing is done."""
        if not self.done:
            return ""
        return clock((time.monotonic() - self.started) * (self.total - self.done) / self.done)


@dataclass
class Progress:
    """What all views know about the run so far."""

    title: str
    total_steps: int | None
    step: int = 0
    reported: bool = False
    """A step has been reported."""
    seconds: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=20))
    """Steps since the report before, and seconds, of the last reports."""
    shown: dict[str, str] = field(default_factory=dict)
    """Label -> text of the newest value."""
    curves: dict[str, deque[float]] = field(default_factory=dict)
    """Label -> values of the last steps."""
    started: float = field(default_factory=time.monotonic)
    step_started: float = field(default_factory=time.monotonic)
    open_phases: list[tuple[str, float]] = field(default_factory=list)
    """(name, when it began) of those that the run is in, the innermost last."""
    spent: dict[str, float] = field(default_factory=dict)
    """Phase -> its seconds in the present step, without those of open ones."""
    in_flight: Callable[[], Mapping[str, int]] | None = None
    """State -> episodes that are in it just now."""
    samples: dict[str, tuple[float, str]] = field(default_factory=dict)
    """`good` and `bad` -> reward and text of the newest such response."""
    warnings: Sequence[RunWarning] = ()
    """The last of each name."""
    work: Work | None = None
    """What the run is counting just now."""

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a finished step."""
        # A run that goes on has not done the steps before its first.
        steps = max(0, step - self.step) if self.reported else min(step, 1)
        self.step, self.reported = step, True
        self.step_started = time.monotonic()
        self.spent.clear()
        once = sum(float(metrics.get(f"timing_s/{name}", 0.0)) for name in ONCE)
        if steps:  # a validation before the first step is none, and comes once too
            self.seconds.append((steps, float(metrics["timing_s/step"]) - once))
        for label, names, style in COLUMNS:
            name = next((name for name in names if name in metrics), None)
            if name is not None:
                self.shown[label] = style.format(float(metrics[name]))
                if label in CURVES:
                    self.curves.setdefault(label, deque(maxlen=150)).append(float(metrics[name]))
        validated = [name for name in metrics if name.startswith("val") and not name.endswith(INTERVAL)]
        self.shown |= {name: _with_interval(name, metrics) for name in validated}

    def took(self, name: str, seconds: float) -> None:
        """Add the seconds of a phase that has ended to the present step."""
        self.spent[name] = self.spent.get(name, 0.0) + seconds

    def shares(self) -> dict[str, float]:
        """Return phase -> its share of the present step so far, the largest first."""
        now = time.monotonic()
        spent = dict(self.spent)
        for name, since in list(self.open_phases):
            spent[name] = spent.get(name, 0.0) + now - since
        total = max(now - self.step_started, 1e-9)
        return {name: min(1.0, s / total) for name, s in sorted(spent.items(), key=lambda item: -item[1])}

    def sampled(self, groups: Sequence[Sequence[Trajectory]]) -> None:
        """Keep the best and the worst of some episodes."""
        played = [t for group in groups for t in group if t.error is None]
        if played:
            best, worst = max(played, key=lambda t: t.reward), min(played, key=lambda t: t.reward)
            self.samples["good"] = (best.reward, best.response_text)
            if worst.reward < best.reward:
                self.samples["bad"] = (worst.reward, worst.response_text)

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


def _with_interval(name: str, metrics: Mapping[str, float]) -> str:
    """Return a metric as text, with its interval where it has one."""
    ends = [float(metrics[name + end]) for end in INTERVAL if name + end in metrics]
    return f"{float(metrics[name]):.3f}" + (f" ({ends[0]:.3f} - {ends[1]:.3f})" if len(ends) == 2 else "")


def clock(seconds: float) -> str:
    """Return seconds as `m:ss`, or `h:mm:ss` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
