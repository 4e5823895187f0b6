"""What the episodes of a run share: tools, environment or agent, call format. Checked before any process starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from posttrain.core.errors import ConfigError, DataError
from posttrain.core.plugins import user_code
from posttrain.core.registry import some

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.config import Config
    from posttrain.core.types import ToolSchema
    from posttrain.data.chat import ChatDeltas
    from posttrain.data.vision import VisionProcessor
    from posttrain.envs.agents import Agent
    from posttrain.models.load import ModelSource
    from posttrain.rollout.agents import AgentHost
    from posttrain.rollout.context import EpisodeContext
    from posttrain.rollout.interaction import Interaction
    from posttrain.tools.base import Tool
    from posttrain.tools.formats import ToolParser

_NO_TOOLS = (
    "use a model whose chat template shows tools, or put such a template into its folder as chat_template.jinja; "
    "without tools: --set rollout.tools=[]"
)


_PROBE: ToolSchema = {
    "type": "function",
    "function": {"name": "f", "description": "A tool.", "parameters": {"type": "object", "properties": {}}},
}
"""Stands for the tools of an agent, which are known when it sends them."""


def episode_context(cfg: Config, source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> EpisodeContext:
    """Return the tools, environment, parser and chat deltas of a run's episodes.

    Raises:
        ConfigError: a tool, environment or call format is unknown, the chat template does not show the format, or a
            tool cannot work in this run.
    """
    from posttrain.data.chat import ChatDeltas
    from posttrain.envs.opening import open_world
    from posttrain.models.load import stop_token_ids
    from posttrain.models.processors import load_vision
    from posttrain.rollout.context import EpisodeContext
    from posttrain.sandbox import configure
    from posttrain.tools.sets import open_tools

    vision = None if cfg.generate.endpoint.url else load_vision(source)  # servers are given ids alone
    interaction = _interaction(cfg)
    configure(cfg.sandbox)
    tools = open_tools(cfg.rollout.tools, cfg.tools, cfg.sandbox)
    for tool in tools.values():
        with user_code(f"tool {tool.name!r} failed in check", tool):
            tool.check()
    agent = _agent(cfg)
    world = open_world(cfg.rollout.env, cfg.rollout.env_options) if cfg.rollout.env and agent is None else None
    schemas = [*(tool.schema for tool in tools.values()), *(world.tools if world else ())] or None
    template_kwargs = cfg.data.chat_kwargs
    check_tools_shown(tokenizer, schemas or [], template_kwargs)
    parser = tool_parser(cfg.rollout.tool_format, tokenizer, [_PROBE] if agent is not None else schemas)
    stops = set(stop_token_ids(tokenizer, source))
    if schemas or agent is not None:
        vocabulary = tokenizer.get_vocab()
        stops |= {vocabulary[token] for token in parser.stop_tokens if token in vocabulary}
    deltas = ChatDeltas(tokenizer, schemas, **template_kwargs)
    check_tool_images(tools.values(), deltas, vision)
    return EpisodeContext(
        tokenizer=tokenizer,
        stop_token_ids=frozenset(stops),
        tools=tools,
        parser=parser,
        deltas=deltas,
        cfg=cfg.rollout,
        template_kwargs=template_kwargs,
        interaction=interaction,
        world=world,
        agents=None if agent is None else _host(agent, cfg, tokenizer, parser, frozenset(stops)),
        vision=vision,
    )


def opened_again(env: EpisodeContext, cfg: Config) -> EpisodeContext:
    """Return the context for another event loop, with tools and a simulated user of its own: what they hold, such as
    connections, belongs to the loop that used them, and the tools are closed. Raises ``ConfigError``."""
    from posttrain.tools.sets import open_tools

    tools = open_tools(cfg.rollout.tools, cfg.tools, cfg.sandbox)
    return replace(env, tools=tools, interaction=_interaction(cfg))


def _interaction(cfg: Config) -> Interaction | None:
    from posttrain.rollout.interaction import open_interaction

    rollout = cfg.rollout
    return open_interaction(rollout.interaction, rollout.interaction_options) if rollout.interaction else None


def _agent(cfg: Config) -> Agent | None:
    """Return what plays the episodes, if it samples at an endpoint. Raises ``ConfigError``."""
    agent = _opening(cfg)()
    if agent is None and (unused := cfg.rollout.changed & {"branches", "agent_processes"}):
        raise ConfigError(
            f"rollout.{min(unused)} has no effect without an agent", hint="the run plays other episodes itself"
        )
    if agent is not None and cfg.rollout.record_schedule:
        raise ConfigError(
            "rollout.record_schedule with an agent: such runs cannot be repeated",
            hint=f"an agent plays rollout.env = {cfg.rollout.env!r}",
        )
    return agent


def _opening(cfg: Config) -> Callable[[], Agent | None]:
    """Return what makes the agent, in any process."""
    from posttrain.envs.agents import open_agent
    from posttrain.envs.opening import open_environment_agent

    if cfg.rollout.has_agent:
        return partial(open_agent, cfg.rollout.agent, cfg.rollout.agent_command)
    return partial(open_environment_agent, cfg.rollout.env, cfg.rollout.env_options)


def _host(
    agent: Agent,
    cfg: Config,
    tokenizer: PreTrainedTokenizerBase,
    parser: ToolParser,
    stop_token_ids: frozenset[int],
) -> AgentHost:
    from posttrain.envs.agent_processes import AgentProcesses
    from posttrain.envs.agents import Program
    from posttrain.envs.play import SessionPlayer
    from posttrain.envs.session import TokenRenderer
    from posttrain.rollout.agents import AgentHost

    renderer = TokenRenderer(tokenizer, parser, stop_token_ids, cfg.data.chat_kwargs)
    name = f"environment {cfg.rollout.env!r}" if cfg.rollout.env else "the agent"
    count = 0 if isinstance(agent, Program) else _processes(cfg)
    if count:
        return AgentHost(agent, AgentProcesses(_opening(cfg), count, renderer, cfg.rollout, cfg.plugins), name)
    return AgentHost(agent, SessionPlayer(agent, renderer, cfg.rollout), name)


def _processes(cfg: Config) -> int:
    """Return the number of processes that play an agent's episodes."""
    asked = cfg.rollout.agent_processes
    cores = len(os.sched_getaffinity(0))
    return min(cores * 3 // 4 if cores >= 4 else 0, 16) if asked == "auto" else asked


def check_tools_shown(
    tokenizer: PreTrainedTokenizerBase, schemas: list[ToolSchema], chat_kwargs: Mapping[str, Any]
) -> None:
    """Check that the chat template shows the model its tools. Raises ``ConfigError``."""
    from posttrain.data.template import ChatTemplate, hidden_tools

    if not schemas:
        return
    try:
        user = {"role": "user", "content": "?"}
        hidden = hidden_tools(ChatTemplate(tokenizer, chat_kwargs).text([user], schemas), schemas)
    except DataError as error:
        raise ConfigError(f"rollout.tools: {error.message}", hint=_NO_TOOLS) from error
    if hidden:
        raise ConfigError(
            f"rollout.tools: the chat template does not show {some(hidden)}: the model would not know of it",
            hint=_NO_TOOLS,
        )


def check_tool_images(tools: Iterable[Tool], deltas: ChatDeltas, vision: VisionProcessor | None) -> None:
    """Check that the model reads the images that tools give. Raises ``ConfigError``."""
    giving = [tool.name for tool in tools if getattr(tool, "gives_images", False)]  # a user's need not derive from Tool
    if not giving:
        return
    what = f"rollout.tools: tool {giving[0]!r} gives images, and"
    if vision is None:
        raise ConfigError(f"{what} the model reads text alone", hint="docs/vision.md lists models that see")
    try:
        shown = deltas.shows_images(vision.image_id, giving[0])
    except DataError as error:
        raise ConfigError(f"{what} {error.message}", hint=error.hint) from error
    if not shown:
        raise ConfigError(
            f"{what} the chat template shows none in what tools say",
            hint="put a template into the model's folder, as chat_template.jinja, that shows images of the role tool",
        )


def tool_parser(name: str, tokenizer: PreTrainedTokenizerBase, schemas: list[ToolSchema] | None) -> ToolParser:
    """Return the parser of `rollout.tool_format`; ``auto`` detects the format from the chat template with these tools.

    Raises:
        ConfigError: there is no such format, or the template does not show which one it is.
    """
    from posttrain.tools.formats import PARSERS, detect

    if name != "auto":
        return PARSERS.get(name)
    if not schemas:
        return PARSERS.get("hermes")  # not used: without tools no turn is parsed
    found = detect(str(tokenizer.get_chat_template(None, schemas)))
    if found is None:
        raise ConfigError(
            "the chat template does not tell in which format the model calls tools",
            hint=f"set rollout.tool_format to one of {', '.join(PARSERS.names())}",
        )
    return PARSERS.get(found)
