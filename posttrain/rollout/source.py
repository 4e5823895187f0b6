"""Where groups of graded trajectories come from."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from posttrain.core.types import ON_POLICY, Failure, Prompt, Sampling, Trajectory
from posttrain.rewards.compose import Rewarder
from posttrain.rollout.agents import AgentEpisode
from posttrain.rollout.context import EpisodeContext
from posttrain.rollout.episode import Episode, EpisodeState, in_flight
from posttrain.rollout.seeds import seed_of

if TYPE_CHECKING:
    from posttrain.engines.base import Generator
    from posttrain.rollout.pool import SamplerPool

T = TypeVar("T")


@dataclass
class RolloutStats:
    """What happened to the episodes of one batch."""

    started: int = 0
    failed: int = 0
    """Episodes that ended in an error (an engine, a deadline); they are left out of training."""
    grader_failed: int = 0
    """Episodes that could not be graded; `reward.on_error` says what became of them."""
    branches: int = 0
    """Further trajectories of agents' episodes, beside the one that each has."""
    unmatched: int = 0
    """Requests of agents whose history was not that of a sampled turn."""
    filtered_groups: int = 0
    """Groups left out because their episodes were alike (`rollout.filter_groups`)."""
    missing_groups: int = 0
    """Groups that the step is short of, because `rollout.filter_max_batches` was reached."""
    cancelled_groups: int = 0
    """Groups that the next step plays on, or anew (`rollout.over_sample_rate`)."""
    cancelled_lengths: list[int] = field(default_factory=list)
    """Response tokens that each episode had that was cancelled."""
    lengths: list[int] = field(default_factory=list)
    """Response tokens of each graded episode."""
    rewards: list[float] = field(default_factory=list)
    tool_calls: int = 0
    tool_errors: int = 0
    """Tool calls that were answered with an error."""
    errors: dict[Failure, str] = field(default_factory=dict)
    """The first message of each kind of failure."""

    def cut(self) -> RolloutStats:
        """Return what was counted so far, and count from 0 again."""
        counted = replace(self)
        vars(self).update(vars(RolloutStats()))
        return counted

    def add(self, other: RolloutStats) -> None:
        """Count what ``other`` has counted."""
        for name, value in vars(other).items():
            own = getattr(self, name)
            setattr(self, name, value | own if isinstance(value, dict) else own + value)

    def count(self, episodes: Sequence[Trajectory]) -> None:
        """Take the episodes of a group, before they are graded."""
        self.started += len(episodes)
        for episode in episodes:
            self.tool_calls += episode.tool_calls
            self.tool_errors += len(episode.tool_errors)
            self.branches += len(episode.branches)
            self.unmatched += episode.unmatched
            if episode.tool_errors:
                self.errors.setdefault("tool", episode.tool_errors[0])
            if episode.error is not None:
                self.failed += 1
                self.errors.setdefault("episode", episode.error)

    @property
    def first_failure(self) -> str | None:
        """Return why the first episode failed or could not be graded."""
        return self.errors.get("episode") or self.errors.get("grader")

    @property
    def failures(self) -> str:
        """Return how many episodes failed or could not be graded, as the end of a sentence; empty where none did."""
        failed = self.failed + self.grader_failed
        return f"; {failed} of {self.started} episodes failed, the first with: {self.first_failure}" if failed else ""

    def graded(self, episodes: Sequence[Trajectory]) -> None:
        """Take the episodes of a group that can be trained on."""
        self.lengths += [t.response_length for t in episodes if t.error is None]
        self.rewards += [t.reward for t in episodes if t.error is None]

    def ungraded(self, errors: Sequence[str]) -> None:
        """Take the episodes of a group that could not be graded: why not."""
        self.grader_failed += len(errors)
        if errors:
            self.errors.setdefault("grader", errors[0])


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of several coroutines, in order. When it raises or is cancelled, all of them have ended."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Group:
    """``n`` episodes of one prompt, which can be interrupted and played on.

    Args:
        seed: of which each episode gets its own; None: turns are sampled from the engine's stream.
        by: (number of an episode, its sampler) -> what samples it in place of that.
    """

    def __init__(
        self,
        prompt: Prompt,
        n: int,
        env: EpisodeContext,
        sampling: Sampling,
        *,
        seed: int | None = None,
        by: Callable[[int, Generator], Generator] | None = None,
    ) -> None:
        self.prompt, self.env, self.sampling = prompt, env, sampling
        self._seed, self._by = seed, by
        ids, images = env.opened(prompt)
        self._opened = np.asarray(ids, np.int32), images  # of a list each episode would make its own array
        self._episodes: list[Episode | AgentEpisode | Trajectory] = [self._new(i) for i in range(n)]

    def _new(self, i: int) -> Episode | AgentEpisode:
        seed = None if self._seed is None else seed_of(self._seed, i)
        if self.env.agents is not None:
            return AgentEpisode(self.prompt, self.env, self.env.agents, self.sampling, self._opened[0], seed=seed)
        return Episode(self.prompt, self.env, self.sampling, opened=self._opened, seed=seed)

    @property
    def trajectories(self) -> list[Trajectory]:
        """Return the trajectories of the episodes that have ended, in order."""
        return [episode for episode in self._episodes if isinstance(episode, Trajectory)]

    @property
    def states(self) -> list[EpisodeState]:
        """Return the states of the episodes that have not ended."""
        return [episode.state for _, episode in self._unfinished()]

    def so_far(self) -> list[tuple[int, bool, Trajectory]]:
        """Return the episodes that ``go_on`` can continue in another process: which it is, and whether it has ended."""
        if self.env.agents is not None:  # an agent's program begins anew, and an episode has its branches
            return []
        found: list[tuple[int, bool, Trajectory]] = []
        for i, episode in enumerate(self._episodes):
            if isinstance(episode, Trajectory):  # a copy: grading changes it
                found.append((i, True, replace(episode, reward_parts=dict(episode.reward_parts))))
            elif (so_far := episode.so_far()) is not None:
                found.append((i, False, so_far))
        return found

    def go_on(self, so_far: Iterable[tuple[int, bool, Trajectory]]) -> None:
        """Continue episodes where another play of the prompt stood; the others begin."""
        for i, ended, trajectory in so_far:
            episode = self._episodes[i]
            trajectory.prompt = replace(self.prompt, messages=trajectory.prompt.messages)
            if ended:
                self._episodes[i] = trajectory
            elif isinstance(episode, Episode):
                episode.go_on(trajectory)

    async def play(self, pool: SamplerPool) -> list[Trajectory]:
        """Play all episodes to their end. A group whose ``play`` was cancelled is to be paused or released."""
        try:
            await together(self._play(i, episode, pool) for i, episode in self._unfinished())
        except Exception:  # no failure of an episode: those are in its trajectory
            await self.release()
            raise
        return self.trajectories

    def _unfinished(self) -> list[tuple[int, Episode | AgentEpisode]]:
        return [(i, episode) for i, episode in enumerate(self._episodes) if not isinstance(episode, Trajectory)]

    async def _play(self, i: int, episode: Episode | AgentEpisode, pool: SamplerPool) -> None:
        with pool.session() as sampler:
            self._episodes[i] = await episode.play(sampler if self._by is None else self._by(i, sampler))

    async def pause(self) -> list[int]:
        """Keep the partial rollouts of a cancelled ``play``; an episode amid a tool call begins anew.

        Returns the response tokens of each episode that had not ended."""
        lengths = []
        for i, episode in self._unfinished():
            lengths.append(episode.response_length)
            if not episode.resumable:
                await episode.release()
                self._episodes[i] = self._new(i)
        return lengths

    async def release(self) -> list[int]:
        """Give up what has not ended; returns its response tokens as ``pause`` does."""
        unfinished = [episode for _, episode in self._unfinished()]
        for episode in unfinished:
            await episode.release()
        return [episode.response_length for episode in unfinished]


