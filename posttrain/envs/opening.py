"""From a name to an environment: a registered one, ``FILE.py:NAME``, or ``ADAPTER:NAME`` of another package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from posttrain.core.errors import CodeError, ConfigError
from posttrain.core.plugins import definition_of, user_code, with_place
from posttrain.core.registry import Registry, load_object
from posttrain.core.types import Prompt, ToolSchema
from posttrain.envs.agents import Agent
from posttrain.envs.base import ENVIRONMENTS, Environment, Split, checked_tasks
from posttrain.tools.base import shown_name, with_parameters
from posttrain.tools.options import check_options

ADAPTERS: Registry[Callable[..., Environment]] = Registry(
    "adapter of environments",
    {
        "gymnasium": "posttrain.envs.adapters.gymnasium:GymnasiumEnvironment",
        "openenv": "posttrain.envs.adapters.openenv:OpenEnvEnvironment",
        "skyrl": "posttrain.envs.adapters.skyrl:SkyRLEnvironment",
    },
)
"""Adapters by the word before the colon; each is called with the word behind it and the options."""
AGENT_ADAPTERS: Registry[Callable[[str, Mapping[str, Any]], Agent]] = Registry(
    "adapter of environments", {"verifiers": "posttrain.envs.adapters.verifiers:VerifiersAgent"}
)
"""Adapters of environments that ask for the model's turns by themselves: each makes an agent."""
_MEMBERS = ("tools", "tasks", "reset", "step", "close")


@dataclass(frozen=True)
class World:
    """What makes the environments of a run's episodes, one for each."""

    name: str
    """How messages call it: ``environment 'guess'``."""
    make: Callable[[], Environment]
    """Returns a new environment. Raises ``CodeError`` where its constructor does."""
    tools: tuple[ToolSchema, ...]

    def tasks(self, split: Split) -> list[Prompt]:
        """Return the environment's own tasks. Raises ``CodeError``."""
        environment = self.make()
        with user_code(f"{self.name} failed in tasks", environment.tasks):
            found = list(environment.tasks(split))
        return checked_tasks(found, self.name, environment.tasks)


def open_environment_agent(name: str, options: Mapping[str, Any]) -> Agent | None:
    """Return the agent that plays `rollout.env`, if that environment asks for the model's turns by itself; None: it is
    one for ``open_world``.

    Raises:
        ConfigError: it or an option is unknown. As ``CodeError``: it cannot be made.
    """
    adapter, _, rest = name.partition(":")
    return AGENT_ADAPTERS.get(adapter)(rest, options) if adapter in AGENT_ADAPTERS else None


def open_world(name: str, options: Mapping[str, Any]) -> World:
    """Return the environment of `rollout.env`.

    Raises:
        ConfigError: it or an option is unknown. As ``CodeError``: it cannot be made, or is no environment.
    """
    where = f"environment {name!r}"
    kind = _factory(name)
    with user_code(f"{where} cannot be made", kind):
        checked = check_options(kind, options, "rollout.env_options")

    def make() -> Environment:
        with user_code(f"{where} cannot be made", kind):
            environment: Environment = kind(**checked)
            return environment

    probe = make()
    if missing := [member for member in _MEMBERS if not hasattr(probe, member)]:
        raise CodeError(
            with_place(f"{where}: {type(probe).__name__} is no environment, it has no {missing[0]!r}", _place(probe)),
            hint="derive from posttrain.envs.Environment, and write step",
        )
    return World(where, make, _tools(probe, where))


def _factory(name: str) -> Callable[..., Any]:
    adapter, colon, rest = name.partition(":")
    if colon and adapter in ADAPTERS:
        return partial(ADAPTERS.get(adapter), rest)
    if colon:
        found = load_object(name, what="rollout.env")
        if not callable(found):
            raise ConfigError(
                f"rollout.env = {name!r} is {type(found).__name__}, not a class of environments",
                hint="name a class, or a function that makes an environment",
            )
        return found  # type: ignore[no-any-return]
    return ENVIRONMENTS.get(name)


def _tools(probe: Environment, where: str) -> tuple[ToolSchema, ...]:
    tools = probe.tools
    if isinstance(tools, Sequence) and None not in map(shown_name, tools):
        return tuple(map(with_parameters, tools))
    raise CodeError(
        with_place(f"{where}: its tools are no list of OpenAI function schemas", _place(probe)),
        hint="posttrain.tools.function_schema makes one of a function",
    )


def _place(probe: Environment) -> Any:
    return definition_of(type(probe))
