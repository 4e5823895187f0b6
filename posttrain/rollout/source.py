"""Where batches of graded trajectories come from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain.config import RewardConfig
from posttrain.errors import RunError
from posttrain.rewards.grade import GradeItem, GraderPool
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
    """episodes whose grader failed; `reward.on_error` says what became of them"""


class TrajectorySource:
    """Plays episodes of prompts on a pool of samplers, and grades them."""

    def __init__(
        self, samplers: Sequence[Sampler], env: Environment, graders: GraderPool, reward: RewardConfig
    ) -> None:
        self.samplers = list(samplers)
        self.env = env
        self.graders = graders
        self.reward = reward
        self.load = [0] * len(self.samplers)
        self.stats = RolloutStats()

    async def sample(
        self, prompts: Sequence[Prompt], n: int, *, temperature: float, top_p: float = 1.0, top_k: int = 0
    ) -> list[list[Trajectory]]:
        """``n`` graded episodes of each prompt, in prompt order. Failed episodes are among them, with ``error`` set."""
        groups = await self.play(prompts, n, temperature=temperature, top_p=top_p, top_k=top_k)
        await self._grade([t for group in groups for t in group])
        return groups

    async def play(
        self, prompts: Sequence[Prompt], n: int, *, temperature: float, top_p: float = 1.0, top_k: int = 0
    ) -> list[list[Trajectory]]:
        """``sample`` without the grading."""
        flat = await asyncio.gather(*(self._play(p, temperature, top_p, top_k) for p in prompts for _ in range(n)))
        self.stats = RolloutStats(started=len(flat), failed=sum(t.error is not None for t in flat))
        return [list(flat[i : i + n]) for i in range(0, len(flat), n)]

    async def _play(self, prompt: Prompt, temperature: float, top_p: float, top_k: int) -> Trajectory:
        """One episode, on the sampler with the least to do; all its turns stay there, for the prefix cache."""
        chosen = min(range(len(self.samplers)), key=self.load.__getitem__)
        self.load[chosen] += 1
        try:
            return await run_episode(
                prompt, self.samplers[chosen], self.env, temperature=temperature, top_p=top_p, top_k=top_k
            )
        finally:
            self.load[chosen] -= 1

    async def _grade(self, trajectories: Sequence[Trajectory]) -> None:
        """Fill reward, parts and correctness. A grader that fails is counted, and never a silent 0."""
        played = [t for t in trajectories if t.error is None]
        items = [
            GradeItem(t.prompt.data_source, t.response_text, t.prompt.ground_truth, t.prompt.extra_info) for t in played
        ]
        for trajectory, score in zip(played, await self.graders.grade(items), strict=True):
            if score.error is not None:
                self.stats.grader_failed += 1
                if self.reward.on_error == "raise":
                    raise RunError(f"the grader of {trajectory.prompt.data_source} failed: {score.error}")
                if self.reward.on_error == "drop":
                    trajectory.error = f"grader: {score.error}"
                continue
            trajectory.reward = score.score
            trajectory.correct = score.correct
            trajectory.reward_parts |= {"score": score.score, **score.parts}
