"""One play of an agent: its session at the endpoint, from its first request to why it ended."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from posttrain.config import RolloutConfig
from posttrain.core.errors import PosttrainError, RunError
from posttrain.core.types import Prompt, Sampling, StopReason
from posttrain.core.user_calls import LateError, within
from posttrain.envs.agents import Agent, AgentTask, reward_of
from posttrain.envs.endpoint import AgentEndpoint
from posttrain.envs.sampling import AgentSession
from posttrain.envs.session import Branch, TokenRenderer, TokenSession

if TYPE_CHECKING:
    from posttrain.engines.base import Generator


@dataclass(frozen=True)
class Played:
    """What a play left."""

    branches: list[Branch]
    last: int
    """Which branch was sampled from last; -1: nothing was sampled."""
    unmatched: int
    """As a session counts them."""
    reason: StopReason
    error: str | None = None
    """Why the episode failed."""
    reward: float | None = None
    """None: a grader is asked."""


class Player(Protocol):
    """Plays an agent's episodes while it is entered."""

    async def __call__(self, prompt: Prompt, seed: int, sampling: Sampling, sampler: Generator) -> Played:
        """Play a prompt to the end. Whatever fails is in what it returns; ``seed`` is the task's."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...


class SessionPlayer:
    """Plays episodes at an endpoint of this process."""

    def __init__(self, agent: Agent, renderer: TokenRenderer, cfg: RolloutConfig) -> None:
        self.agent, self.renderer, self.cfg = agent, renderer, cfg
        self.endpoint = AgentEndpoint()

    async def __aenter__(self) -> Self:
        """Raises ``RunError`` where the endpoint cannot be served."""
        await self.endpoint.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.endpoint.__aexit__(kind, error, at)

    async def __call__(self, prompt: Prompt, seed: int, sampling: Sampling, sampler: Generator) -> Played:
        session = AgentSession(TokenSession(self.renderer), sampler, self.cfg, sampling)
        reason: StopReason = "stop"
        error: str | None = None
        reward: float | None = None
        token = self.endpoint.open(session)
        url = self.endpoint.url(token)
        own = prompt.copied()
        task = AgentTask(own.messages, own.ground_truth, own.extra_info, own.index, seed, url, token)
        try:
            reward = await self._run(task, session)
        except LateError:
            reason = "deadline"
            error = f"episode took longer than {self.cfg.episode_deadline_s:g} s (rollout.episode_deadline_s)"
        except PosttrainError as failure:
            if session.exhausted is not None:  # an agent may give up where its session has no more turns or tokens
                reason, reward = session.exhausted, session.reward or 0.0
            else:
                reason, error = "error", f"{type(failure).__name__}: {failure.message}"
        finally:
            self.endpoint.close(token)
        if session.failure is not None:  # whatever the agent made of it
            reason, error = "error", session.failure
        tokens = session.session
        last = next((i for i, branch in enumerate(tokens.branches) if branch is tokens.last), -1)
        return Played(tokens.branches, last, tokens.unmatched, reason, error, reward)

    async def _run(self, task: AgentTask, session: AgentSession) -> float | None:
        """Run the agent until it ends or its session fails. Returns its reward."""
        play = asyncio.create_task(within(self.cfg.episode_deadline_s, "the agent failed", self.agent, task))
        failed = asyncio.create_task(session.failed.wait())
        try:
            await asyncio.wait([play, failed], return_when=asyncio.FIRST_COMPLETED)
            if not play.done():
                return None
            reward = reward_of(play.result(), self.agent)
        finally:
            play.cancel()
            failed.cancel()
            await asyncio.gather(play, failed, return_exceptions=True)
        if not session.session.turns:
            raise RunError("the agent ended without a turn of the model")
        return session.reward if reward is None else reward
