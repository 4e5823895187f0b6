"""Conversations as others write them, brought into the one shape that chat templates know (OpenAI's).

Read besides OpenAI's messages: ShareGPT turns (``{"from", "value"}``), typed content lists
(``[{"type": "text", ...}, {"type": "image", ...}]``, also with ``reasoning`` and ``tool_call`` parts), null content,
tool calls without the ``function`` envelope, and call arguments as JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from posttrain.core.errors import DataError
from posttrain.core.types import ToolSchema

AnyMessage = Mapping[str, Any]
"""A message in any of the styles that this module reads."""

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bing": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
}
_SHAREGPT_CALLS = ("function_call", "tool_call")
_PLACEHOLDERS = {"image": "image", "image_url": "image", "input_image": "image", "video": "video", "video_url": "video"}
_PLAIN = {"role", "content"}
_THOUGHTS = ("reasoning", "thinking", "reasoning_content")


def normalize_messages(messages: Iterable[AnyMessage]) -> list[dict[str, Any]]:
    """Return new messages in OpenAI's shape: ``role``, ``content`` (text; a list of parts only where it holds images or
    videos, which become placeholders without the picture), ``tool_calls`` with arguments as dicts,
    ``reasoning_content``, and every other key whose value is not null.

    ShareGPT writes the text and the calls of one turn as turns of their own; they are put together again.

    Raises:
        DataError: naming the message, when it is of no style known here.
    """
    normal: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        try:
            turn = _from_sharegpt(message) if "from" in message and not message.get("role") else _from_openai(message)
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise DataError(f"message {i}: {reason}", hint="see docs/data.md for the shapes of messages") from error
        if message.get("from") in _SHAREGPT_CALLS and normal and normal[-1]["role"] == "assistant":
            normal[-1].setdefault("tool_calls", []).extend(turn["tool_calls"])
        else:
            normal.append(turn)
    return normal


def normalize_tools(tools: str | Sequence[Any] | None) -> list[ToolSchema] | None:
    """Return tools as OpenAI function schemas; None where there are none.

    Read are JSON text of a list, lists of JSON texts, and bare functions (``{"name", "parameters"}``), which get their
    envelope. Raises ``DataError`` for anything else.
    """
    try:
        listed = json.loads(tools or "null") if isinstance(tools, str) else tools
        if isinstance(listed, Mapping):
            raise TypeError("one object, not a list of them")
        decoded = [json.loads(tool) if isinstance(tool, str) else tool for tool in listed or ()]
    except (TypeError, ValueError) as error:
        raise DataError(f"the tools are not JSON: {error}", hint="give a list of OpenAI function schemas") from error
    for i, tool in enumerate(decoded):
        if not isinstance(tool, dict) or not ("function" in tool or "name" in tool):
            hint = "give a list of OpenAI function schemas"
            raise DataError(f"tool {i} is no function schema: {str(tool)[:80]}", hint=hint)
    return [t if "function" in t else {"type": "function", "function": t} for t in decoded] or None


def _from_sharegpt(message: AnyMessage) -> dict[str, Any]:
    origin = message["from"]
    if origin not in SHAREGPT_ROLES:
        raise ValueError(f"'from' is {origin!r}; known: {', '.join(SHAREGPT_ROLES)}")
    turn: dict[str, Any] = {"role": SHAREGPT_ROLES[origin]}
    if origin in _SHAREGPT_CALLS:
        turn |= {"content": "", "tool_calls": _calls(message["value"])}
    else:
        turn |= _content(message["value"])
    return turn | {k: v for k, v in message.items() if k not in ("from", "value", "role") and v is not None}


def _from_openai(message: AnyMessage) -> dict[str, Any]:
    if message.keys() == _PLAIN and isinstance(message["role"], str) and isinstance(message["content"], str):
        return {
            "role": message["role"],
            "content": message["content"],
        }  # most are, and agents send them again and again
    if not isinstance(message.get("role"), str):
        raise ValueError("it has no role")
    if message["role"] == "user" and "content" not in message:
        raise ValueError("a user message without `content`")
    turn = {"role": message["role"], "content": ""}
    turn |= {k: v for k, v in message.items() if k not in ("content", "tool_calls") and v is not None}
    calls = _calls(message.get("tool_calls") or [])
    parts = _content(message.get("content"))
    calls += parts.pop("tool_calls", [])
    return turn | parts | ({"tool_calls": calls} if calls else {})


def _content(value: Any) -> dict[str, Any]:
    """Return ``content``, and the ``reasoning_content`` and ``tool_calls`` that a typed list may hold too."""
    if value is None or isinstance(value, str):
        return {"content": value or ""}
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise TypeError(f"the content is a {type(value).__name__}, not text or a list of parts")
    shown: list[dict[str, str]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for part in value:
        kind = "text" if isinstance(part, str) else part["type"]
        if kind in _PLACEHOLDERS:
            shown.append({"type": _PLACEHOLDERS[kind]})
        elif kind in _THOUGHTS:
            thoughts.append(_text(part, kind))
        elif kind == "tool_call":
            calls += _calls(part["value"] if part.get("value") is not None else part["tool_call"])
        elif kind in ("text", "input_text", "output_text"):
            shown.append({"type": "text", "text": part if isinstance(part, str) else _text(part, "text")})
        else:
            raise ValueError(f"a part of the content has type {kind!r}")
    only_text = all(part["type"] == "text" for part in shown)
    content: dict[str, Any] = {"content": "".join(part["text"] for part in shown) if only_text else shown}
    if thoughts:
        content["reasoning_content"] = "".join(thoughts)
    return content | ({"tool_calls": calls} if calls else {})


def _text(part: Mapping[str, Any], kind: str) -> str:
    for key in (kind, "text", "value"):
        if isinstance(part.get(key), str):
            return str(part[key])
    raise ValueError(f"a part of type {part['type']!r} has no text")


def _calls(value: Any) -> list[dict[str, Any]]:
    """Return tool calls in the OpenAI shape, from a list of calls or one call, each as a dict or as JSON text."""
    decoded = _json(value, "a tool call")
    return [_call(_json(call, "a tool call")) for call in ([decoded] if isinstance(decoded, Mapping) else decoded)]


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or call
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool call has no function name: {str(call)[:80]}")
    arguments = function.get("arguments")
    arguments = {} if arguments in (None, "") else _json(arguments, f"the arguments of {function['name']}")
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments of {function['name']} are not a JSON object: {str(arguments)[:80]}")
    named = {"id": call["id"]} if call.get("id") is not None else {}
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}


def _json(value: Any, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"{what}: not JSON ({error}): {value[:80]}") from error
