"""``gpt_oss``: the harmony format of gpt-oss, in which a turn is several messages on channels."""

from __future__ import annotations

import re
from collections.abc import Sequence

from posttrain.core.types import ToolSchema
from posttrain.tools.formats.base import ParsedCall, ParsedTurn, ToolParser, to_call
from posttrain.tools.formats.json_text import BadJson, read_json, skip_space, write_json

_PREFIX = "functions."
_START = "<|start|>assistant"
_MESSAGE = re.compile(r"<\|message\|>")
_END = re.compile(r"<\|(?:(?P<closed>end|call|return)|start|channel)\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*+(\w++)")
_RECIPIENT = re.compile(r"\bto=([^\s<]++)")


class GptOss(ToolParser):
    """Messages ``<|start|>assistant<|channel|>NAME to=RECIPIENT <|constrain|>json<|message|>TEXT<|end|>``.

    A message with a recipient is a call, whatever its channel, as for vLLM: gpt-oss calls from the analysis channel
    too. Without one, ``analysis`` is thoughts, all else is words. What looks like a call inside the thoughts is part of
    them. The prompt ends with ``<|start|>assistant``, so the first message lacks it. Text without any message is words.
    A model's turn ends with its first call; several in a text are read all the same.

    Cannot express: thoughts and words that hold one of the format's tokens; names with white space or ``<``.
    """

    stop_tokens = ("<|call|>", "<|return|>")

    def parse(self, text: str, tools: Sequence[ToolSchema] | None = None) -> ParsedTurn:
        thoughts: list[str] = []
        words: list[str] = []
        calls: list[ParsedCall] = []
        position = 0
        while message := _MESSAGE.search(text, position):
            unfinished, _, header = text[position : message.start()].rpartition("<|start|>")
            calls += _without_message(unfinished)
            if recipient := _RECIPIENT.search(header):
                call, position = _call(recipient[1], text, message.end())
                calls.append(call)
                continue
            channel = _CHANNEL.search(header)
            end, position = _message_end(text, message.end())
            (thoughts if channel and channel[1] == "analysis" else words).append(text[message.end() : end].strip())
        rest = text[position:]
        calls += _without_message(rest)
        if not position and not _END.search(rest):
            words.append(rest.strip())
        return ParsedTurn("\n".join(filter(None, words)), calls, "\n".join(filter(None, thoughts)))

    def render(self, turn: ParsedTurn) -> str:
        messages = []
        if turn.reasoning:
            messages.append(f"<|channel|>analysis<|message|>{turn.reasoning}<|end|>")
        if turn.content and turn.calls:
            messages.append(f"<|channel|>commentary<|message|>{turn.content}<|end|>")
        for call in turn.calls:
            header = f"<|channel|>commentary to={_PREFIX}{call.name} <|constrain|>json"
            messages.append(f"{header}<|message|>{write_json(call.arguments)}<|call|>")
        if turn.content and not turn.calls:
            messages.append(f"<|channel|>final<|message|>{turn.content}")
        return _START.join(messages)


def _call(recipient: str, text: str, start: int) -> tuple[ParsedCall, int]:
    """The call whose arguments begin at ``start``, and where the text goes on after it."""
    if not recipient.startswith(_PREFIX):
        error = f"nobody answers to {recipient!r}: a tool is called with to={_PREFIX}NAME"
        return ParsedCall("", error=error), _message_end(text, start)[1]
    try:
        # The object's own end is found first, so that a token's name inside a string argument does not end the message.
        arguments, end = read_json(text, start)
    except BadJson as error:
        return ParsedCall("", error=str(error)), _message_end(text, start)[1]
    end = skip_space(text, end)
    stop, position = _message_end(text, end)
    if stop > end:
        return ParsedCall("", error="the tool call has text after its JSON object"), position
    return to_call(recipient.removeprefix(_PREFIX), arguments), position


def _without_message(text: str) -> list[ParsedCall]:
    """An error if the text between two messages holds the header of a call."""
    if _RECIPIENT.search(text) and _CHANNEL.search(text):
        return [ParsedCall("", error="the tool call has no <|message|>")]
    return []


def _message_end(text: str, start: int) -> tuple[int, int]:
    """Where the text of the message ends, and where the next one begins."""
    end = _END.search(text, start)
    if end is None:
        return len(text), len(text)
    return end.start(), end.end() if end["closed"] else end.start()


GPT_OSS = GptOss()
