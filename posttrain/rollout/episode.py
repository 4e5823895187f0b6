"""One episode: the model writes, its tool calls run, a simulated user or an environment answers, until it stops.

The token contract: the prompt is rendered once; each turn appends the ids that were sampled and then the rendered delta
of what answers them. History is never tokenized, rendered or copied again, so a trajectory's tokens are exactly what
the engine saw, and a turn costs the same however many came before.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from posttrain.core.errors import CodeError, PosttrainError
from posttrain.core.plugins import definition_of, expect, number_of, user_code, with_place
from posttrain.core.text import shortened
from posttrain.core.types import ENV_PART, ON_POLICY, Message, Prompt, Sampling, StopReason, Trajectory
from posttrain.core.user_calls import value_of, within
from posttrain.data.chat import decode
from posttrain.data.images import PlacedImage
from posttrain.data.record import Record
from posttrain.envs.base import Step
from posttrain.envs.turns import structured
from posttrain.rollout.context import EpisodeContext, Opened
from posttrain.rollout.interaction import UserTurn
from posttrain.rollout.seeds import seed_of
from posttrain.rollout.tool_calls import Reply, answer_calls
from posttrain.tools.base import Tool
from posttrain.tools.formats import ParsedCall

if TYPE_CHECKING:
    from posttrain.engines.base import Generator
    from posttrain.envs.base import Environment
    from posttrain.envs.opening import World
    from posttrain.rollout.interaction import Interaction

EpisodeState = Literal["pending", "running", "tool_calling", "completed", "failed"]
"""Not begun; the model writes, or is about to; tools or the simulated user are at work; ended; ended with an error."""


def in_flight(states: Sequence[EpisodeState]) -> dict[str, int]:
    """Return the number of episodes in each state, in the words of the panel."""
    return {
        "sampling": states.count("running"),
        "tool": states.count("tool_calling"),
        "waiting": states.count("pending"),
    }


class Episode:
    """One play of a prompt.

    Args:
        opened: ``env.opened(prompt)``, for a caller that plays a prompt several times; None: rendered here.
        seed: of the episode; None: turns are sampled from the engine's stream.
    """

    def __init__(
        self,
        prompt: Prompt,
        env: EpisodeContext,
        sampling: Sampling = ON_POLICY,
        *,
        opened: Opened | None = None,
        seed: int | None = None,
    ) -> None:
        self.prompt, self.env, self.sampling, self.seed = prompt, env, sampling, seed
        self.state: EpisodeState = "pending"
        ids, images = env.opened(prompt) if opened is None else opened
        self.images: tuple[PlacedImage, ...] = tuple(images)
        self.record = Record(ids)
        self.prompt_length = len(self.record)
        self.messages: list[Message] = list(prompt.messages)
        self.turns = self.user_turns = self.tool_calls = 0
        self.seconds = self.tool_seconds = 0.0
        self.reward_parts: dict[str, float] = {}
        self.turn_rewards: list[float] = []
        self.tool_errors: list[str] = []
        self._tool_states: dict[str, Any] = {}
        self._user_state: Any = None
        self._has_user = False
        self._environment: Environment | None = None

    @property
    def response_length(self) -> int:
        """Return the tokens after the prompt, so far."""
        return len(self.record) - self.prompt_length

    @property
    def resumable(self) -> bool:
        """Return true if an episode whose ``play`` was cancelled can be played on: no call of a tool was cut off."""
        return self.state in ("pending", "running")

    async def play(self, sampler: Generator) -> Trajectory:
        """Play to the end, from wherever the episode stands.

        Failures of the engine or a tool end the episode, and are recorded in it. Cancelling leaves it as it stands:
        play it on if it is ``resumable``, or ``release`` it.
        """
        error: str | None = None
        begun = time.perf_counter()
        deadline = asyncio.timeout(self.env.cfg.episode_deadline_s - self.seconds)
        try:
            async with deadline:
                reason = await self._play(sampler)
        except TimeoutError:
            if not deadline.expired():
                raise
            reason = "deadline"
            error = f"episode took longer than {self.env.cfg.episode_deadline_s:g} s (rollout.episode_deadline_s)"
        except PosttrainError as failure:
            reason, error = "error", f"{type(failure).__name__}: {failure.message}"
        finally:
            self.seconds += time.perf_counter() - begun
        failed_tool = await self.release()
        if failed_tool is not None and error is None:
            reason, error = "error", failed_tool
        self.state = "completed" if error is None else "failed"
        return self._trajectory(reason, error)

    def _trajectory(self, reason: StopReason, error: str | None) -> Trajectory:
        columns = self.record.columns()
        return Trajectory(
            prompt=self.prompt,
            tokens=columns["tokens"],
            loss_mask=columns["loss_mask"],
            logprobs=columns["logprobs"],
            weight_version=columns["weight_version"],
            routing=columns["routing"],
            messages=list(self.messages),
            stop_reason=reason,
            turns=self.turns,
            user_turns=self.user_turns,
            tool_calls=self.tool_calls,
            seconds=self.seconds,
            tool_seconds=self.tool_seconds,
            prompt_length=self.prompt_length,
            reward_parts=dict(self.reward_parts),
            turn_rewards=np.array(self.turn_rewards, np.float32),
            error=error,
            tool_errors=list(self.tool_errors),
            tool_images=[image.raw.entry for image in self.images[len(self.prompt.images) :]],
        )

    def so_far(self) -> Trajectory | None:
        """Return an episode that is played as it stands, for ``go_on``; None: it can only begin anew elsewhere."""
        played = self.state == "running" and self.env.stateless and self.response_length > 0
        return self._trajectory("stop", None) if played else None

    def go_on(self, so_far: Trajectory) -> None:
        """Continue, in place of beginning, where another play of the prompt stood."""
        self.state = "running"
        self.record = Record.of({name: getattr(so_far, name) for name in self.record.columns()})
        if so_far.tool_images and self.env.vision is not None:
            sized = [(i.raw, i.grid) for i in self.images] + self.env.vision.sized(so_far.tool_images)
            self.images = self.env.vision.locate(so_far.tokens, sized)
        self.messages = list(so_far.messages)
        self.turns, self.user_turns, self.tool_calls = so_far.turns, so_far.user_turns, so_far.tool_calls
        self.tool_errors = list(so_far.tool_errors)
        self.seconds, self.tool_seconds = so_far.seconds, so_far.tool_seconds
        self.reward_parts = dict(so_far.reward_parts)
        self._tool_states = dict.fromkeys(self.env.tools)

    async def release(self) -> str | None:
        """Take every tool's own reward and release it, whatever happened before. Returns what went wrong, or None."""
        self.state = "tool_calling"
        failures: list[str] = []
        while self._tool_states:
            name = next(iter(self._tool_states))
            state = self._tool_states.pop(name)
            try:
                what = f"tool {name} failed at the end of the episode"
                reward = await within(self.env.cfg.tool_deadline_s, what, _end, self.env.tools[name], state)
                if reward is not None:
                    self.reward_parts[f"tool/{name}"] = reward
            except PosttrainError as error:  # the other tools are released all the same
                failures.append(error.message if error.message.startswith(what) else f"{what}: {error.message}")
        if self._has_user and self.env.interaction is not None:
            self._has_user = False
            try:
                what, release = "the interaction failed in release", self.env.interaction.release
                await within(self.env.cfg.tool_deadline_s, what, release, self._user_state)
            except PosttrainError as error:
                failures.append(error.message)
        if (environment := self._environment) is not None:
            self._environment = None
            try:
                await within(self.env.cfg.tool_deadline_s, self._failed("close"), environment.close)
            except PosttrainError as error:
                failures.append(error.message)
        return failures[0] if failures else None

    # ------------------------------------------------------------------ the state machine

    @property
    def tokens_left(self) -> int:
        return self.env.cfg.max_response_tokens - self.response_length

    async def _play(self, sampler: Generator) -> StopReason:
        """Play assistant turn, tools' or user's turn, assistant turn, ... Returns why it ended."""
        if self.state == "pending":
            if self.env.world is not None:
                self.state = "tool_calling"
                await self._reset(self.env.world)
            if self.prompt_length > self.env.cfg.max_prompt_tokens:
                return "prompt_too_long"
            self.state = "tool_calling"
            begun = time.perf_counter()
            await self._create()
            self.tool_seconds += time.perf_counter() - begun
        while True:
            self.state = "running"
            if (reason := await self._assistant_turn(sampler)) is not None:
                return reason
            self.state = "tool_calling"
            begun = time.perf_counter()
            try:
                answer = await self._answer()
            finally:
                self.tool_seconds += time.perf_counter() - begun
            if isinstance(answer, str):
                return answer
            delta, images = self.env.delta(answer)
            if len(delta) >= self.tokens_left:
                return "length"
            begun_at = len(self.record)
            self.images += tuple(replace(image, start=begun_at + image.start) for image in images)
            self.record.given(delta)

    async def _create(self) -> None:
        deadline = self.env.cfg.episode_deadline_s  # a tool may have to wait until other episodes are done with it
        for name, tool in self.env.tools.items():
            what = f"tool {name} failed in create"
            keep = partial(self._tool_states.__setitem__, name)
            await within(deadline, what, tool.create, self.prompt.copied(), keep=keep)
        if (user := self.env.interaction) is not None:
            what, task = "the interaction failed in create", self.prompt.copied()
            await within(deadline, what, user.create, task, keep=self._keep_user)

    def _keep_user(self, state: Any) -> None:
        self._user_state, self._has_user = state, True

    async def _reset(self, world: World) -> None:
        """Open the episode's environment, and begin with its messages in place of the row's."""
        self._environment = world.make()
        reset, seed = self._environment.reset, seed_of(self.prompt.index)
        task, deadline = self.prompt.copied(), self.env.cfg.episode_deadline_s
        begun = await within(deadline, self._failed("reset"), reset, task, seed)
        self.messages = self._read(begun, "reset", ("system", "user", "assistant", "tool"))
        self.prompt = replace(self.prompt, messages=list(self.messages))
        self.record = Record(self.env.prompt_ids(self.prompt))
        self.prompt_length = len(self.record)
        self.reward_parts[ENV_PART] = 0.0

    def _failed(self, method: str) -> str:
        return f"{self.env.world.name} failed in {method}" if self.env.world else method

    def _named(self, method: str) -> str:
        return f"{self.env.world.name}: {method}" if self.env.world else method

    def _read(self, messages: Any, method: str, roles: Sequence[str]) -> list[Message]:
        """Return messages of the environment, without control tokens. Raises ``CodeError`` for what is none."""
        environment = type(self._environment)
        what = self._named(method)
        for message in expect(messages, list, what, environment):
            known = isinstance(message, dict) and message.get("role") in roles
            if not known or not isinstance(message.get("content"), str):
                place = definition_of(environment)
                raise CodeError(
                    with_place(f"{what} gave a message that cannot be shown: {str(message)[:80]}", place),
                    hint=f"give dicts with a text as content, and a role of {', '.join(roles)}",
                )
        read: list[Message] = [message.copy() for message in messages]
        for message in read:
            message["content"] = self.env.harmless(message["content"])
        return read

    async def _assistant_turn(self, sampler: Generator) -> StopReason | None:
        while True:
            seed = None if self.seed is None else seed_of(self.seed, len(self.record))
            params = self.sampling.params(self.tokens_left, seed)
            sample = await sampler.generate(self.record.ids, params, self.images)
            self.record.sampled(sample)
            if sample.finish_reason != "abort" or self.tokens_left == 0:
                break
        self.turns += 1
        ids = self.record.ids[self.record.turn_begun :].tolist()
        if sample.finish_reason == "stop" and ids and ids[-1] in self.env.stop_token_ids:
            ids = ids[:-1]
        self.messages.append({"role": "assistant", "content": decode(self.env.tokenizer, ids)})
        return None if sample.finish_reason == "stop" else "length"

    async def _answer(self) -> Reply | StopReason:
        """Return what the model reads next, from tools, the simulated user or the environment; or why there is no next
        turn."""
        cfg = self.env.cfg
        if self._environment is not None:
            return await self._environment_turn(self._environment)
        calls: Sequence[ParsedCall] = ()
        if self.env.tools:
            with user_code("the format of calls failed", self.env.parser):
                calls = self.env.parser.parse(self.messages[-1]["content"], self.env.schemas).calls
        last = self.turns >= cfg.max_turns
        if calls:
            return "max_turns" if last else await self._tool_turn(calls)
        if self.env.interaction is None:
            return "stop"
        said = await self._ask_user(self.env.interaction)
        if said.text is None:
            return "stop"
        if last or self.user_turns >= cfg.max_user_turns:
            return "max_turns" if last else "max_user_turns"
        self.user_turns += 1
        reply: Message = {"role": "user", "content": self.env.harmless(said.text)}
        self.messages.append(reply)
        return Reply([reply])

    async def _environment_turn(self, environment: Environment) -> Reply | StopReason:
        cfg = self.env.cfg
        message = structured(
            self.messages[-1]["content"], self.env.parser, self.env.schemas or (), f"call_{self.turns}"
        )
        self.tool_calls += len(message.get("tool_calls", ()))
        what = self._named("step")
        answer = await within(cfg.tool_deadline_s, self._failed("step"), environment.step, message)
        step = expect(answer, Step, what, environment.step)
        self.turn_rewards.append(_finite(step.reward, what))
        self.reward_parts[ENV_PART] = math.fsum(self.turn_rewards)  # rounded once: 0.7, 0.2 and 0.1 are 1
        if step.done:
            return "stop"
        if self.turns >= cfg.max_turns:
            return "max_turns"
        replies = self._read(step.messages, "step", ("user", "tool"))
        if not replies:
            raise CodeError(f"{what} gave no messages, and the episode is not over", hint="give messages, or done=True")
        self.messages += replies
        return Reply(replies)

    async def _ask_user(self, user: Interaction) -> UserTurn:
        what, deadline = "the interaction failed", self.env.cfg.tool_deadline_s
        # Users that a model plays may turn the roles around in place.
        answer = await within(deadline, what, user.respond, self._user_state, deepcopy(self.messages))
        said = expect(answer, UserTurn, f"{what}: respond", user.respond)
        if not isinstance(said.text, str | None):
            message = f"{what}: respond gave {type(said.text).__name__} as the user's text"
            raise CodeError(with_place(message, definition_of(user.respond)), hint="give a text, or None")
        if said.reward is not None:
            self.reward_parts["user"] = _finite(said.reward, f"{what}: respond")
        return said

    async def _tool_turn(self, calls: Sequence[ParsedCall]) -> Reply:
        self.tool_calls += len(calls)
        reply = await answer_calls(calls, self.env, self._tool_states)
        self.tool_errors += reply.errors
        self.messages += reply.messages
        return reply


def _finite(reward: Any, what: str) -> float:
    number = number_of(reward)
    if number is None or not math.isfinite(number):
        message = f"{what} gave a reward of {shortened(str(reward if number is None else number), 80)}"
        raise CodeError(message, hint="a finite number: others of the group depend on it")
    return number


async def _end(tool: Tool, state: Any) -> float | None:
    try:
        reward = await value_of(tool.reward(state))
        return None if reward is None else float(reward)
    finally:
        await value_of(tool.release(state))
