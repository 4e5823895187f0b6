"""The batch of a training step: drawn from the data's order, sampled ahead of its step, filtered, in draw order.

With `rollout.staleness` = k, groups of the next k steps are played while trainers work. Pacing keeps the bound, and
nothing is discarded for it: a group is started only if the step that trains it in the worst case is at most k steps
away from the weights that sample its first token. ``TrainingBatches.capacity`` is that rule. Of what it allows, no more
is started ahead than trainers need not to wait: what waits for its step grows old for nothing.

Two things let a batch pass over a group that is still played. Long episodes are the slow ones, so what is passed over
must not be lost, or the policy would learn from short answers only:

- With staleness, at most a share `rollout.window` of a batch may overtake a group before the next batch waits for it.
- Without, over-sampling (`rollout.over_sample_rate`) starts more groups than a step needs. Those that are left are
  cancelled, come first in the next step, and it waits for them.

So each drawn prompt is trained on exactly once, and at most one step later than in strict order.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from posttrain.core.errors import DataError, RunError
from posttrain.core.types import ON_POLICY, Prompt, Sampling, Trajectory
from posttrain.data.loader import BatchOrder
from posttrain.rollout.agents import with_branches
from posttrain.rollout.schedule import Schedule, prompts_digest
from posttrain.rollout.seeds import seed_of
from posttrain.rollout.source import Group, RolloutStats, TrajectorySource


@dataclass(eq=False)
class Draw:
    """A prompt's turn in the order of the data."""

    number: int
    """How many were drawn before it."""
    row: int
    group: Group
    overtaken: int = 0
    """Groups after it that were trained before it; without staleness, steps that left it."""
    playing: asyncio.Task[None] | None = None
    graded: list[Trajectory] | None = None
    """The group when it is ready to be trained on."""
    place: float = math.inf
    """How many groups were ready before it; inf: it is played, or comes from a step before."""


