"""How long trainers wait for groups that are sampled ahead of their step (`rollout.staleness`).

Groups end at times that no formula tells where their waits have a long tail. So a run is played on a clock of its own,
by the rules of ``rollout.batches.TrainingBatches``: capacity, pace, order, window. What a step takes beside waiting is
given.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist, mean

STEPS, WARM_UP = 200, 20
"""Steps that are played, and those of them that do not count: at first nothing has been sampled ahead."""
_SEED = 0


@dataclass(frozen=True)
class Waits:
    """Seconds in which the slowest episode of a group waits for tools and the simulated user."""

    median: float = 0.0
    """The median of the groups of a step"""
    longest: float = 0.0
    """The longest of the groups of a step; its median over steps"""
    groups: int = 1
    """How many groups a step has"""

    def sampler(self) -> Callable[[], float]:
        """Return what draws the seconds of a group: log-normal, with the same median and longest of so many."""
        if self.median <= 0.0 or self.longest <= self.median or self.groups < 2:
            return lambda: self.median
        sigma = math.log(self.longest / self.median) / NormalDist().inv_cdf(0.5 ** (1.0 / self.groups))
        draw = random.Random(_SEED).lognormvariate
        return lambda: draw(math.log(self.median), sigma)


@dataclass
class _Group:
    ends: float
    overtaken: int = 0


@dataclass(frozen=True)
class Pace:
    """What becomes of a run that samples ahead."""

    waiting: float
    """Mean seconds of a step in which trainers wait"""
    sampled: float
    """Mean groups whose sampling is in progress, waits for tools left out"""


def paced(
    ahead: int, window: int, size: int, busy: float, sampling: float, waits: Waits, *, pacing: bool = True
) -> Pace:
    """Return what becomes of a run.

    Args:
        ahead: `rollout.staleness`.
        window: groups that may overtake another, as `rollout.window` allows of a batch.
        size: groups of a batch.
        busy: seconds of a step in training and updates of weights.
        sampling: seconds that engines take for a group.
        waits: of a group, on top of these.
        pacing: `rollout.pacing`.
    """
    draw, now = waits.sampler(), 0.0
    most = size * (1 + ahead) - window
    least = min(2 * size, most) if pacing else most
    pace, drawn, waited = 0, list[_Group](), list[float]()

    def fill() -> None:
        drawn.extend(_Group(now + sampling + draw()) for _ in range(pace - len(drawn)))

    for _ in range(STEPS):
        begun = now
        pace = min(max(pace, least, len(drawn)), most)
        early = sum(group.ends <= now for group in drawn) - size
        first = not drawn
        fill()
        must_wait = (chosen := _chosen(drawn, now, size, window)) is None
        if must_wait and not first:
            pace = min(most, pace + max(1, size // 2))
            fill()
        while chosen is None:
            now = min(group.ends for group in drawn if group.ends > now)
            chosen = _chosen(drawn, now, size, window)
        if not must_wait and early > 0:
            pace = max(least, pace - math.ceil(early / 2))
        taken = set(map(id, chosen))
        for number, group in enumerate(drawn):
            group.overtaken += sum(id(other) in taken for other in drawn[number + 1 :])
        drawn = [group for group in drawn if id(group) not in taken]
        waited.append(now - begun)
        now += busy
    step = mean(waited[WARM_UP:]) + busy
    return Pace(mean(waited[WARM_UP:]), size * sampling / step if step else float(size))


def _chosen(drawn: list[_Group], now: float, size: int, window: int) -> list[_Group] | None:
    """Return the groups that the batch takes; None: it has to wait."""
    chosen: list[_Group] = []
    for group in drawn:
        if len(chosen) == size:
            break
        if group.ends <= now:
            chosen.append(group)
        elif group.overtaken + size - len(chosen) > window:
            return None
    return chosen if len(chosen) == size else None
