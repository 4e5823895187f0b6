"""What a row of preference parquet is: two answers to one prompt, one of them preferred.

The columns are TRL's. Both ways of writing them are read: ``prompt`` with the answers' own messages, and whole
conversations in ``chosen`` and ``rejected``, with ``prompt`` repeated or left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.core.types import Message, ToolSchema
from posttrain.data.schema import BaseRow, MessageField, tool_names, typed_messages
from posttrain.data.turns import RowError, check_messages


@dataclass(frozen=True)
class Preference:
    """One preference row, typed."""

    prompt: list[Message]
    """What both conversations begin with."""
    chosen: list[Message]
    """What follows it in the preferred one: first of all an assistant message."""
    rejected: list[Message]
    """What follows it in the other one."""
    tools: list[ToolSchema] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)
    """``{"bytes": ...}`` or ``{"path": ...}`` for each ``<image>`` in the messages."""


class PreferenceRow(BaseRow):
    """Two answers to the same prompt."""

    prompt: list[MessageField] | None = None
    """The conversation so far. Without it, it is what `chosen` and `rejected` begin with in common."""
    chosen: list[MessageField]
    """The better answer: the messages that follow `prompt`, or the whole conversation. It ends with the assistant's."""
    rejected: list[MessageField]
    """The worse answer, likewise."""
    extra_info: dict[str, Any] | None = None
    """For your own bookkeeping."""

    def typed(self, index: int) -> Preference:
        """Return the row as a pair of answers, checked. ``index`` is not used.

        Raises:
            RowError: a conversation is out of order, or the two are no answers to one prompt, or the same.
        """
        prompt = typed_messages(self.prompt or (), "prompt")
        chosen = _whole(prompt, typed_messages(self.chosen, "chosen"), "chosen")
        rejected = _whole(prompt, typed_messages(self.rejected, "rejected"), "rejected")
        tools = self.tools or []
        for column, messages in (("chosen", chosen), ("rejected", rejected)):
            where = f"prompt + {column}" if len(messages) > len(getattr(self, column)) else column
            needs, images = ("user", "assistant"), len(self.images or ())
            check_messages(messages, where, needs=needs, declared=tool_names(tools), images=images)
            if messages[-1]["role"] != "assistant":
                raise RowError(
                    f"{where}.{len(messages) - 1}.role",
                    f"the conversation ends with a {messages[-1]['role']} message",
                    "what is compared is what the assistant wrote last",
                )
        shared = _shared(chosen, rejected)
        return Preference(chosen[:shared], chosen[shared:], rejected[shared:], tools, self.pictures)


def _whole(prompt: list[Message], own: list[Message], column: str) -> list[Message]:
    """Return the whole conversation of a column that repeats the prompt, or goes on from it."""
    if not own:
        raise RowError(column, "there is no message", "it holds the answer, or the whole conversation")
    if own[: len(prompt)] == prompt:
        return own
    first = own[0]["role"]
    if first == "system" or (first == "user" and prompt[-1]["role"] != "assistant"):
        raise RowError(
            f"{column}.0",
            "it begins a conversation, and not with the messages of `prompt`",
            "give the answer alone, or the whole conversation with the same prompt, or leave `prompt` out",
        )
    return [*prompt, *own]


def _shared(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Return how many messages two conversations begin with in common. Raises ``RowError`` where the rest is no
    pair."""
    pairs = zip(chosen, rejected, strict=False)
    shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
    if shared in (len(chosen), len(rejected)):
        same = len(chosen) == len(rejected)
        longer, shorter = ("chosen", "rejected") if len(chosen) > len(rejected) else ("rejected", "chosen")
        what = "it is the same as `chosen`" if same else f"it is the beginning of `{longer}`"
        raise RowError("rejected" if same else shorter, what, "there is nothing to compare: leave the row out")
    for column, message in (("chosen", chosen[shared]), ("rejected", rejected[shared])):
        if message["role"] != "assistant":
            raise RowError(
                column,
                f"`chosen` and `rejected` part at a {message['role']} message: they answer different prompts",
                "both must begin with the same messages, up to where the assistant answers",
            )
    return shared
