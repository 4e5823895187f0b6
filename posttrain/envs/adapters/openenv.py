"""Environments of OpenEnv, which are served: ``openenv:http://127.0.0.1:8000``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import httpx

from posttrain.core.errors import ConfigError, RunError
from posttrain.core.types import Message, Prompt
from posttrain.envs.base import Environment, Split, Step, asked, seeded_tasks

_CONNECT_S = 30.0
_MOST_BYTES = 64 << 20


class OpenEnvEnvironment(Environment):
    """An environment of OpenEnv: one session of its server, over the websocket.

    Args:
        url: the server's.
        action: the field of an action that the model's text fills, for a number the last one in it; empty: the only
            field that is required. Where there are several, the model writes the action as a JSON object.
        observation: the field that the model reads; empty: all of them, as JSON where there are several.
        instructions: the text that the model reads first; empty: how to answer.
        count: number of tasks, which differ by their seeds.

    Raises:
        ConfigError: no server answers, or its actions have no such field.
    """

    def __init__(
        self, url: str, *, action: str = "", observation: str = "", instructions: str = "", count: int = 256
    ) -> None:
        if find_spec("websockets") is None:
            raise ConfigError("websockets is not installed", hint="pip install 'posttrain[openenv]'")
        self.url, self.observation, self.count = url.rstrip("/"), observation, count
        schema = _schema_of(self.url)
        fields = {key: field for key, field in schema["properties"].items() if key != "metadata"}
        required = [key for key in schema.get("required", ()) if key in fields]
        self.field = action or (required[0] if len(required) == 1 else "")
        if self.field not in ("", *fields):
            raise ConfigError(f"{self.url}: actions have no field {action!r}", hint=f"they have: {', '.join(fields)}")
        self.numbers = bool(self.field) and fields[self.field].get("type") in ("integer", "number")
        self.how = "Answer with a number." if self.numbers else f"Answer with a JSON object of {json.dumps(fields)}."
        self.instructions = instructions or ("Play." if self.field and not self.numbers else self.how)
        self.socket: Any = None

    def tasks(self, split: Split) -> Sequence[Prompt]:
        return seeded_tasks(split, self.count, self.instructions, self.url)

    async def reset(self, task: Prompt, seed: int) -> list[Message]:
        client: Any = import_module("websockets.asyncio.client")
        try:
            self.socket = await client.connect(
                f"ws{self.url.removeprefix('http')}/ws", open_timeout=_CONNECT_S, max_size=_MOST_BYTES, proxy=None
            )
        except (OSError, TimeoutError) as error:
            raise RunError(f"the OpenEnv server at {self.url} cannot be reached: {error}") from error
        answer = await self._say("reset", {"seed": seed, **(task.extra_info.get("reset") or {})})
        return asked(task.messages, self._shown(answer))

    async def step(self, message: Message) -> Step:
        action = self._action(message["content"])
        answer = None if action is None else await self._say("step", action)
        if answer is None:
            return Step([{"role": "user", "content": self.how}])
        over = bool(answer["done"])
        return Step([] if over else asked([], self._shown(answer)), float(answer["reward"] or 0.0), over)

    async def close(self) -> None:
        if self.socket is not None:
            await self.socket.close()

    def _action(self, text: str) -> dict[str, Any] | None:
        """Return the action that a turn has, or None."""
        if self.numbers:
            numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
            number = float(numbers[-1]) if numbers else math.inf
            return {self.field: number} if math.isfinite(number) else None  # JSON has no infinity
        if self.field:
            return {self.field: text}
        try:
            action = json.loads(text[text.index("{") : text.rindex("}") + 1])
        except ValueError:
            return None
        return action if isinstance(action, dict) else None

    async def _say(self, kind: str, data: dict[str, Any]) -> dict[str, Any] | None:
        """Send a message, and return `observation`, `reward` and `done`; None: the server takes no such action."""
        await self.socket.send(json.dumps({"type": kind, "data": data}))
        answer: dict[str, Any] = json.loads(await self.socket.recv())["data"]
        if "observation" in answer:
            return answer
        if kind == "step" and answer.get("code") == "VALIDATION_ERROR":
            return None
        raise RunError(f"the OpenEnv server at {self.url}: {answer.get('message')} ({answer.get('code')})")

    def _shown(self, answer: dict[str, Any] | None) -> str:
        assert answer is not None
        seen = {key: v for key, v in answer["observation"].items() if key not in ("done", "reward", "metadata")}
        if self.observation:
            if self.observation not in seen:
                raise RunError(f"{self.url}: observations have no field {self.observation!r}, only {', '.join(seen)}")
            value = seen[self.observation]
        else:
            value = next(iter(seen.values())) if len(seen) == 1 else seen
        return value if isinstance(value, str) else json.dumps(value)


@cache
def _schema_of(url: str) -> dict[str, Any]:
    """Return the JSON schema of a server's actions. Raises ``ConfigError``."""
    try:
        schema: dict[str, Any] = httpx.get(f"{url}/schema", timeout=_CONNECT_S).raise_for_status().json()["action"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
        raise ConfigError(
            f"no OpenEnv server answers at {url}: {error}", hint="start it, and name it: openenv:http://127.0.0.1:8000"
        ) from error
    return schema
