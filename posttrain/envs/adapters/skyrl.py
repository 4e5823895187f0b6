"""Environments of SkyRL-gym: ``skyrl:gsm8k_multi_turn``."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from posttrain.core.errors import ConfigError
from posttrain.core.types import Message, Prompt
from posttrain.core.user_calls import in_thread
from posttrain.envs.base import Environment, Step


class SkyRLEnvironment(Environment):
    """A text environment of SkyRL-gym. It gets the row of the data as its extras: `ground_truth` as
    ``reward_spec["ground_truth"]``, and the fields of `extra_info`.

    Args:
        name: the environment's id.
        env_config: its configuration.
        max_turns: its own limit of turns; none: its default.

    Raises:
        ConfigError: SkyRL-gym is not installed, or has no such environment.
    """

    def __init__(self, name: str, *, env_config: dict[str, Any] | None = None, max_turns: int | None = None) -> None:
        if find_spec("skyrl_gym") is None:
            # Its dependency omegaconf wants another antlr4 than graders of mathematics, and most of it needs none.
            raise ConfigError("skyrl-gym is not installed", hint="pip install --no-deps skyrl-gym")
        self.package: Any = import_module("skyrl_gym")
        registry = import_module("skyrl_gym.envs.registration").registry
        if name not in registry:
            raise ConfigError(f"skyrl-gym has no environment {name!r}", hint=f"it has: {', '.join(sorted(registry))}")
        self.name, self.env_config, self.max_turns = name, env_config or {}, max_turns
        self.world: Any = None

    async def reset(self, task: Prompt, seed: int) -> list[Message]:
        answer = {"method": "rule", "ground_truth": task.ground_truth}
        extras: dict[str, Any] = {**task.extra_info, "extra_info": task.extra_info, "reward_spec": answer}
        if self.max_turns is not None:
            extras["max_turns"] = self.max_turns
        self.world = await in_thread(self.package.make, self.name, env_config=self.env_config, extras=extras)
        messages, _ = await in_thread(self.world.init, task.messages)
        return list(messages)

    async def step(self, message: Message) -> Step:
        said = await in_thread(self.world.step, message["content"])
        return Step(list(said["observations"]), float(said["reward"]), bool(said["done"]))

    async def close(self) -> None:
        if self.world is not None:
            self.world.close()
