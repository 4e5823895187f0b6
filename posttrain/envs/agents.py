"""The Agent protocol, and agents that are programs of their own."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import os
import shlex
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from posttrain.core.child_process import kill_descendants
from posttrain.core.errors import CodeError, ConfigError, RunError
from posttrain.core.plugins import definition_of, number_of, with_place
from posttrain.core.registry import Registry, load_object
from posttrain.core.types import Message

_SHOWN = 500
"""Characters of a program's last words in the reason of a failure."""
_SHORT = 100 << 10
"""Longest task that is also given as an environment variable: Linux allows one of 128 KiB."""
_LAST_WORDS_S = 1.0
"""Longest wait for the last words of a program that has ended: what it left in another session may hold its stderr."""


@dataclass(frozen=True)
class AgentTask:
    """What an agent gets: its task, and where it samples."""

    messages: list[Message]
    ground_truth: Any
    extra_info: dict[str, Any]
    index: int
    """Row of the data."""
    seed: int
    """A number in [0, 2^31); the same for all episodes of one task."""
    url: str
    """Base URL of the session, for Anthropic's clients."""
    api_key: str
    """The session's token, for clients that want a key; the URL has it too."""

    @property
    def openai_url(self) -> str:
        """Return the base URL for OpenAI's clients."""
        return f"{self.url}/v1"

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables by which clients and programs find the session, and a task that is short."""
        return {
            "OPENAI_BASE_URL": self.openai_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.api_key,
            "POSTTRAIN_SESSION_URL": self.url,
            **({"POSTTRAIN_TASK": self.text} if len(self.text) <= _SHORT else {}),
        }

    @cached_property
    def text(self) -> str:
        """Return the task as JSON, in ASCII."""
        task = {"messages": self.messages, "ground_truth": self.ground_truth, "index": self.index, "seed": self.seed}
        return json.dumps(task | {"extra_info": self.extra_info}, default=str)


class Agent(Protocol):
    """Plays one episode. An ``async def`` is one."""

    async def __call__(self, task: AgentTask) -> float | None:
        """Play, and return the reward; None: it was posted to the session, or a grader is asked."""
        ...


OpenAgent = Callable[[], Agent | None]
"""Makes an agent in any process: it can be pickled."""

AGENTS: Registry[Agent] = Registry("agent")
"""Agents that plugins register, by name."""


def open_agent(name: str, command: str) -> Agent:
    """Return the agent of `rollout.agent`, or the program of `rollout.agent_command`. Raises ``ConfigError``."""
    if command:
        return Program(command)
    agent = load_object(name, what="rollout.agent") if ":" in name else AGENTS.get(name)
    called = agent if inspect.isroutine(agent) else getattr(agent, "__call__", None)  # noqa: B004
    if inspect.isclass(agent) or not inspect.iscoroutinefunction(called):
        raise CodeError(
            with_place(f"agent {name!r} is no `async def`", definition_of(agent)),
            hint="write `async def agent(task: AgentTask) -> float | None`; blocking code goes into asyncio.to_thread",
        )
    return agent


def reward_of(value: Any, agent: Agent) -> float | None:
    """Return what an agent gave as its reward. Raises ``CodeError`` for what is no finite number."""
    if value is None:
        return None
    number = number_of(value)
    if number is not None and math.isfinite(number):
        return number
    raise CodeError(
        with_place(f"the agent returned {str(value)[:80]!r}", definition_of(agent)),
        hint="return a finite number, or None",
    )


class Program:
    """An agent that is a program, started for each episode. It finds its session in environment variables
    (``AgentTask.variables``) and its task in the file that ``POSTTRAIN_TASK_FILE`` names, which lasts as long as it
    does, and posts its reward.

    Raises:
        ConfigError: there is no such program.
    """

    def __init__(self, command: str) -> None:
        try:
            self.words = shlex.split(command)
        except ValueError as error:
            raise ConfigError(
                f"rollout.agent_command = {command!r}: {error}", hint="quote it as a shell does"
            ) from error
        if not self.words or shutil.which(self.words[0]) is None:
            raise ConfigError(f"rollout.agent_command: there is no program {self.words[:1]}", hint="give its path")

    async def __call__(self, task: AgentTask) -> None:
        """Run the program to its end. Its process group ends with it, and where this coroutine is cancelled also what
        its living processes have started in sessions of their own; a program that ends by itself may leave such behind.
        Raises ``RunError`` where it fails."""
        with tempfile.NamedTemporaryFile("w", prefix="posttrain-task-", suffix=".json") as file:
            file.write(task.text)
            file.flush()
            await self._play({**os.environ, **task.variables, "POSTTRAIN_TASK_FILE": file.name})

    async def _play(self, environment: Mapping[str, str]) -> None:
        ours, theirs = os.pipe()  # with a pipe of asyncio's own, waiting for a process may wait for all that hold it
        loop = asyncio.get_running_loop()
        try:
            transport, stderr = await loop.connect_read_pipe(_LastWords, os.fdopen(ours, "rb", buffering=0))
        except BaseException:  # cancelled: nobody would close it
            os.close(theirs)
            raise
        try:
            code = await self._run(environment, theirs)
            if code:
                await asyncio.wait([stderr.ended], timeout=_LAST_WORDS_S)
        finally:
            transport.close()
        if code:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            said = stderr.last.decode(errors="replace").strip()[-_SHOWN:]
            raise RunError(f"the agent's program ended with {how}" + (f": {said}" if said else ""))

    async def _run(self, environment: Mapping[str, str], stderr: int) -> int:
        """Return the exit code of the program, when it and its group have ended. Closes ``stderr``."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self.words,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        finally:
            os.close(stderr)
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                kill_descendants(process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


class _LastWords(asyncio.Protocol):
    """Keeps the end of what comes through a pipe."""

    def __init__(self) -> None:
        self.last = b""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.last = (self.last + data)[-4 * _SHOWN :]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
