"""Agents in processes of their own. The client of a Python agent, the endpoint that it asks and the tokens of its
sessions take more time of a core than all that the run does for an ordinary episode."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from posttrain.config import RolloutConfig
from posttrain.core.child_process import ChildProcess
from posttrain.core.errors import PosttrainError, RunError
from posttrain.core.types import Prompt, Sample, Sampling
from posttrain.envs.agent_child import Abort, Ask, Cancel, Ended, Ping, Play, Pong, Sampled, Started, serve
from posttrain.envs.agents import OpenAgent
from posttrain.envs.play import Played
from posttrain.envs.session import TokenRenderer

if TYPE_CHECKING:
    from posttrain.engines.base import Generator

_START_S = 120.0
"""Longest wait for a process to import the agent."""
_BLOCKED_S = 30.0
"""Longest wait for a process to answer after an episode was cancelled, or should have ended. One that does not is
blocked, and replaced."""
_BLOCKED = "another episode blocked the agent's process, which was replaced"


class AgentProcesses:
    """Plays an agent's episodes over several processes. It is a ``Player``.

    Args:
        open_agent: is called in each process, after the plugins are loaded there.
        processes: how many.
    """

    def __init__(
        self,
        open_agent: OpenAgent,
        processes: int,
        renderer: TokenRenderer,
        cfg: RolloutConfig,
        plugins: Sequence[str] = (),
    ) -> None:
        self._arguments = (open_agent, tuple(plugins), pickle.dumps(renderer), cfg)
        self._processes = processes
        self._children: list[_Child] = []

    async def __call__(self, prompt: Prompt, seed: int, sampling: Sampling, sampler: Generator) -> Played:
        """Play an episode in the process that plays fewest."""
        try:
            return await self._least_busy().play(prompt, seed, sampling, sampler)
        except PosttrainError as error:  # it cannot open the agent, died or was blocked
            return Played([], -1, 0, "error", f"{type(error).__name__}: {error.message}")

    async def __aenter__(self) -> Self:
        self._children = [_Child(*self._arguments) for _ in range(self._processes)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for child in self._children:
            child.end("the run is over")

    def _least_busy(self) -> _Child:
        """Return a process that lives; one that has ended is replaced."""
        for place, child in enumerate(self._children):
            if child.ended:
                self._children[place] = _Child(*self._arguments)
        return min(self._children, key=lambda child: child.load)


@dataclass
class _Episode:
    """An episode that a process plays."""

    sampler: Generator
    played: asyncio.Future[Played]
    requests: dict[int, asyncio.Task[None]] = field(default_factory=dict)


class _Child:
    """The run's side of one process."""

    def __init__(self, open_agent: OpenAgent, plugins: tuple[str, ...], renderer: bytes, cfg: RolloutConfig) -> None:
        self.ended = False
        self._late_s = cfg.episode_deadline_s + _BLOCKED_S
        self._loop = asyncio.get_running_loop()
        self._process = ChildProcess(serve, open_agent, plugins, renderer, cfg, name="agents", daemon=False)
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._playing: dict[int, _Episode] = {}
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._numbers = count()
        self._watches: set[asyncio.Task[None]] = set()
        self._outbox: list[Play | Cancel | Ping | Sampled] = []
        # A process that stands still reads nothing, or stops amid a message: sending and receiving wait.
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="agents")
        threading.Thread(target=self._read, name="agents' messages", daemon=True).start()

    @property
    def load(self) -> int:
        """Return the episodes that it plays."""
        return len(self._playing)

    async def play(self, prompt: Prompt, seed: int, sampling: Sampling, sampler: Generator) -> Played:
        """Play an episode.

        Raises:
            PosttrainError: the process did not start, cannot open the agent, has ended, or is blocked.
        """
        number = next(self._numbers)
        episode = self._playing[number] = _Episode(sampler, self._loop.create_future())
        try:
            await self._wait_started()
            self._send(Play(number, prompt, seed, sampling))
            await asyncio.wait([episode.played], timeout=self._late_s)
            if not episode.played.done():
                self.end(_BLOCKED)
            played = await episode.played
            if played.reason == "deadline":
                self._watch()
            return played
        except asyncio.CancelledError:
            if self._started.done():  # else it was never sent
                self._send(Cancel(number))
                self._watch()
            raise
        finally:
            self._playing.pop(number, None)
            for request in episode.requests.values():
                request.cancel()

    def end(self, reason: str) -> None:
        """Kill the process. Its episodes fail with the reason."""
        if self.ended:
            return
        self.ended = True
        self._process.kill(family=True)  # with its end of the pipe, which ends the thread that reads
        self._sender.shutdown(wait=False, cancel_futures=True)
        waited: list[asyncio.Future[Any]] = [self._started, *(episode.played for episode in self._playing.values())]
        for future in waited:
            if not future.done():
                future.set_exception(RunError(reason))
                future.exception()  # nobody may wait for it
        for ping in self._pings.values():
            ping.cancel()

    async def _wait_started(self) -> None:
        done, _ = await asyncio.wait([self._started], timeout=_START_S)
        if not done:
            self.end(f"an agent's process did not start within {_START_S:g} s")
        self._started.result()

    def _watch(self) -> None:
        """See that the agent's event loop still runs."""
        if self.ended:
            return
        number = next(self._numbers)
        self._pings[number] = seen = self._loop.create_future()
        self._send(Ping(number))

        async def see() -> None:
            if not (await asyncio.wait([seen], timeout=_BLOCKED_S))[0]:
                self.end(_BLOCKED)

        watch = asyncio.create_task(see())
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    def _send(self, message: Play | Cancel | Ping | Sampled) -> None:
        """Send a message, together with those that come in the same turn of the event loop."""
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(message)

    def _flush(self) -> None:
        messages, self._outbox = self._outbox, []

        def send() -> None:
            try:
                self._process.pipe.send(messages)
            except OSError:
                return  # it has ended, which the reader says
            except Exception:  # one of them cannot be pickled
                self._send_each(messages)

        if not self.ended:  # else the episodes have failed already
            self._sender.submit(send)

    def _send_each(self, messages: Sequence[Play | Cancel | Ping | Sampled]) -> None:  # in the sender's thread
        for message in messages:
            try:
                self._process.pipe.send([message])
            except OSError:
                return
            except Exception as error:
                failure = RunError(f"a task cannot be sent to the agent's process: {type(error).__name__}: {error}")
                if isinstance(message, Play):
                    self._loop.call_soon_threadsafe(self._received, Ended(message.number, failure))

    def _read(self) -> None:  # in a thread of its own
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
            while True:
                try:
                    message = self._process.pipe.recv()
                except (EOFError, OSError):
                    self._loop.call_soon_threadsafe(self._lost)
                    break
                except Exception as error:  # nobody sees what a thread raises: episodes would wait for their deadline
                    reason = f"a message of the agent's process cannot be read: {type(error).__name__}: {error}"
                    self._loop.call_soon_threadsafe(self.end, reason)
                    break
                self._loop.call_soon_threadsafe(self._received, message)
        self._process.pipe.close()

    def _lost(self) -> None:
        if not self.ended:
            self.end(f"the agent's process died (exit code {self._process.exit_code()})")

    def _received(self, message: Started | Ended | Pong | Ask | Abort) -> None:
        match message:
            case Started(error):
                _answer(self._started, error)
            case Ended(number, played):
                if (episode := self._playing.get(number)) is not None:
                    _answer(episode.played, played)
            case Pong(number):
                _answer(self._pings.pop(number), None)
            case Ask(number, request):
                if (episode := self._playing.get(number)) is not None:
                    episode.requests[request] = self._loop.create_task(self._sample(episode, message))
            case Abort(number, request):
                episode = self._playing.get(number)
                if episode is not None and (asked := episode.requests.pop(request, None)) is not None:
                    asked.cancel()

    async def _sample(self, episode: _Episode, asked: Ask) -> None:
        answer: Sample | PosttrainError
        try:
            answer = await episode.sampler.generate(asked.ids, asked.params)
        except PosttrainError as error:
            answer = error
        except Exception as error:  # the request must be answered whatever the engine does
            answer = RunError(f"{type(error).__name__}: {error}")
        episode.requests.pop(asked.request, None)
        self._send(Sampled(asked.request, answer))


def _answer(waiting: asyncio.Future[Any], answer: Any) -> None:
    if waiting.done():
        return
    if isinstance(answer, PosttrainError):
        waiting.set_exception(answer)
        waiting.exception()  # nobody may wait for it
    else:
        waiting.set_result(answer)
