"""What an episode earns: the weighted sum of its named parts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence

from posttrain.config import RewardConfig
from posttrain.core.errors import RunError
from posttrain.core.types import ENV_PART, Score, Trajectory
from posttrain.rewards.base import EpisodeScorer
from posttrain.rewards.grade import GradeItem, GraderPool


def own_verdict(episode: Trajectory) -> Score | None:
    """Return the verdict of the episode's environment or agent; None: there is none, or it gave no reward."""
    reward = episode.reward_parts.get(ENV_PART)
    return None if reward is None else Score(reward, reward >= 1.0)


class Rewarder:
    """Grades episodes: the data source's grader (or ``reward.function``), the scorers, and the weighted sum.

    Args:
        max_response_tokens: ``rollout.max_response_tokens``, which the parts `length` and `overlong` are measured by.
        scorers: reward models and judges, whose parts have their names.
        has_user: a simulated user may give the part `user`.
    """

    def __init__(
        self,
        cfg: RewardConfig,
        graders: GraderPool,
        max_response_tokens: int,
        scorers: Sequence[EpisodeScorer] = (),
        *,
        has_user: bool = False,
    ) -> None:
        self.cfg = cfg
        self.graders = graders
        self.max_response_tokens = max_response_tokens
        self.scorers = scorers
        self.has_user = has_user

    async def reward(self, episodes: Sequence[Trajectory]) -> list[str]:
        """Fill reward, parts and correctness of episodes that did not fail. Returns why others could not be graded, one
        message an episode.

        Raises:
            RunError: one could not be graded and `reward.on_error` is "raise", or a scorer is broken.
        """
        graded, *opinions = await asyncio.gather(
            self._verdicts(episodes), *(scorer.score(episodes) for scorer in self.scorers)
        )
        errors: list[str] = []
        for index, episode in enumerate(episodes):
            opinion = {s.name: scores[index] for s, scores in zip(self.scorers, opinions, strict=True)}
            error = self._settle(episode, graded[index], opinion)
            episode.unfinished = graded[index].unfinished
            if error is not None:
                errors.append(error)
                self._on_error(episode, error)
        return errors

    async def _verdicts(self, episodes: Sequence[Trajectory]) -> list[Score]:
        """Return an environment's verdict where there is one, else a grader's."""
        own = [None if self.cfg.function else own_verdict(episode) for episode in episodes]
        items = [
            GradeItem(t.prompt.data_source, t.response_text, t.prompt.ground_truth, t.prompt.extra_info)
            for t, verdict in zip(episodes, own, strict=True)
            if verdict is None
        ]
        graded = iter(await self.graders.grade(items))
        return [next(graded) if verdict is None else verdict for verdict in own]

    def _settle(self, episode: Trajectory, verdict: Score, opinions: Mapping[str, Score]) -> str | None:
        """Fill one episode; why it could not be, or None."""
        problems = {f"the grader of {episode.prompt.data_source}": verdict, **opinions}
        for who, score in problems.items():
            if score.error is not None:
                return f"{who} failed: {score.error}"
        parts = self.parts(episode, verdict) | {name: score.score for name, score in opinions.items()}
        # A tool says nothing about an episode that did not call it, and a user nothing about one that was cut off.
        silent = {name for name in self.cfg.weights if name.startswith("tool/") or (name == "user" and self.has_user)}
        parts |= dict.fromkeys(silent - parts.keys(), 0.0)
        missing = [name for name in self.cfg.weights if name not in parts]
        if missing:
            return f"reward.weights names {', '.join(missing)}, and the episode has {', '.join(sorted(parts))}"
        # An environment, a tool or a simulated user may have given it; advantages of the whole group would be lost.
        if wrong := [name for name, value in parts.items() if not math.isfinite(value)]:
            return f"the part {wrong[0]} of the reward is {parts[wrong[0]]}"
        episode.reward_parts = parts
        episode.correct, episode.extracted = verdict.correct, verdict.extracted
        episode.reward = sum(weight * parts[name] for name, weight in self.cfg.weights.items())
        return None

    def parts(self, episode: Trajectory, verdict: Score) -> dict[str, float]:
        """The parts that need no scorer. A grader's own `format` wins over the general one."""
        length = episode.response_length / self.max_response_tokens
        parts = {
            "score": verdict.score,
            "correct": float(verdict.correct),
            "format": float(verdict.extracted is not None),
            "length": -length,
        }
        if self.cfg.overlong.buffer_tokens is not None:
            parts["overlong"] = overlong(
                episode.response_length, self.max_response_tokens, self.cfg.overlong.buffer_tokens
            )
        return parts | verdict.parts | episode.reward_parts

    def _on_error(self, episode: Trajectory, error: str) -> None:
        if self.cfg.on_error == "raise":
            raise RunError(f"row {episode.prompt.index} could not be graded: {error}", hint="reward.on_error = 'drop'")
        if self.cfg.on_error == "drop":
            episode.error = f"reward: {error}"
        else:  # every part counts as 0, for those who read them one by one
            names = ("score", "correct", "format", *self.cfg.weights, *episode.reward_parts)
            episode.reward_parts = dict.fromkeys(names, 0.0)


def overlong(length: int, limit: int, buffer: int) -> float:
    """Soft overlong punishment in [-1, 0] (DAPO, arXiv:2503.14476, eq. 13): 0 up to ``limit - buffer`` tokens, then
    falling linearly to -1 at ``limit``."""
    return -min(1.0, max(0.0, (length - (limit - buffer)) / buffer))
