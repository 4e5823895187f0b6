"""The batch of a training step: drawn from the data's order, over-sampled, filtered, in the order of the draws.

Over-sampling (`rollout.over_sample_rate`) starts more groups than a step needs and leaves the slowest for the next
step. Long episodes are the slow ones, so what is left must not be lost, or the policy would learn from short answers
only. A group that was left comes first in the next step, which waits for it. So each drawn prompt is trained on exactly
once, at most one step late.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.core.errors import RunError
from posttrain.core.types import ON_POLICY, Prompt, Sampling, Trajectory
from posttrain.data.loader import BatchOrder
from posttrain.rollout.agents import with_branches
from posttrain.rollout.source import Group, RolloutStats, TrajectorySource


@dataclass
class _Draw:
    """A prompt's turn in the order of the data."""

    number: int
    """How many were drawn before it."""
    row: int
    group: Group
    left: bool = False
    """A step before this one did without it; this one does not."""


class TrainingBatches:
    """Batches of graded groups for the steps of a run.

    Args:
        order: of the rows of ``prompts``; this object owns it.
        n: episodes a prompt.
    """

    def __init__(
        self,
        source: TrajectorySource,
        prompts: Sequence[Prompt],
        order: BatchOrder,
        *,
        n: int,
        sampling: Sampling = ON_POLICY,
    ) -> None:
        self._source, self._prompts, self._order = source, prompts, order
        self._n, self._sampling = n, sampling
        self._cfg = source.env.cfg
        self._left: list[_Draw] = []

    async def next(self) -> list[list[Trajectory]]:
        """Return the groups of the next step, ``order.batch_size`` of them; what happened to others is in
        ``source.stats``.

        Raises:
            RunError: with `rollout.filter_groups`, not one group of the allowed draws has a signal.
        """
        stats = self._source.stats = RolloutStats()
        size = self._order.batch_size
        ready: list[tuple[_Draw, list[Trajectory]]] = []
        running: dict[asyncio.Task[list[Trajectory]], _Draw] = {}
        may_draw = size * (self._cfg.filter_max_batches if self._cfg.filter_groups else 1 + self._cfg.over_sample_rate)
        drawn = len(self._left)

        def start(draw: _Draw) -> None:
            running[asyncio.create_task(self._source.play(draw.group))] = draw

        for draw in self._left:
            start(draw)
        try:
            while True:
                wanted = math.ceil(size * (1 + self._cfg.over_sample_rate)) - len(ready) - len(running)
                for _ in range(min(wanted, math.ceil(may_draw) - drawn)):
                    start(self._draw())
                    drawn += 1
                if not running or (len(ready) >= size and not any(draw.left for draw in running.values())):
                    break
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    draw = running.pop(task)
                    group = task.result()
                    if self._cfg.filter_groups and not has_signal(group, self._cfg.filter_metric):
                        stats.filtered_groups += 1
                    else:
                        ready.append((draw, group))
        except BaseException:
            await self._stop(running)
            for draw in running.values():
                await draw.group.release()
            raise
        await self._stop(running)
        # Those that were left once come first; of the others those that were ready first.
        ready.sort(key=lambda item: not item[0].left)
        await self._leave([*running.values(), *(draw for draw, _ in ready[size:])], stats)
        ready = sorted(ready[:size], key=lambda item: item[0].number)
        stats.missing_groups = size - len(ready)
        if not ready:
            raise RunError(
                f"{drawn} groups were drawn for one step, and in none do episodes differ in "
                f"{self._cfg.filter_metric!r} (rollout.filter_metric){stats.failures}",
                hint="is the data too easy or too hard? raise rollout.n or rollout.filter_max_batches, or compare by "
                "another part of the reward",
            )
        return [with_branches(group) for _, group in ready]

    def state(self) -> dict[str, Any]:
        """Return where the order stands, and the rows that were drawn and are still to be trained on, as JSON."""
        return {**self._order.state(), "left": [[draw.number, draw.row] for draw in self._left]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken; groups that were in progress are played anew. Raises ``DataError``."""
        self._order.restore(dict(state))
        self._left = [_Draw(number, row, self._group(row), left=True) for number, row in state.get("left", [])]

    async def close(self) -> None:
        """Release what is in progress."""
        for draw in self._left:
            await draw.group.release()
        self._left = []

    def _draw(self) -> _Draw:
        number = self._order.position
        (row,) = self._order.take(1)
        return _Draw(number, row, self._group(row))

    def _group(self, row: int) -> Group:
        return Group(self._prompts[row], self._n, self._source.env, self._sampling)

    @staticmethod
    async def _stop(tasks: Mapping[asyncio.Task[Any], Any]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _leave(self, draws: Sequence[_Draw], stats: RolloutStats) -> None:
        """Keep draws for the next step, as they stand or to be played anew."""
        stats.cancelled_groups = len(draws)
        for draw in draws:
            if self._cfg.partial_rollouts:
                stats.cancelled_lengths += await draw.group.pause()
            else:
                stats.cancelled_lengths += await draw.group.release()
                draw.group = self._group(draw.row)
            draw.left = True
        self._left = sorted(draws, key=lambda draw: draw.number)


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