class TrajectorySource:
    """Plays episodes of prompts on a pool of samplers, and grades them. Without a ``rewarder`` it only plays.

    Args:
        seed: of the run, where ``sample`` is to give each episode its own; None: engines sample from their streams.
    """

    def __init__(
        self, pool: SamplerPool, env: EpisodeContext, rewarder: Rewarder | None = None, *, seed: int | None = None
    ) -> None:
        self.pool = pool
        self.env = env
        self.rewarder = rewarder
        self.seed = seed
        self.stats = RolloutStats()
        self._playing: list[Group] = []
        self._grading = 0

    def in_flight(self) -> dict[str, int]:
        """Return state -> number of episodes that are in it. Safe to ask from another thread."""
        states = [state for group in list(self._playing) for state in group.states]
        return in_flight(states) | {"grading": self._grading}

    async def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling = ON_POLICY,
        *,
        played: Callable[[int], None] | None = None,
        seed: int | None = None,
        drawn: int | None = None,
    ) -> list[list[Trajectory]]:
        """Return ``n`` graded episodes of each prompt, in prompt order. Failed episodes are among them, with ``error``
        set.

        Args:
            played: called with 1 whenever a group is complete.
            seed: in place of the source's.
            drawn: how many prompts were drawn before these, where one may come again: it then has other seeds.
        """
        stats = self.stats = RolloutStats()
        seed = self.seed if seed is None else seed
        numbers = [() if drawn is None else (drawn + place,) for place in range(len(prompts))]
        parts = [(prompt.index, *number) for prompt, number in zip(prompts, numbers, strict=True)]
        seeds = [None if seed is None else seed_of(seed, *part) for part in parts]
        groups = [Group(p, n, self.env, sampling, seed=seed) for p, seed in zip(prompts, seeds, strict=True)]

        async def play(group: Group) -> list[Trajectory]:
            episodes = await self.play(group, stats)
            if played is not None:
                played(1)
            return episodes

        try:
            return await together(play(group) for group in groups)
        finally:
            for group in groups:
                await group.release()

    async def play(
        self, group: Group, stats: RolloutStats, ended: Callable[[Sequence[Trajectory]], Awaitable[None]] | None = None
    ) -> list[Trajectory]:
        """Play and return the graded episodes of one group, and count them in ``stats`` after ``ended``."""
        self._playing.append(group)
        try:
            episodes = await group.play(self.pool)
        finally:
            self._playing.remove(group)
        counted = RolloutStats()
        counted.count(episodes)
        if self.rewarder is not None:
            self._grading += len(episodes)
            try:
                ungraded = await self.rewarder.reward([t for t in episodes if t.error is None])
            finally:
                self._grading -= len(episodes)
            counted.ungraded(ungraded)
            counted.graded(episodes)
        if ended is not None:
            await ended(episodes)
        stats.add(counted)
        return episodes
