"""One episode: the model writes, its tool calls run, their results are appended, until it stops.

The token contract: the prompt is rendered once; each turn appends the ids that were sampled and then the rendered delta
of the tool results. History is never tokenized again, so a trajectory's tokens are exactly what the engine saw.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from posttrain.config import RolloutConfig
from posttrain.data.chat import ChatDeltas, render_prompt
from posttrain.errors import PosttrainError, RunError
from posttrain.tools.base import Tool, ToolResult
from posttrain.tools.formats import ParsedCall, ToolParser
from posttrain.types import Message, Prompt, Sample, SamplingParams, StopReason, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.rollout.base import Sampler


@dataclass(frozen=True)
class Environment:
    """What all episodes of a run share."""

    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: frozenset[int]
    tools: Mapping[str, Tool]
    """By the name that the model calls."""
    parser: ToolParser
    deltas: ChatDeltas
    cfg: RolloutConfig
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Of the chat template, such as ``enable_thinking``; the same as in ``deltas``."""

    @property
    def schemas(self) -> list[dict[str, Any]] | None:
        return [tool.schema for tool in self.tools.values()] or None

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, ending where the assistant starts to write. Raises ``DataError``."""
        return render_prompt(prompt.messages, self.tokenizer, self.schemas, **self.template_kwargs)


@dataclass
class _Record:
    """The growing token columns of an episode."""

    tokens: list[int]
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = len(self.tokens)
        self.mask, self.logprobs, self.versions = [False] * count, [0.0] * count, [-1] * count

    def sampled(self, sample: Sample) -> None:
        count = len(sample.ids)
        self.tokens += sample.ids
        self.mask += [True] * count
        self.logprobs += sample.logprobs
        self.versions += [sample.version] * count

    def given(self, ids: Sequence[int]) -> None:
        self.tokens += ids
        self.mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)


async def run_episode(prompt: Prompt, sampler: Sampler, env: Environment, *, temperature: float) -> Trajectory:
    """Play one episode to its end. Failures of the engine or a tool end the episode, and are recorded in it."""
    started = time.perf_counter()
    record = _Record(env.prompt_ids(prompt))
    episode = _Episode(prompt, sampler, env, record, temperature)
    error: str | None = None
    try:
        async with asyncio.timeout(env.cfg.episode_deadline_s):
            reason = await episode.play()
    except TimeoutError:
        reason = "deadline"
    except PosttrainError as failure:
        reason, error = "error", f"{type(failure).__name__}: {failure.message}"
    finally:
        tool_failure = await episode.release()
    if tool_failure is not None and error is None:
        reason, error = "error", tool_failure
    if reason == "deadline":
        error = f"episode took longer than {env.cfg.episode_deadline_s:g} s (rollout.episode_deadline_s)"
    return Trajectory(
        prompt=prompt,
        tokens=np.asarray(record.tokens, dtype=np.int32),
        loss_mask=np.asarray(record.mask, dtype=np.bool_),
        logprobs=np.asarray(record.logprobs, dtype=np.float32),
        weight_version=np.asarray(record.versions, dtype=np.int32),
        messages=episode.messages,
        stop_reason=reason,
        turns=episode.turns,
        tool_calls=episode.tool_calls,
        seconds=time.perf_counter() - started,
        prompt_length=episode.prompt_length,
        reward_parts=episode.tool_rewards,
        error=error,
    )


class _Episode:
    """The state of one episode while it runs."""

    def __init__(self, prompt: Prompt, sampler: Sampler, env: Environment, record: _Record, temperature: float) -> None:
        self.prompt, self.sampler, self.env, self.record = prompt, sampler, env, record
        self.temperature = temperature
        self.messages: list[Message] = list(prompt.messages)
        self.prompt_length = len(record.tokens)
        self.turns = 0
        self.tool_calls = 0
        self.states: dict[str, Any] = {}
        self.tool_rewards: dict[str, float] = {}

    @property
    def tokens_left(self) -> int:
        return self.env.cfg.max_response_tokens - (len(self.record.tokens) - self.prompt_length)

    async def play(self) -> StopReason:
        """Assistant turn, tool turn, assistant turn, ... Returns why it ended."""
        cfg = self.env.cfg
        if self.prompt_length > cfg.max_prompt_tokens:
            return "prompt_too_long"
        for name, tool in self.env.tools.items():
            try:
                self.states[name] = await tool.create(self.prompt)
            except PosttrainError:
                raise
            except Exception as error:  # a user's code: it costs this episode, not the run
                raise RunError(f"tool {name} failed in create: {type(error).__name__}: {error}") from error
        while True:
            sample = await self.assistant_turn()
            if sample.finish_reason == "length":
                return "length"
            calls = (
                self.env.parser.parse(self.messages[-1]["content"], self.env.schemas).calls if self.env.tools else []
            )
            if not calls:
                return "stop"
            if self.turns >= cfg.max_turns:
                return "max_turns"
            delta = await self.tool_turn(calls)
            if len(delta) >= self.tokens_left:
                return "length"
            self.record.given(delta)

    async def assistant_turn(self) -> Sample:
        params = SamplingParams(self.tokens_left, self.temperature)
        sample = await self.sampler.generate(self.record.tokens, params)
        self.record.sampled(sample)
        self.turns += 1
        ids = sample.ids
        if sample.finish_reason == "stop" and ids and ids[-1] in self.env.stop_token_ids:
            ids = ids[:-1]
        self.messages.append({"role": "assistant", "content": str(self.env.tokenizer.decode(ids))})
        return sample

    async def tool_turn(self, calls: Sequence[ParsedCall]) -> list[int]:
        """Run the calls of one turn side by side; ids of what the model reads next."""
        self.tool_calls += len(calls)
        results = await asyncio.gather(*(self.call(c) for c in calls))
        limit = self.env.cfg.max_tool_response_chars
        replies: list[Message] = [{"role": "tool", "content": _cut_middle(r.text, limit)} for r in results]
        self.messages += replies
        return self.env.deltas.ids(replies)

    async def call(self, call: ParsedCall) -> ToolResult:
        """Run one call. Whatever goes wrong becomes a message that the model can read."""
        if call.error is not None:
            return ToolResult(f"error: {call.error}", error=True)
        tool = self.env.tools.get(call.name)
        if tool is None:
            return ToolResult(f"error: unknown tool {call.name!r}; known: {', '.join(self.env.tools)}", error=True)
        deadline = self.env.cfg.tool_deadline_s
        try:
            async with asyncio.timeout(deadline):
                result = await tool.call(self.states[call.name], call.arguments)
            if not isinstance(result, ToolResult):
                raise TypeError(f"it must return a ToolResult, not {type(result).__name__}")
            return result
        except TimeoutError:
            return ToolResult(f"error: {call.name} did not answer within {deadline:g} s", error=True)
        except Exception as error:
            # A tool is a user's code: its failure is the model's to read, and stays in the trace.
            return ToolResult(f"error: {call.name} failed: {type(error).__name__}: {error}", error=True)

    async def release(self) -> str | None:
        """Every tool's own reward, and its release whatever happened before. Returns what went wrong, or None."""
        failure = None
        for name, state in self.states.items():
            tool = self.env.tools[name]
            try:
                async with asyncio.timeout(self.env.cfg.tool_deadline_s):
                    try:
                        reward = await tool.reward(state)
                    finally:
                        await tool.release(state)
                if reward is not None:
                    self.tool_rewards[f"tool/{name}"] = reward
            except Exception as error:  # a user's code: the other tools are released all the same
                failure = failure or f"tool {name} failed at the end of the episode: {type(error).__name__}: {error}"
        return failure


def _cut_middle(text: str, limit: int) -> str:
    """At most about ``limit`` characters of ``text``, its start and its end."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters cut ...\n{text[-half:]}"
