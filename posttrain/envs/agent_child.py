"""The process that plays episodes of an agent for the run: its messages, and what it does with them.

It serves sessions of its own and keeps their tokens; the run's process samples for it. The agent has the main thread's
event loop, and the sessions one in another thread, so that an agent which blocks its loop can still be answered.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from posttrain.config import RolloutConfig
from posttrain.core.errors import PosttrainError, RunError
from posttrain.core.plugins import user_code
from posttrain.core.registry import load_plugins
from posttrain.core.types import Ids, Prompt, Sample, Sampling, SamplingParams
from posttrain.data.images import PlacedImage
from posttrain.envs.agents import Agent, AgentTask, OpenAgent, reward_of
from posttrain.envs.play import Played, SessionPlayer

# ------------------------------------------------------------------ from the run's process


@dataclass(frozen=True)
class Play:
    """Play an episode. ``Ended`` answers."""

    number: int
    prompt: Prompt
    seed: int
    sampling: Sampling


@dataclass(frozen=True)
class Cancel:
    """Nobody waits for an episode any more."""

    number: int


@dataclass(frozen=True)
class Ping:
    """``Pong`` answers when the agent's event loop runs."""

    number: int


@dataclass(frozen=True)
class Sampled:
    """The answer to ``Ask``."""

    request: int
    answer: Sample | PosttrainError


# -------------------------------------------------------------------- to the run's process


@dataclass(frozen=True)
class Started:
    """The process plays; with ``error`` it cannot."""

    error: PosttrainError | None = None


@dataclass(frozen=True)
class Ended:
    number: int
    played: Played | PosttrainError


@dataclass(frozen=True)
class Pong:
    number: int


@dataclass(frozen=True)
class Ask:
    """A request of an episode to its sampler."""

    number: int
    request: int
    ids: Any
    """int32 [T]"""
    params: SamplingParams


@dataclass(frozen=True)
class Abort:
    """Nobody waits for a request any more."""

    number: int
    request: int


def serve(
    pipe: Connection, open_agent: OpenAgent, plugins: tuple[str, ...], renderer: bytes, cfg: RolloutConfig
) -> None:
    """Body of a process: plays what it is asked to, until the pipe is closed.

    Args:
        renderer: a pickled ``TokenRenderer``, which may hold what plugins define.
    """
    try:
        load_plugins(plugins)
        agent = open_agent()
    except PosttrainError as error:
        pipe.send(Started(error))
        return
    assert agent is not None
    sys.setswitchinterval(0.0005)  # two event loops in one process: each waits for the other at every system call
    asyncio.run(_agents_loop(pipe, agent, renderer, cfg))


async def _agents_loop(pipe: Connection, agent: Agent, renderer: bytes, cfg: RolloutConfig) -> None:
    """Run what the agent does. Never returns: the process ends with its pipe."""
    agents = asyncio.get_running_loop()

    async def play(task: AgentTask) -> float | None:
        with user_code("the agent failed", agent):
            return reward_of(await agent(task), agent)

    async def play_there(task: AgentTask) -> float | None:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(play(task), agents))

    async def sessions() -> None:
        try:
            async with SessionPlayer(play_there, pickle.loads(renderer), cfg) as player:
                await _Sessions(pipe, player, agents).run()
        except PosttrainError as error:
            pipe.send(Started(error))
        except Exception as error:  # nobody sees what a thread raises: the run's process would wait for its deadline
            pipe.send(Started(RunError(f"the agent's process cannot serve it: {type(error).__name__}: {error}")))

    threading.Thread(target=lambda: asyncio.run(sessions()), name="sessions", daemon=True).start()
    await asyncio.Event().wait()


class _Sessions:
    """Plays the episodes, in the thread of the endpoint."""

    def __init__(self, pipe: Connection, player: SessionPlayer, agents: asyncio.AbstractEventLoop) -> None:
        self._pipe, self._player, self._agents = pipe, player, agents
        self._playing: dict[int, asyncio.Task[Played]] = {}
        self._asked: dict[int, asyncio.Future[Sample]] = {}
        self._requests = count()

    async def run(self) -> None:
        """Answer messages until the process ends."""
        self._loop = asyncio.get_running_loop()
        self._pipe.send(Started())
        threading.Thread(target=self._read, name="messages", daemon=True).start()
        await asyncio.Event().wait()

    def _read(self) -> None:
        while True:
            try:
                messages = self._pipe.recv()
            except EOFError:
                os._exit(0)  # the run's process has ended
            self._loop.call_soon_threadsafe(self._received, messages)

    def _received(self, messages: Sequence[Play | Cancel | Ping | Sampled]) -> None:
        for message in messages:
            match message:
                case Play(number):
                    play = self._play(message)
                    self._playing[number] = asyncio.create_task(play)
                case Cancel(number):
                    if (playing := self._playing.pop(number, None)) is not None:
                        playing.cancel()
                case Ping(number):
                    ran = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._agents)
                    ran.add_done_callback(partial(self._ran, number))
                case Sampled(request, answer):
                    self._sampled(request, answer)

    def _ran(self, number: int, ran: object) -> None:  # in the agent's thread
        self._loop.call_soon_threadsafe(self._send, Pong(number))

    async def _play(self, asked: Play) -> Played:
        played = await self._player(asked.prompt, asked.seed, asked.sampling, _Relay(self, asked.number))
        if self._playing.pop(asked.number, None) is not None:
            self._send(Ended(asked.number, played))
        return played

    def _send(self, message: Ended | Pong | Ask | Abort) -> None:
        self._pipe.send(message)  # the run's process reads always

    async def ask(self, number: int, ids: Ids, params: SamplingParams) -> Sample:
        """Have a request sampled in the run's process. Raises what it raises there."""
        request = next(self._requests)
        answer: asyncio.Future[Sample] = self._loop.create_future()
        self._asked[request] = answer
        self._send(Ask(number, request, np.asarray(ids, np.int32), params))
        try:
            return await answer
        finally:
            if self._asked.pop(request, None) is not None:
                self._send(Abort(number, request))

    def _sampled(self, request: int, answer: Sample | PosttrainError) -> None:
        waiting = self._asked.pop(request, None)
        if waiting is None or waiting.done():
            return
        if isinstance(answer, Sample):
            waiting.set_result(answer)
        else:
            waiting.set_exception(answer)


class _Relay:
    """The sampler of one episode, which is in the run's process."""

    def __init__(self, sessions: _Sessions, number: int) -> None:
        self._sessions, self._number = sessions, number

    async def generate(self, prompt_ids: Ids, params: SamplingParams, images: Sequence[PlacedImage] = ()) -> Sample:
        return await self._sessions.ask(self._number, prompt_ids, params)
