"""An episode that an agent plays: its program samples at the endpoint, and its branches become trajectories."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

from posttrain.core.errors import PosttrainError, RunError
from posttrain.core.plugins import user_code
from posttrain.core.types import ENV_PART, Ids, Prompt, Sample, Sampling, SamplingParams, StopReason, Trajectory
from posttrain.data.images import PlacedImage
from posttrain.data.record import Record
from posttrain.envs.agent_processes import AgentProcesses
from posttrain.envs.agents import Agent, AgentTask, reward_of
from posttrain.envs.sampling import AgentSession
from posttrain.envs.session import Branch, TokenRenderer, TokenSession
from posttrain.rollout.seeds import seed_of
from posttrain.rollout.user_calls import LateError, within

if TYPE_CHECKING:
    from posttrain.engines.base import Generator
    from posttrain.envs.base import Split
    from posttrain.envs.endpoint import AgentEndpoint
    from posttrain.rollout.episode import EpisodeContext, EpisodeState


@dataclass(frozen=True)
class AgentHost:
    """What all episodes of a run's agent share."""

    agent: Agent
    renderer: TokenRenderer
    endpoint: AgentEndpoint
    name: str = "the agent"
    """How messages call it."""
    processes: AgentProcesses | None = None
    """Where its episodes are played; None: in this process."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve the endpoint, and run the processes. Raises ``RunError``."""
        async with self.endpoint, self.processes or nullcontext():
            yield

    def tasks(self, split: Split) -> list[Prompt]:
        """Return the agent's own tasks, where it has a ``tasks`` as environments have. Raises ``CodeError``."""
        own = getattr(self.agent, "tasks", None)
        if own is None:
            return []
        with user_code(f"{self.name} failed in tasks", own):
            return list(own(split))


class _Seeded:
    """Gives each request of an episode a seed of its own: that of its place among them and of the tokens before it, so
    that an agent which asks twice for the same has two answers."""

    def __init__(self, sampler: Generator, seed: int) -> None:
        self._sampler, self._seed, self._places = sampler, seed, count()

    async def generate(self, prompt_ids: Ids, params: SamplingParams, images: Sequence[PlacedImage] = ()) -> Sample:
        seed = seed_of(self._seed, next(self._places), len(prompt_ids))
        return await self._sampler.generate(prompt_ids, replace(params, seed=seed), images)


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
        self._session: AgentSession | None = None

    @property
    def response_length(self) -> int:
        """Return the tokens after the prompts of all branches."""
        branches = self._session.session.branches if self._session else ()
        return sum(len(branch.record) - branch.prompt_length for branch in branches)

    async def play(self, sampler: Generator) -> Trajectory:
        """Play to the end. Whatever fails is recorded in the trajectory, which is that of the branch that was sampled
        from last and has the others as ``branches``."""
        self.state = "running"
        if self.seed is not None:
            sampler = _Seeded(sampler, self.seed)
        session = AgentSession(TokenSession(self.host.renderer), sampler, self.env.cfg, self.sampling)
        self._session = session
        reason: StopReason = "stop"
        error: str | None = None
        reward: float | None = None
        begun = time.perf_counter()
        token = self.host.endpoint.open(session)
        try:
            reward = await self._run(token, session)
        except LateError:
            reason = "deadline"
            error = f"episode took longer than {self.env.cfg.episode_deadline_s:g} s (rollout.episode_deadline_s)"
        except PosttrainError as failure:
            if session.exhausted is not None:  # an agent may give up where its session has no more turns or tokens
                reason, reward = session.exhausted, session.reward or 0.0
            else:
                reason, error = "error", f"{type(failure).__name__}: {failure.message}"
        finally:
            self.host.endpoint.close(token)
        if session.failure is not None:  # whatever the agent made of it
            reason, error = "error", session.failure
        self.state = "completed" if error is None else "failed"
        parts = {} if reward is None else {ENV_PART: reward}
        return self._trajectory(session.session, reason, error, parts, time.perf_counter() - begun)

    async def _run(self, token: str, session: AgentSession) -> float | None:
        """Run the agent until it ends or its session fails. Returns its reward."""
        task = AgentTask(
            self.prompt.messages,
            self.prompt.ground_truth,
            self.prompt.extra_info,
            self.prompt.index,
            seed_of(self.prompt.index),
            self.host.endpoint.url(token),
            token,
        )
        agent = self.host.agent
        play = asyncio.create_task(
            within(self.env.cfg.episode_deadline_s, "the agent failed", self.host.processes or agent, task)
        )
        failed = asyncio.create_task(session.failed.wait())
        try:
            await asyncio.wait([play, failed], return_when=asyncio.FIRST_COMPLETED)
            if not play.done():
                return None
            reward = reward_of(play.result(), agent)
        finally:
            play.cancel()
            failed.cancel()
            await asyncio.gather(play, failed, return_exceptions=True)
        if not session.session.turns:
            raise RunError("the agent ended without a turn of the model")
        return session.reward if reward is None else reward

    def _trajectory(
        self, session: TokenSession, reason: StopReason, error: str | None, parts: dict[str, float], seconds: float
    ) -> Trajectory:
        messages = self.prompt.messages
        nothing = Branch(Record(self._prompt_ids), len(self._prompt_ids), len(messages), messages)
        last = session.last or nothing
        others = [branch for branch in session.branches if branch is not last]

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
                stop_reason=reason,
                turns=branch.turns,
                tool_calls=branch.tool_calls,
                seconds=seconds,
                prompt_length=branch.prompt_length,
                reward_parts=dict(parts),
                error=error,
                branch=number,
            )

        whole = trajectory(last)
        if self.env.cfg.branches == "all":
            whole.branches = [trajectory(branch, number) for number, branch in enumerate(others, start=1)]
        whole.unmatched = session.unmatched
        return whole

    def so_far(self) -> None:
        """Return None: the program can only begin anew."""

    async def release(self) -> str | None:
        """Do nothing: ``play`` closes the session, however it ends."""
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
