"""An episode that an agent plays: its program samples at the endpoint, and its branches become trajectories."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

from posttrain.core.plugins import user_code
from posttrain.core.types import ENV_PART, Ids, Prompt, Sample, Sampling, SamplingParams, Trajectory
from posttrain.data.images import PlacedImage
from posttrain.data.record import Record
from posttrain.envs.agents import Agent
from posttrain.envs.base import checked_tasks
from posttrain.envs.play import Played, Player
from posttrain.envs.session import Branch
from posttrain.rollout.seeds import seed_of

if TYPE_CHECKING:
    from posttrain.engines.base import Generator
    from posttrain.envs.base import Split
    from posttrain.rollout.context import EpisodeContext
    from posttrain.rollout.episode import EpisodeState


@dataclass(frozen=True)
class AgentHost:
    """What all episodes of a run's agent share."""

    agent: Agent
    player: Player
    """Plays the episodes, in this process or in others. Whoever plays enters it."""
    name: str = "the agent"
    """How messages call it."""

    def tasks(self, split: Split) -> list[Prompt]:
        """Return the agent's own tasks, where it has a ``tasks`` as environments have. Raises ``CodeError``."""
        own = getattr(self.agent, "tasks", None)
        if own is None:
            return []
        with user_code(f"{self.name} failed in tasks", own):
            found = list(own(split))
        return checked_tasks(found, self.name, own)


class _Requests:
    """Samples the requests of one episode, and counts their tokens.

    Args:
        seed: each request gets one of its own: of this, its place among them and the tokens before it, so that an agent
            which asks twice for the same has two answers. None: the engine's stream.
    """

    def __init__(self, sampler: Generator, seed: int | None) -> None:
        self._sampler, self._seed, self._places = sampler, seed, count()
        self.sampled = 0

    async def generate(self, prompt_ids: Ids, params: SamplingParams, images: Sequence[PlacedImage] = ()) -> Sample:
        if self._seed is not None:
            params = replace(params, seed=seed_of(self._seed, next(self._places), len(prompt_ids)))
        sample = await self._sampler.generate(prompt_ids, params, images)
        self.sampled += len(sample.ids)
        return sample


class AgentEpisode:
    """One play of a prompt by an agent. It has the interface of ``Episode``; a play that is cancelled begins anew.

    Args:
        prompt_ids: of the prompt, which stand for the episode if the agent samples nothing.
        seed: of the episode; None: turns are sampled from the engine's stream.
    """

    resumable = False

    def __init__(
        self,
        prompt: Prompt,
        env: EpisodeContext,
        host: AgentHost,
        sampling: Sampling,
        prompt_ids: Ids,
        *,
        seed: int | None = None,
    ) -> None:
        self.prompt, self.env, self.host, self.sampling, self.seed = prompt, env, host, sampling, seed
        self.state: EpisodeState = "pending"
        self._prompt_ids = prompt_ids
        self._requests: _Requests | None = None

    @property
    def response_length(self) -> int:
        """Return the tokens that were sampled."""
        return self._requests.sampled if self._requests else 0

    async def play(self, sampler: Generator) -> Trajectory:
        """Play to the end. Whatever fails is recorded in the trajectory, which is that of the branch that was sampled
        from last and has the others as ``branches``."""
        self.state = "running"
        self._requests = _Requests(sampler, self.seed)
        begun = time.perf_counter()
        played = await self.host.player(self.prompt, seed_of(self.prompt.index), self.sampling, self._requests)
        self.state = "completed" if played.error is None else "failed"
        return self._trajectory(played, time.perf_counter() - begun)

    def _trajectory(self, played: Played, seconds: float) -> Trajectory:
        messages = self.prompt.messages
        parts = {} if played.reward is None else {ENV_PART: played.reward}
        nothing = Branch(Record(self._prompt_ids), len(self._prompt_ids), len(messages), messages)
        last = played.branches[played.last] if played.branches else nothing
        others = [branch for branch in played.branches if branch is not last]

        def trajectory(branch: Branch, number: int = 0) -> Trajectory:
            columns = branch.record.columns()
            return Trajectory(
                prompt=replace(self.prompt, messages=branch.messages[: branch.given]),
                tokens=columns["tokens"],
                loss_mask=columns["loss_mask"],
                logprobs=columns["logprobs"],
                weight_version=columns["weight_version"],
                routing=columns["routing"],
                messages=branch.messages,
                stop_reason=played.reason,
                turns=branch.turns,
                tool_calls=branch.tool_calls,
                seconds=seconds,
                prompt_length=branch.prompt_length,
                reward_parts=dict(parts),
                error=played.error,
                branch=number,
            )

        whole = trajectory(last)
        if self.env.cfg.branches == "all":
            whole.branches = [trajectory(branch, number) for number, branch in enumerate(others, start=1)]
        whole.unmatched = played.unmatched
        return whole

    def so_far(self) -> None:
        """Return None: the program can only begin anew."""

    async def release(self) -> str | None:
        """Do nothing: the player closes the session, however it ends."""
        return None


def with_branches(group: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the trajectories of a graded group and of their branches, which share the reward of their episode."""
    found: list[Trajectory] = []
    for episode in group:
        for branch in episode.branches:
            branch.reward, branch.correct, branch.extracted = episode.reward, episode.correct, episode.extracted
            branch.reward_parts, branch.error = dict(episode.reward_parts), episode.error
        found += [episode, *episode.branches]
    return found