class TrainingBatches:
    """Batches of graded groups for the steps of a run.

    Args:
        order: of the rows of ``prompts``; this object owns it.
        n: episodes a prompt.
        schedule: takes, or says, in which order groups end and are trained.
    """

    def __init__(
        self,
        source: TrajectorySource,
        prompts: Sequence[Prompt],
        order: BatchOrder,
        *,
        n: int,
        sampling: Sampling = ON_POLICY,
        schedule: Schedule | None = None,
    ) -> None:
        self._source, self._prompts, self._order = source, prompts, order
        self._digest = prompts_digest(prompts)
        self._schedule = schedule or Schedule()
        self._n, self._sampling = n, sampling
        self._cfg = source.env.cfg
        self._size = order.batch_size
        self._window = math.floor(self._cfg.overtaking * self._size)
        self._drawn: list[Draw] = []
        """Groups that are played or ready, in draw order."""
        self._places = itertools.count()
        self._capacity = self._limit = 0
        self._pace = 0
        """What the capacity is kept at, where less than all of it keeps trainers busy."""
        self._stats = RolloutStats()
        self._news = asyncio.Event()

    def capacity(self, later: int) -> int:
        """Return how many groups may be drawn and not trained, just before a step of weights that all engines have.

        The group that is last of so many is trained within the next k steps after this one even if ``window`` groups
        overtake it, so the versions that train it are at most k newer than the one that samples it.

        Args:
            later: steps of the run after this one.
        """
        ahead = self._cfg.staleness
        if not ahead:
            return math.ceil(self._size * (1 + self._cfg.over_sample_rate))
        return min(self._size * (1 + ahead) - self._window, self._size * (1 + later))

    async def next(self, later: int | None = None) -> list[list[Trajectory]]:
        """Return the groups of the next step, ``order.batch_size`` of them; what happened to others is in
        ``source.stats``. Call it when all engines have the weights of the step before.

        Args:
            later: steps of the run after this one; None: any number.

        Raises:
            RunError: with `rollout.filter_groups`, not one group of the allowed draws has a signal.
        """
        ahead = self._cfg.staleness if later is None else min(self._cfg.staleness, later)
        most = self.capacity(ahead)
        # Twice a batch: with nothing to wait for, one is played while the other is trained. The rest is for waits.
        all_of_it = self._schedule.repeats or not self._cfg.pacing
        least = most if all_of_it else min(most, 2 * self._size)
        self._pace = max(self._pace, least, len(self._drawn))
        self._capacity = min(self._pace, most)
        if self._cfg.filter_groups:
            self._limit = self._size * (self._cfg.filter_max_batches + ahead)
        else:
            self._limit = most
        early = sum(draw.graded is not None for draw in self._drawn) - self._size
        first, waited = not self._drawn, False
        try:
            for draw in self._drawn:
                self._start(draw)
            self._fill()
            while (chosen := self._choose()) is None:
                if not (first or waited):
                    self._pace = self._capacity = min(most, self._capacity + max(1, self._size // 2))
                    self._fill()
                waited = True
                self._news.clear()
                await self._news.wait()
                self._fill()
            self._schedule.trained([draw.number for draw in chosen])
        except BaseException:
            await self.close()
            raise
        if not waited and early > 0:  # so many groups wait for two steps
            self._pace = max(least, self._pace - math.ceil(early / 2))
        self._drawn = [draw for draw in self._drawn if draw not in chosen]
        self._stats.missing_groups = self._size - len(chosen)
        if self._cfg.staleness:
            self._capacity -= self._size
            for draw in self._drawn:
                draw.overtaken += sum(other.number > draw.number for other in chosen)
        else:
            await self._leave()
        stats = self._source.stats = self._stats.cut()
        if not chosen:
            raise RunError(
                f"{stats.filtered_groups} groups were drawn for one step, and in none do episodes differ in "
                f"{self._cfg.filter_metric!r} (rollout.filter_metric){stats.failures}",
                hint="is the data too easy or too hard? raise rollout.n or rollout.filter_max_batches, or compare by "
                "another part of the reward",
            )
        return [with_branches(draw.graded) for draw in chosen if draw.graded is not None]

    def state(self) -> dict[str, Any]:
        """Return where the order stands, and the groups that are drawn and not trained, as JSON."""
        kinds = [
            [draw.number, [kind for _, kind, _ in so_far], [i for i, _, _ in so_far]] for draw, so_far in self._so_far()
        ]
        left = [[draw.number, draw.row, draw.overtaken] for draw in self._drawn]
        data = {**self._order.state(), "prompts": self._digest}
        return {**data, "left": left, "in_flight": kinds, "schedule": self._schedule.state()}

    def in_flight(self) -> list[list[Trajectory]]:
        """Return what has been played of these groups, which ``state`` names in the same order."""
        return [[trajectory for _, _, trajectory in so_far] for _, so_far in self._so_far()]

    def resume(self, state: Mapping[str, Any] | None, in_flight: Sequence[Sequence[Trajectory]] | None = None) -> None:
        """Begin, or ``restore``."""
        if state is None:
            self._schedule.resume(None)
        else:
            self.restore(state, in_flight)

    def restore(self, state: Mapping[str, Any], in_flight: Sequence[Sequence[Trajectory]] | None = None) -> None:
        """Continue where ``state`` was taken. Episodes that are not ``in_flight`` begin anew; None: all do.

        Raises:
            DataError: the prompts are others since.
        """
        self._order.restore(dict(state))
        if state.get("prompts", self._digest) != self._digest:  # checkpoints of before lack it
            raise DataError(
                "the checkpoint was made with other prompts of the same number",
                hint="put the data file back, or start again with --overwrite",
            )
        left = state.get("left", [])
        self._drawn = [Draw(number, row, self._group(number, row), *(over or [1])) for number, row, *over in left]
        if in_flight is not None:
            self._go_on(state, in_flight)
        self._schedule.resume(state.get("schedule") or 0)

    def _go_on(self, state: Mapping[str, Any], in_flight: Sequence[Sequence[Trajectory]]) -> None:
        draws = {draw.number: draw for draw in self._drawn}
        for (number, kinds, *places), trajectories in zip(state.get("in_flight", []), in_flight, strict=True):
            for trajectory in trajectories:  # in memory once
                images = self._prompts[draws[number].row].images
                trajectory.prompt = replace(trajectory.prompt, images=images)
            if kinds[0] == "graded":
                draws[number].graded = list(trajectories)
            else:
                which = places[0] if places else range(len(kinds))
                ended = [kind == "ended" for kind in kinds]
                draws[number].group.go_on(zip(which, ended, trajectories, strict=True))

    def _so_far(self) -> list[tuple[Draw, list[tuple[int, str, Trajectory]]]]:
        """Return what has been played of groups that are drawn: which episode it is, how far it is, its trajectory."""
        found = []
        for draw in self._drawn:
            if draw.graded is not None:
                so_far = [(i, "graded", trajectory) for i, trajectory in enumerate(with_branches(draw.graded))]
            else:
                so_far = [(i, "ended" if ended else "played", t) for i, ended, t in draw.group.so_far()]
            if so_far:
                found.append((draw, so_far))
        return found

    async def close(self) -> None:
        """Release what is in progress."""
        await self._stop()
        for draw in self._drawn:
            await draw.group.release()
        self._drawn = []

    def _draw(self) -> Draw:
        number = self._order.position
        (row,) = self._order.take(1)
        self._schedule.drawn(number, row)
        return Draw(number, row, self._group(number, row))

    def _group(self, number: int, row: int) -> Group:
        seed = None if self._schedule.seed is None else seed_of(self._schedule.seed, row, number)
        by = partial(self._schedule.sampler, number)
        return Group(self._prompts[row], self._n, self._source.env, self._sampling, seed=seed, by=by)

    @property
    def _running(self) -> list[Draw]:
        return [draw for draw in self._drawn if draw.graded is None]

    def _fill(self) -> None:
        """Draw and start groups while there is capacity. Raises what ended the play of one."""
        for draw in self._running:
            if draw.playing is not None and draw.playing.done():
                draw.playing.result()
        while len(self._drawn) < min(self._capacity, self._limit - self._stats.filtered_groups):
            self._drawn.append(self._draw())
            self._start(self._drawn[-1])

    def _start(self, draw: Draw) -> None:
        if draw.playing is None and draw.graded is None:
            draw.playing = asyncio.create_task(self._play(draw))
            draw.playing.add_done_callback(lambda _: self._news.set())

    async def _play(self, draw: Draw) -> None:
        group = await self._source.play(draw.group, self._stats, partial(self._schedule.ended, draw.number))
        if not self._cfg.filter_groups or has_signal(group, self._cfg.filter_metric):
            draw.graded, draw.place = group, next(self._places)
        else:
            self._stats.filtered_groups += 1
            self._drawn.remove(draw)
            if self._cfg.staleness:
                self._fill()

    def _choose(self) -> list[Draw] | None:
        """Return the groups of the batch, in draw order; None: it must wait for one."""
        ready = self._ready()
        numbers = self._schedule.batch(None if ready is None else [draw.number for draw in ready])
        if numbers is None:
            return None
        return [draw for draw in self._drawn if draw.number in numbers and draw.graded is not None]

    def _ready(self) -> list[Draw] | None:
        chosen: list[Draw] = []
        taken = self._drawn  # without staleness those that were ready first, after those that were left
        if not self._cfg.staleness:
            taken = sorted(taken, key=lambda draw: (not draw.overtaken, draw.place))
        for draw in taken:
            if len(chosen) == self._size:
                break
            if draw.graded is not None:
                chosen.append(draw)
            elif not self._may_pass(draw, self._size - len(chosen)):
                return None
        if len(chosen) < self._size and self._running:
            return None
        return sorted(chosen, key=lambda draw: draw.number)

    def _may_pass(self, draw: Draw, later: int) -> bool:
        """Return true if ``later`` groups after a draw may be trained before it."""
        if self._cfg.staleness:
            return draw.overtaken + later <= self._window
        return not draw.overtaken

    async def _stop(self) -> None:
        playing = [draw.playing for draw in self._running if draw.playing is not None]
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)

    async def _leave(self) -> None:
        """Keep the groups that are drawn for the next step, as they stand or to be played anew: nobody samples while
        trainers work. With `rollout.partial_rollouts` one that is graded stays so."""
        await self._stop()
        for draw in self._drawn:
            if self._cfg.partial_rollouts:
                self._stats.cancelled_lengths += await draw.group.pause()
            else:
                self._stats.cancelled_lengths += await draw.group.release()
                draw.group, draw.graded = self._group(draw.number, draw.row), None
            draw.playing, draw.place = None, math.inf
            draw.overtaken += 1
        self._stats.cancelled_groups = len(self._running)


def has_signal(group: Sequence[Trajectory], metric: str) -> bool:
    """Return true if the episodes of a group that can be trained on differ in ``metric`` (`rollout.filter_metric`); one
    that lacks the part, since it could not be graded, has 0.

    Raises:
        RunError: none of them has such a part.
    """
    played = [t for t in group if t.trainable]
    if metric == "reward":
        return len({t.reward for t in played}) > 1
    if played and not any(metric in t.reward_parts for t in played):
        known = ", ".join(sorted({name for t in played for name in t.reward_parts}))
        raise RunError(
            f"rollout.filter_metric = {metric!r} is no part of the reward",
            hint=f"compare by 'reward', the weighted sum, or by one of: {known}",
        )
    return len({t.reward_parts.get(metric, 0.0) for t in played}) > 1
