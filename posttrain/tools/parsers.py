"""How models write tool calls: one parser a format. Parsing never raises; what cannot be read says why."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Protocol

from posttrain.registry import Registry


@dataclass(frozen=True)
class ParsedCall:
    """One call. With ``error`` set it cannot be run, and the text tells the model why."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class ParsedTurn:
    """An assistant turn: its words without the call blocks, stripped, and its calls in order."""

    content: str
    calls: list[ParsedCall] = field(default_factory=list)


class ToolParser(Protocol):
    def parse(self, text: str) -> ParsedTurn:
        """Split an assistant turn into words and calls. Never raises."""

    def render(self, turn: ParsedTurn) -> str:
        """The text a model writes for a turn; ``parse(render(turn))`` gives the turn back."""


class Hermes:
    """``<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>``, as Hermes and Qwen2.5 / Qwen3 write it."""

    open, close = "<tool_call>", "</tool_call>"

    def parse(self, text: str) -> ParsedTurn:
        words: list[str] = []
        calls: list[ParsedCall] = []
        position = 0
        while (start := text.find(self.open, position)) >= 0:
            words.append(text[position:start])
            call, position = self._block(text, start + len(self.open))
            calls.append(call)
        words.append(text[position:])
        return ParsedTurn("".join(words).strip(), calls)

    def render(self, turn: ParsedTurn) -> str:
        blocks = []
        for call in turn.calls:
            body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
            blocks.append(f"{self.open}\n{body}\n{self.close}")
        return "\n".join(([turn.content] if turn.content else []) + blocks)

    def _block(self, text: str, start: int) -> tuple[ParsedCall, int]:
        """The call whose block's inside begins at ``start``, and where the text goes on after the block."""
        while start < len(text) and text[start].isspace():
            start += 1
        try:
            value, end = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            return self._unreadable(text, start, f"the tool call is not valid JSON: {reason}")
        # The object's own end is found first, so that a tag inside a string argument does not end the block.
        after = len(text) - len(text[end:].lstrip())
        if text.startswith(self.close, after):
            return _to_call(value), after + len(self.close)
        return self._unreadable(text, end, "the tool call has text after its JSON object")

    def _unreadable(self, text: str, start: int, reason: str) -> tuple[ParsedCall, int]:
        end = text.find(self.close, start)
        if end < 0:
            return ParsedCall("", error=f"the tool call has no closing {self.close}"), len(text)
        return ParsedCall("", error=reason), end + len(self.close)


PARSERS: Registry[ToolParser] = Registry("tool format", {"hermes": "posttrain.tools.parsers:HERMES"})
HERMES = Hermes()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


# strict=False: models write line breaks inside strings, most of all in code arguments.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)


def _to_call(value: Any) -> ParsedCall:
    """A decoded JSON value as a call; its shape is checked here."""
    if not isinstance(value, dict):
        return ParsedCall("", error="the tool call must be a JSON object with 'name' and 'arguments'")
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        return ParsedCall("", error="the tool call has no 'name'")
    if isinstance(arguments, str):
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError):
            return ParsedCall(name, error="'arguments' is a string that is not valid JSON")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return ParsedCall(name, error="'arguments' must be a JSON object")
    try:
        json.dumps([name, arguments], ensure_ascii=False).encode("utf-8")
    except (UnicodeEncodeError, RecursionError):
        return ParsedCall("", error="the tool call holds text that is not valid Unicode")
    return ParsedCall(name, arguments)
