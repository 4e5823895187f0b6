"""What was predicted beside what a run has measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from posttrain.config import Config
from posttrain.core.sizes import GIB
from posttrain.plan.batch import Lengths, longest_of, sequences_of_step
from posttrain.plan.estimate import Plan
from posttrain.plan.pacing import Waits

Row = Mapping[str, float]
"""The metrics of a step"""

WARM_UP = 2
"""Steps that compile kernels and grow memory, and are left out where there are more"""


@dataclass(frozen=True)
class Pair:
    """One figure."""

    name: str
    """Name of the metric"""
    predicted: float
    measured: float

    @property
    def off(self) -> float:
        """How far the prediction is from what was measured, as a share of that."""
        return self.predicted / self.measured - 1.0 if self.measured else 0.0

    def describe(self) -> str:
        return f"{self.name} {self.predicted:.4g} / {self.measured:.4g} ({self.off:+.0%})"


def median(rows: Sequence[Row], name: str) -> float | None:
    """Return the median of the steps after the first ones; None: the metric was not logged."""
    later = rows[WARM_UP:] or rows
    values = [float(row[name]) for row in later if name in row]
    return statistics.median(values) if values else None


def lengths_of(cfg: Config, rows: Sequence[Row]) -> Lengths | None:
    """Return the lengths of the sequences that a run has trained on; None: it has logged none."""
    tokens = median(rows, "perf/total_num_tokens" if cfg.command == "rl" else "train/tokens")
    if not tokens:
        return None
    mean = tokens / sequences_of_step(cfg)
    prompt = median(rows, "prompt_length/mean") or 0.0
    if (loss_tokens := median(rows, "train/loss_tokens")) is not None:
        prompt = (tokens - loss_tokens) / sequences_of_step(cfg)
    turns = median(rows, "num_turns/mean") or 1.0
    return Lengths(mean, longest_of(cfg), min(prompt, mean), "measured", turns)


def waits_of(cfg: Config, rows: Sequence[Row]) -> Waits:
    """Return how long a run has waited for tools."""
    middle, longest = (median(rows, f"tools/seconds_per_group/{name}") or 0.0 for name in ("median", "max"))
    return Waits(middle, longest, cfg.data.batch_size)


def computed_of(rows: Sequence[Row]) -> float:
    """Return the share of a step's tokens that the actor's updates of a run have computed."""
    return 1.0 - (median(rows, "perf/skipped_tokens") or 0.0)


def compare(plan: Plan, rows: Sequence[Row]) -> list[Pair]:
    """All that is both predicted and measured. Times and memory only where there is a GPU."""
    found: list[Pair] = []

    def pair(name: str, predicted: float | None, key: str = "") -> None:
        measured = median(rows, key or name)
        if predicted is not None and measured:
            found.append(Pair(name, predicted, measured))

    rl = plan.question.cfg.command == "rl"
    pair("perf/total_num_tokens" if rl else "train/tokens", float(plan.batch.tokens))
    if rl:
        pair("actor/updates", float(plan.batch.updates))
    if not plan.question.machine.memory:
        return found
    # Where most steps had nothing to learn from, updates were the optimizer's alone.
    trains = computed_of(rows) > 0
    updates = [m for m in plan.moments if m.name in ("update", "update_actor") and trains]
    for moment in updates:
        pair("perf/memory_gib", moment.allocated / GIB)
    # Trainers that have GPUs of their own keep what they had before.
    load = [m for m in plan.moments if m.name == "load" and plan.layout.colocated]
    for moment in load:
        pair("sync/gpu_used_gib", moment.total / GIB)
    ahead = bool(plan.question.cfg.rollout.staleness)
    for name, phase in plan.phases.items():
        if ahead and name == "gen":  # what is measured of it is how long trainers wait
            continue
        if trains or name != "update_actor":
            pair(f"timing_s/{name}", phase.total)
    if ahead:
        pair("timing_s/step", plan.step_seconds)
        for name, share in plan.waiting.items():
            pair(name, share)
    return found
