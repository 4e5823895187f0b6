"""The order of a conversation: who may speak after whom, which calls have results, and where images belong.

At most one system message comes first, then a user; an assistant answers a user or a tool; a tool message answers a
call of the assistant's turn before it. Everything here works on typed messages (``core.types.Message``), whose
content is text; an image in it is the word ``<image>``, and its bytes lie in the row's ``images``, in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from posttrain.core.registry import nearest
from posttrain.core.types import Message, Role

IMAGE = "<image>"
"""Stands in a message's text where an image belongs, as in verl and LLaMA-Factory."""

_CALLS_AS_TEXT = ("<tool_call", "<function", "[TOOL_CALLS]", "<|python_tag|>", "<code>", "```")
"""How calls look in conversations that keep them in the text: there, a tool's answer needs no ``tool_calls``."""


class RowError(ValueError):
    """A row breaks the schema. ``field`` is the path in the row, as ``prompt.0.role``; ``hint`` says what to do."""

    def __init__(self, field: str, message: str, hint: str) -> None:
        super().__init__(f"column {field!r}: {message}")
        self.field, self.message, self.hint = field, message, hint


def check_messages(
    messages: Sequence[Message],
    column: str,
    *,
    needs: Collection[str],
    declared: Collection[str] | None,
    images: int,
) -> None:
    """Check the order of a conversation, its tool calls and its images.

    Args:
        column: the column it stands in, for messages.
        needs: roles that must occur.
        declared: names of the functions that may be called; None: any.
        images: images that the row brings.

    Raises:
        RowError: naming the field.
    """
    roles = [message["role"] for message in messages]
    for role in needs:
        if role not in roles:
            hint = f"it has {len(roles)} messages, of roles {sorted(set(roles))}"
            raise RowError(column, f"no {role} message", hint if roles else "it has no message at all")
    open_calls: list[str | None] = []
    for i, message in enumerate(messages):
        if message["role"] == "tool":
            _take_call(message, messages[:i], open_calls, f"{column}.{i}")
        else:
            _check_order(roles, i, column)
            open_calls = [call.get("id") for call in message.get("tool_calls", ())]
        if "tool_calls" in message:
            _check_calls(message, declared, f"{column}.{i}")
    _check_images(messages, column, images)


def _check_order(roles: Sequence[Role], i: int, column: str) -> None:
    last = roles[i - 1] if i else None
    if roles[i] == "system" and last:
        message, hint = f"a system message follows the {last} message", "put it at the start"
    elif roles[i] == "assistant" and last not in ("user", "tool"):
        follows = f"follows the {last} message" if last else "starts the conversation"
        message, hint = (
            f"an assistant message {follows}",
            "an assistant answers a user or a tool; join two messages of one turn",
        )
    else:
        return
    raise RowError(f"{column}.{i}.role", f"roles out of order: {message}", hint)


def _take_call(message: Message, before: Sequence[Message], open_calls: list[str | None], here: str) -> None:
    """Take the call that a tool message answers off the ids of the calls that have no result yet."""
    wanted = message.get("tool_call_id")
    if not open_calls:
        turn = next((m for m in reversed(before) if m["role"] != "tool"), None)
        # Calls that stand in the text cannot be counted.
        if turn and turn["role"] == "assistant" and not turn.get("tool_calls") and _calls_in_text(turn):
            return
        follows = f"it follows the {before[-1]['role']} message" if before else "it starts the conversation"
        raise RowError(here, "a tool result without a call", f"{follows}; a call has one result")
    if wanted is None or all(known is None for known in open_calls):
        open_calls.pop(0)
    elif wanted in open_calls:
        open_calls.remove(wanted)
    else:
        raise RowError(
            f"{here}.tool_call_id",
            f"a tool result without a call: no open call has the id {wanted!r}",
            f"open calls: {', '.join(map(repr, open_calls))}",
        )


def _calls_in_text(message: Message) -> bool:
    return any(mark in message.get("content", "") for mark in _CALLS_AS_TEXT)


def _check_calls(message: Message, declared: Collection[str] | None, here: str) -> None:
    calls = message.get("tool_calls", ())
    if calls and message["role"] != "assistant":
        raise RowError(f"{here}.tool_calls", f"a {message['role']} message calls a tool", "only an assistant can")
    if declared is None:
        return
    for i, call in enumerate(calls):
        name = call["function"]["name"]
        if name not in declared:
            close = nearest(name, declared)
            hint = f"did you mean {close!r}?" if close else f"declared: {', '.join(sorted(declared)) or 'none'}"
            raise RowError(
                f"{here}.tool_calls.{i}.function.name", f"a call of {name!r}, which `tools` does not declare", hint
            )


def _check_images(messages: Sequence[Message], column: str, images: int) -> None:
    named = 0
    for i, message in enumerate(messages):
        if message["role"] in ("user", "tool"):
            named += message.get("content", "").count(IMAGE)
            if named > images:
                raise RowError(
                    f"{column}.{i}.content",
                    f"the text says {IMAGE} {named} times up to here and `images` holds {images}",
                    "give each its image in the column `images`, in the order of the text",
                )
    if named < images:
        raise RowError(
            "images", f"{images} images, and the text says {IMAGE} {named} times", f"write {IMAGE} where each belongs"
        )


def with_image_parts(messages: Sequence[Message], images: int) -> Sequence[Mapping[str, Any]]:
    """Return the messages of a row of so many images in the typed parts that chat templates of vision-language models
    show. In a row without images ``<image>`` is a word."""
    return [_in_parts(message) for message in messages] if images else messages


def without_marks(text: str) -> str:
    """Return a text in which no ``<image>`` stands for an image."""
    return text.replace(IMAGE, f"{IMAGE[0]} {IMAGE[1:]}")


def _in_parts(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = dict(message)
    text = message.get("content", "")
    if message["role"] not in ("user", "tool") or IMAGE not in text:
        return found
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(text.split(IMAGE)):
        if number:
            parts.append({"type": "image"})
        if piece:
            parts.append({"type": "text", "text": piece})
    return {**found, "content": parts}
