"""An assistant's turn as a message with its calls in the OpenAI shape."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.core.plugins import user_code
from posttrain.core.types import Message, ToolSchema
from posttrain.tools.formats import ToolParser


def structured(text: str, parser: ToolParser, tools: Sequence[ToolSchema], name: str) -> Message:
    """Return the message of a turn. A turn with a call that cannot be read has its whole text as content and no calls:
    whoever plays the episode decides what to answer.

    Args:
        text: the sampled turn, without its end-of-turn token.
        name: the beginning of the ids of the calls, which are ``NAME_0``, ``NAME_1`` ...

    Raises:
        CodeError: the parser, which may be a plugin's, raises.
    """
    if not tools:
        return {"role": "assistant", "content": text}
    with user_code("the format of calls failed", parser):
        turn = parser.parse(text, tools)
    if any(call.error is not None for call in turn.calls):
        return {"role": "assistant", "content": text}
    message: Message = {"role": "assistant", "content": turn.content}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [
            {"id": f"{name}_{number}", "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for number, c in enumerate(turn.calls)
        ]
    return message
