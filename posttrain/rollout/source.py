"""Where batches of graded trajectories come from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain.rewards.compose import Rewarder
from posttrain.rollout.episode import Environment, run_episode
from posttrain.types import Prompt, Trajectory

if TYPE_CHECKING:
    from posttrain.rollout.base import Sampler


@dataclass
class RolloutStats:
    """What happened to the episodes of one batch."""

    started: int = 0
    failed: int = 0
    """episodes that ended in an error (an engine, a deadline); they are left out of training"""
    grader_failed: int = 0
    """episodes that could not be graded; `reward.on_error` says what became of them"""


class TrajectorySource:
    """Plays episodes of prompts on a pool of samplers, and grades them. Without a ``rewarder`` it only plays."""

    def __init__(self, samplers: Sequence[Sampler], env: Environment, rewarder: Rewarder | None = None) -> None:
        self.samplers = list(samplers)
        self.env = env
        self.rewarder = rewarder
        self.load = [0] * len(self.samplers)
        self.stats = RolloutStats()

    async def sample(self, prompts: Sequence[Prompt], n: int, *, temperature: float) -> list[list[Trajectory]]:
        """``n`` graded episodes of each prompt, in prompt order. Failed episodes are among them, with ``error`` set."""
        assert self.rewarder is not None
        groups = await self.play(prompts, n, temperature=temperature)
        played = [t for group in groups for t in group if t.error is None]
        self.stats.grader_failed = await self.rewarder.reward(played)
        return groups

    async def play(self, prompts: Sequence[Prompt], n: int, *, temperature: float) -> list[list[Trajectory]]:
        """``sample`` without the grading."""
        flat = await asyncio.gather(*(self._play(p, temperature) for p in prompts for _ in range(n)))
        self.stats = RolloutStats(started=len(flat), failed=sum(t.error is not None for t in flat))
        return [list(flat[i : i + n]) for i in range(0, len(flat), n)]

    async def _play(self, prompt: Prompt, temperature: float) -> Trajectory:
        """One episode, on the sampler with the least to do; all its turns stay there, for the prefix cache."""
        chosen = min(range(len(self.samplers)), key=self.load.__getitem__)
        self.load[chosen] += 1
        try:
            return await run_episode(prompt, self.samplers[chosen], self.env, temperature=temperature)
        finally:
            self.load[chosen] -= 1
