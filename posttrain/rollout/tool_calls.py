"""The tool calls of one turn: run side by side, and answered with what the model reads."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from posttrain.core.errors import CodeError, PosttrainError
from posttrain.core.plugins import definition_of, described_briefly, expect, with_place
from posttrain.core.types import Message
from posttrain.core.user_calls import LateError, within
from posttrain.data.images import ImageError, SizedImage
from posttrain.data.turns import IMAGE
from posttrain.tools.base import ToolResult, cut
from posttrain.tools.formats import ParsedCall

if TYPE_CHECKING:
    from posttrain.rollout.context import EpisodeContext


@dataclass(frozen=True)
class Reply:
    """What the model reads next."""

    messages: list[Message]
    images: Sequence[SizedImage] = ()
    """Those that the messages name, in that order."""
    errors: Sequence[str] = ()
    """What was answered to each call that failed; the messages have it too."""


async def answer_calls(calls: Sequence[ParsedCall], env: EpisodeContext, states: Mapping[str, Any]) -> Reply:
    """Run the calls of one turn.

    Args:
        states: what each tool created for the episode, by its name.
    """
    most = env.cfg.max_calls_per_turn
    run = calls[:most]
    answers = [await _call(run[0], env, states)] if len(run) == 1 else await asyncio.gather(
        *(_call(call, env, states) for call in run)
    )  # fmt: skip
    over = _Answer(f"error: not run: a turn may have {most} calls", error=True)
    answers = [*answers, *[over] * (len(calls) - len(run))]
    messages: list[Message] = []
    for call, answer in zip(calls, answers, strict=True):
        named: Message = {"role": "tool", "name": call.name, "content": answer.text}
        messages.append(named if call.name in env.tools else {"role": "tool", "content": answer.text})
    images = [image for answer in answers for image in answer.images]
    return Reply(messages, images, [answer.text for answer in answers if answer.error])


@dataclass(frozen=True)
class _Answer:
    """What the model reads of one call."""

    text: str
    images: Sequence[SizedImage] = ()
    error: bool = False


async def _call(call: ParsedCall, env: EpisodeContext, states: Mapping[str, Any]) -> _Answer:
    result = await _result(call, env, states)
    if result.images and not _is_shown(call.name, env):
        result = replace(result, text=result.text.replace(IMAGE, "[image]"), images=())
    text = env.harmless(cut(result.text, env.cfg.max_tool_response_chars, env.cfg.tool_response_cut), result.images)
    if not result.images:
        return _Answer(text, error=result.error)
    if env.vision is None:
        wrong = "it gave an image, and the model reads text alone"
    elif (named := text.count(IMAGE)) != len(result.images):
        wrong = f"its text names {named} images, and it gave {len(result.images)}"
    else:
        try:
            images = await asyncio.to_thread(env.vision.sized, [{"bytes": data} for data in result.images])
            return _Answer(text, images, result.error)
        except ImageError as error:
            wrong = error.message
    return _Answer(env.harmless(f"error: {call.name} failed: {wrong}"), error=True)


def _is_shown(name: str, env: EpisodeContext) -> bool:
    """Return false for an image of a tool that mostly answers in words, as an MCP server's may, where the model cannot
    see it. A tool that ``gives_images`` is refused before the run, if that can be known."""
    if getattr(env.tools[name], "gives_images", False):
        return True
    return env.vision is not None and env.deltas.shows_images(env.vision.image_id)


async def _result(call: ParsedCall, env: EpisodeContext, states: Mapping[str, Any]) -> ToolResult:
    """Run one call. Whatever goes wrong becomes a message that the model can read."""
    if call.error is not None:
        return ToolResult(f"error: {call.error}", error=True)
    tool = env.tools.get(call.name)
    if tool is None:
        return ToolResult(f"error: unknown tool {call.name!r}; known: {', '.join(env.tools)}", error=True)
    try:
        result = await within(env.cfg.tool_deadline_s, call.name, tool.call, states[call.name], call.arguments)
        answer = expect(result, ToolResult, f"{call.name}: call", tool.call)
        if not isinstance(answer.text, str):
            message = f"{call.name}: call gave {type(answer.text).__name__} as the text of its ToolResult"
            raise CodeError(with_place(message, definition_of(tool.call)))
        return answer
    except LateError:
        late = f"did not answer within {env.cfg.tool_deadline_s:g} s"
        return ToolResult(f"error: {call.name} {late}", error=True)
    except PosttrainError as error:
        # A tool is a user's code: its failure is the model's to read, and stays in the rollout files.
        cause = error.__cause__ if isinstance(error, CodeError) else None
        said = error.message if cause is None else described_briefly(cause)
        return ToolResult(f"error: {call.name} failed: {said}", error=True)
