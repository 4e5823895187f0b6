"""Agents in processes of their own: the client of a Python agent takes more time of a core than the endpoint that it
asks."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self, cast

from posttrain.core.child_process import ChildProcess
from posttrain.core.errors import PosttrainError, RunError
from posttrain.core.plugins import user_code
from posttrain.core.registry import load_plugins
from posttrain.envs.agents import Agent, AgentTask, reward_of

_START_S = 120.0
"""Longest wait for a process to import the agent."""
_CANCEL_S = 30.0
"""Longest wait for a process to see that an episode is cancelled. One that does not is blocked, and replaced."""

OpenAgent = Callable[[], Agent | None]
"""Makes the agent in a process; it can be pickled."""


class AgentProcesses:
    """Plays an agent's episodes over several processes. A context manager, and an ``Agent`` itself.

    Args:
        open_agent: is called in each process, after the plugins are loaded there.
        processes: how many.
    """

    def __init__(self, open_agent: OpenAgent, processes: int, plugins: Sequence[str] = ()) -> None:
        self._arguments = (open_agent, tuple(plugins))
        self._processes = processes
        self._players: list[_Player] = []

    async def __call__(self, task: AgentTask) -> float | None:
        """Play an episode in the process that plays fewest.

        Raises:
            PosttrainError: what the agent raised there, as ``CodeError``; or its process died or did not start.
        """
        return await self._least_busy().play(task)

    async def __aenter__(self) -> Self:
        self._players = [_Player(*self._arguments) for _ in range(self._processes)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for player in self._players:
            player.end("the run is over")

    def _least_busy(self) -> _Player:
        """Return a process that lives; one that has ended is replaced."""
        for place, player in enumerate(self._players):
            if player.ended:
                self._players[place] = _Player(*self._arguments)
        return min(self._players, key=lambda player: player.load)


class _Player:
    """The driver's side of one process."""

    def __init__(self, open_agent: OpenAgent, plugins: tuple[str, ...]) -> None:
        self.ended = False
        self._loop = asyncio.get_running_loop()
        self._process = ChildProcess(_serve, open_agent, plugins, name="agents", daemon=False)
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._playing: dict[int, asyncio.Future[float | None]] = {}
        self._numbers = count()
        self._waits: set[asyncio.Task[None]] = set()
        # A process that stands still reads nothing, and sending to it waits.
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="agents")
        self._loop.add_reader(self._process.pipe.fileno(), self._read)

    @property
    def load(self) -> int:
        """Return the episodes that it plays."""
        return len(self._playing)

    async def play(self, task: AgentTask) -> float | None:
        number = next(self._numbers)
        result: asyncio.Future[float | None] = self._loop.create_future()
        self._playing[number] = result
        try:
            await self._wait_started()
            self._send((number, task))
            return await result
        except asyncio.CancelledError:
            self._cancel(number)
            raise

    def end(self, reason: str) -> None:
        """Kill the process. Its episodes fail with the reason."""
        if self.ended:
            return
        self.ended = True
        self._loop.remove_reader(self._process.pipe.fileno())
        self._process.kill(family=True)
        self._sender.shutdown(wait=False, cancel_futures=True)
        self._process.pipe.close()
        waited: list[asyncio.Future[Any]] = [self._started, *self._playing.values()]
        for future in waited:
            if not future.done():
                future.set_exception(RunError(reason))
                future.exception()  # nobody may wait for it
        self._playing.clear()

    async def _wait_started(self) -> None:
        done, _ = await asyncio.wait([self._started], timeout=_START_S)
        if not done:
            self.end(f"an agent's process did not start within {_START_S:g} s")
        self._started.result()

    def _send(self, message: tuple[int, AgentTask | None]) -> None:
        """Send a task, or None to cancel it."""

        def send() -> None:
            try:
                self._process.pipe.send(message)
            except OSError:
                return  # it has ended, which the reader says
            except Exception as error:  # a task that cannot be pickled
                reason = f"a task cannot be sent to the agent's process: {type(error).__name__}: {error}"
                self._loop.call_soon_threadsafe(self._answered, message[0], RunError(reason))

        if not self.ended:  # else the episode has failed already
            self._sender.submit(send)

    def _cancel(self, number: int) -> None:
        """Tell the process that nobody waits for an episode any more, and see that it reads that."""
        if self._playing.pop(number, None) is None or not self._started.done():
            return  # it has ended, or was never sent: the process does not know it
        self._playing[number] = seen = self._loop.create_future()
        self._send((number, None))

        async def see() -> None:
            if not (await asyncio.wait([seen], timeout=_CANCEL_S))[0]:
                self.end("another episode blocked the agent's process, which was replaced")

        wait = asyncio.create_task(see())
        self._waits.add(wait)
        wait.add_done_callback(self._waits.discard)

    def _read(self) -> None:
        try:
            while self._process.pipe.poll():
                self._answered(*self._process.pipe.recv())
        except (EOFError, OSError):
            self.end(f"the agent's process died (exit code {self._process.exit_code()})")

    def _answered(self, number: int | None, answer: float | PosttrainError | None) -> None:
        future: asyncio.Future[Any] | None = self._started if number is None else self._playing.pop(number, None)
        if future is None or future.done():
            return
        if isinstance(answer, PosttrainError):
            future.set_exception(answer)
            future.exception()
        else:
            future.set_result(answer)


def _serve(pipe: Connection, open_agent: OpenAgent, plugins: tuple[str, ...]) -> None:
    """Body of a process: tasks in, rewards out, until the pipe is closed."""
    try:
        load_plugins(plugins)
        agent = open_agent()
    except PosttrainError as error:
        pipe.send((None, error))
        return
    pipe.send((None, None))
    asyncio.run(_play_all(pipe, cast(Agent, agent)))


async def _play_all(pipe: Connection, agent: Agent) -> None:
    loop = asyncio.get_running_loop()
    playing: dict[int, asyncio.Task[float | None]] = {}

    async def play(task: AgentTask) -> float | None:
        with user_code("the agent failed", agent):
            return reward_of(await agent(task), agent)

    def ended(number: int, played: asyncio.Task[float | None]) -> None:
        if played.cancelled() or playing.pop(number, None) is None:
            return
        error = played.exception()
        pipe.send((number, played.result() if error is None else error))

    def received(number: int, task: AgentTask | None) -> None:
        if task is not None:
            playing[number] = asyncio.create_task(play(task))
            playing[number].add_done_callback(partial(ended, number))
        elif (played := playing.pop(number, None)) is not None:
            played.cancel()
            pipe.send((number, None))

    def read() -> None:  # in a thread: an agent that blocks the loop must not block the driver
        while True:
            try:
                message = pipe.recv()
            except EOFError:
                os._exit(0)  # the driver has ended
            loop.call_soon_threadsafe(received, *message)

    threading.Thread(target=read, daemon=True).start()
    await asyncio.Event().wait()
