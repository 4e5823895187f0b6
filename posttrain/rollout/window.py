"""Episodes of many prompts, a bounded number at once, without a wait for the slowest.

A prompt's group leaves as soon as its last episode ends, and each episode's place is taken at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from posttrain.core.types import Prompt, Sampling, Trajectory
from posttrain.rollout.agents import AgentEpisode
from posttrain.rollout.context import EpisodeContext, Opened
from posttrain.rollout.episode import Episode, in_flight
from posttrain.rollout.pool import SamplerPool
from posttrain.rollout.seeds import seed_of


@dataclass
class _Group:
    """A prompt whose episodes are played."""

    prompt: Prompt
    ended: list[Trajectory | None]
    left: int


class Window:
    """Plays ``n`` episodes of each prompt. A context manager: what is left when it ends is cancelled and released.

    Args:
        prompts: taken one by one, while fewer than ``most`` episodes are played.
        most: episodes at once; prompts come in while there are fewer.
        seed: of the run, from which each episode gets its own (``seed_of``).
    """

    def __init__(
        self,
        pool: SamplerPool,
        env: EpisodeContext,
        sampling: Sampling,
        prompts: Iterator[Prompt],
        *,
        n: int,
        most: int,
        seed: int,
    ) -> None:
        self._pool, self._env, self._sampling, self._prompts = pool, env, sampling, prompts
        self._n, self._most, self._seed = n, most, seed
        self._playing: dict[asyncio.Task[Trajectory], tuple[_Group, int, Episode | AgentEpisode]] = {}
        self._ended: deque[asyncio.Task[Trajectory]] = deque()
        self._news = asyncio.Event()
        self._drained = False

    def in_flight(self) -> dict[str, int]:
        """Return state -> number of episodes that are in it. Safe to ask from another thread."""
        return in_flight([episode.state for _, _, episode in list(self._playing.values())])

    @property
    def over(self) -> bool:
        """Return true if every group of every prompt has been handed out."""
        return self._drained and not self._playing

    async def finished(self, within_s: float) -> list[list[Trajectory]]:
        """Return the groups that have ended since the last call, failed episodes among them; waits for news, but no
        longer than ``within_s`` seconds."""
        self._fill()
        if self._playing and not self._ended:
            try:
                async with asyncio.timeout(within_s):
                    await self._news.wait()
            except TimeoutError:
                return []
        self._news.clear()
        groups = []
        while self._ended:
            task = self._ended.popleft()
            group, number, _ = self._playing.pop(task)
            group.ended[number] = task.result()
            group.left -= 1
            if group.left == 0:
                groups.append([t for t in group.ended if t is not None])
        self._fill()
        return groups

    def _fill(self) -> None:
        while not self._drained and len(self._playing) < self._most:
            prompt = next(self._prompts, None)
            if prompt is None:
                self._drained = True
                return
            group = _Group(prompt, [None] * self._n, self._n)
            opened = self._env.opened(prompt)
            for number in range(self._n):
                episode = self._new(prompt, opened, seed_of(self._seed, prompt.index, number))
                task = asyncio.create_task(self._play(episode))
                self._playing[task] = (group, number, episode)
                task.add_done_callback(self._note)

    def _new(self, prompt: Prompt, opened: Opened, seed: int) -> Episode | AgentEpisode:
        if self._env.agents is not None:
            return AgentEpisode(prompt, self._env, self._env.agents, self._sampling, opened[0], seed=seed)
        return Episode(prompt, self._env, self._sampling, opened=opened, seed=seed)

    async def _play(self, episode: Episode | AgentEpisode) -> Trajectory:
        try:
            with self._pool.session() as sampler:
                return await episode.play(sampler)
        finally:
            await episode.release()

    def _note(self, task: asyncio.Task[Trajectory]) -> None:
        self._ended.append(task)
        self._news.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for task in self._playing:
            task.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)
