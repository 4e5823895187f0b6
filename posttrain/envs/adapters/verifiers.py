"""Environments of the package verifiers: ``verifiers:NAME``. They ask for the model's turns by themselves, so that each
is an agent at the endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import httpx

from posttrain.core.errors import ConfigError, RunError
from posttrain.core.plugins import user_code
from posttrain.core.types import Prompt
from posttrain.envs.agents import AgentTask
from posttrain.envs.base import Split
from posttrain.tools.options import check_options

_VERSIONS = "verifiers>=0.1.10,<0.3"
_RAISED: ContextVar[list[str]] = ContextVar("raised")
"""What the reward functions of an episode have raised."""
_EMPTY = "EmptyModelResponseError"


class VerifiersAgent:
    """An installed environment of verifiers: single-turn, multi-turn or with tools. Its rubric gives the reward.

    Episodes run in an event loop of their own: reward functions may take long without waiting.

    Args:
        name: the environment's id.
        options: arguments of its ``load_environment``.

    Raises:
        ConfigError: verifiers or the environment is not installed, an option is none of it, or its rewards compare
            the episodes of a group. As ``CodeError``: the environment cannot be loaded.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        if find_spec("verifiers") is None:
            raise ConfigError("verifiers is not installed", hint="pip install 'posttrain[verifiers]'")
        self.package: Any = import_module("verifiers")
        if not hasattr(self.package, "load_environment"):
            raise ConfigError(
                f"verifiers {self.package.__version__} has no load_environment", hint=f"pip install '{_VERSIONS}'"
            )
        module = name.replace("-", "_").split("/")[-1]
        if find_spec(module) is None:
            raise ConfigError(f"environment 'verifiers:{name}': there is no module {module!r}", hint="install it")
        self.name = name
        with user_code(f"environment 'verifiers:{name}' cannot be loaded"), _own_signals():
            factory = import_module(module).load_environment
            checked = check_options(factory, options, "rollout.env_options")
            self.environment: Any = self.package.load_environment(name, **checked)
        rubric = self.environment.rubric
        if any(map(rubric._is_group_func, rubric._get_reward_funcs())):
            raise ConfigError(
                f"environment 'verifiers:{name}' has rewards that compare the episodes of a group",
                hint="give each episode a reward of its own: the advantages compare them",
            )
        logging.getLogger("verifiers.rubrics").addHandler(_HANDLER)
        for handler in logging.getLogger("verifiers").handlers:  # what it prints of episodes is in rollout files
            handler.setLevel(logging.CRITICAL)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=f"verifiers:{name}", daemon=True).start()

    def tasks(self, split: Split) -> Sequence[Prompt]:
        """Return the rows of the environment's data set: its evaluation set, where it has one, to validate on."""
        train = self.environment.get_dataset()
        rows = train if split == "train" else self.environment.get_eval_dataset()
        offset = 0 if split == "train" else len(train)  # other seeds
        return [self._prompt(offset + i, row) for i, row in enumerate(rows)]

    def _prompt(self, index: int, row: dict[str, Any]) -> Prompt:
        asked = row.pop("prompt")
        if isinstance(asked, str):
            raise ConfigError(
                f"environment 'verifiers:{self.name}' continues texts (message_type = 'completion')",
                hint="environments of message_type = 'chat' can be played",
            )
        messages: Any = [{key: value for key, value in message.items() if value is not None} for message in asked]
        return Prompt(index, messages, self.name, row.pop("answer", ""), row)

    async def __call__(self, task: AgentTask) -> float:
        """Play one episode. Raises ``RunError`` where the environment says that it failed, or a reward function."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._play(task), self._loop))

    async def _play(self, task: AgentTask) -> float:
        raised: list[str] = []
        _RAISED.set(raised)
        given = {"example_id": task.index, **task.extra_info}
        given |= {"prompt": task.messages, "answer": task.ground_truth}
        openai: Any = import_module("openai")
        http = openai.DefaultAsyncHttpxClient(verify=False)  # certificates, of no use on loopback, take 20 ms to read
        async with openai.AsyncOpenAI(
            base_url=task.openai_url, api_key=task.api_key, max_retries=0, timeout=None, http_client=http
        ) as client:
            wrap = getattr(self.package, "OpenAIChatCompletionsClient", lambda client: client)  # verifiers 0.1.11 on
            output = await self.environment.run_rollout(given, wrap(client), "policy", {})
        if raised:
            raise RunError(raised[0])
        reward, error = float(output["reward"]), output.get("error")
        if error and _EMPTY not in str(error):  # a turn without words is the model's fault, and has its reward
            # Where the session's turns or tokens are used up, the episode has not failed, and keeps this reward.
            async with httpx.AsyncClient(verify=False) as poster:
                await poster.post(f"{task.url}/reward", json={"reward": reward})
            raise RunError(f"verifiers: {error}")
        return reward


class _Raised(logging.Handler):
    """Takes down what verifiers logs where a reward function raises: it goes on with 0 as that function's reward."""

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        if said.startswith("Error calling") and (raised := _RAISED.get(None)) is not None:
            raised.append(said)


_HANDLER = _Raised()


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the run's handlers of signals: an environment of verifiers takes them when it is made."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
