"""Environments of Gymnasium whose actions are texts or numbers: ``gymnasium:FrozenLake-v1``."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from posttrain.core.errors import ConfigError
from posttrain.core.types import Message, Prompt
from posttrain.core.user_calls import in_thread
from posttrain.envs.base import Environment, Split, Step, asked, seeded_tasks


class GymnasiumEnvironment(Environment):
    """An environment of Gymnasium. The model reads what it renders as text, or else its observation; the action is the
    model's text, or the last whole number in it.

    Args:
        name: the environment's id.
        options: further arguments of ``gymnasium.make``.
        instructions: the text that the model reads first; empty: what actions there are.
        count: number of tasks, which differ by their seeds.

    Raises:
        ConfigError: Gymnasium is not installed, has no such environment, or its actions are of another kind.
    """

    def __init__(
        self, name: str, *, options: dict[str, Any] | None = None, instructions: str = "", count: int = 256
    ) -> None:
        if find_spec("gymnasium") is None:
            raise ConfigError(
                "gymnasium is not installed", hint="pip install 'posttrain[gymnasium]'; for games its extra toy-text"
            )
        gymnasium: Any = import_module("gymnasium")
        self.name, self.count = name, count
        try:
            self.world: Any = gymnasium.make(name, **(options or {}))
        except (gymnasium.error.Error, TypeError) as error:
            raise ConfigError(f"gymnasium.make({name!r}): {error}", hint="rollout.env_options.options") from error
        space = self.world.action_space
        self.numbers = isinstance(space, gymnasium.spaces.Discrete)
        if not self.numbers and not isinstance(space, gymnasium.spaces.Text):
            raise ConfigError(
                f"gymnasium: {name} has actions of {type(space).__name__}", hint="texts and numbers can be written"
            )
        if self.numbers:
            self.first, self.last = int(space.start), int(space.start + space.n) - 1
            self.how = f"Answer with a number from {self.first} to {self.last}."
        self.instructions = instructions or (self.how if self.numbers else "Play.")

    def tasks(self, split: Split) -> Sequence[Prompt]:
        return seeded_tasks(split, self.count, self.instructions, self.name)

    async def reset(self, task: Prompt, seed: int) -> list[Message]:
        observation, _ = await in_thread(self.world.reset, seed=seed)
        return asked(task.messages, self._shown(observation))

    async def step(self, message: Message) -> Step:
        action: Any = message["content"].strip()
        if self.numbers:
            written = re.findall(r"(?<!\d)-?\d{1,18}(?!\d)", action)  # of more than 4,300 digits Python makes no int
            numbers = [int(n) for n in written if self.first <= int(n) <= self.last]
            if not numbers:
                return Step([{"role": "user", "content": self.how}])
            action = numbers[-1]
        observation, reward, terminated, truncated, _ = await in_thread(self.world.step, action)
        over = bool(terminated or truncated)
        return Step([] if over else asked([], self._shown(observation)), float(reward), over)

    def _shown(self, observation: Any) -> str:
        if self.world.render_mode == "ansi":
            shown = re.sub(r"\x1b\[[0-9;]+m(.)\x1b\[0m", r"[\1]", str(self.world.render()))  # where the player is
            return re.sub(r"\x1b\[[0-9;]*m", "", shown).strip()
        with np.printoptions(threshold=sys.maxsize):  # of more than 1,000 numbers it would show the corners
            return str(observation)

    async def close(self) -> None:
        self.world.close()
