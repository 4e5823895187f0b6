"""What all call formats share: parsed turns, the parser protocol, thoughts, blocks of calls in a text.

Parsing never raises and takes time linear in the text: what a model wrote may be anything. A call that cannot be read
becomes a ``ParsedCall`` whose ``error`` the model reads in the tool's place.

What marks a call is read as the inference engines (vLLM, SGLang) do: a call that is not marked so is an error here too,
lest a model learns to write what no server understands. docs/tool-formats.md lists the differences.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from posttrain.core.types import ToolSchema
from posttrain.tools.formats.json_text import BadJson, read_json, write_json


@dataclass(frozen=True)
class ParsedCall:
    """One call. With ``error`` set it cannot be run, and the text tells the model why."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class ParsedTurn:
    """An assistant turn in its parts, texts stripped."""

    content: str
    """Its words, without thoughts and call blocks."""
    calls: list[ParsedCall] = field(default_factory=list)
    reasoning: str = ""
    """Its thoughts. A call inside them is none."""


class ToolParser(Protocol):
    """One call format. A class derived from this one inherits that no extra token ends a turn."""

    stop_tokens: tuple[str, ...] = ()
    """Tokens that end a turn of this format, beside the tokenizer's and the model's own."""

    def parse(self, text: str, tools: Sequence[ToolSchema] | None = None) -> ParsedTurn:
        """Split an assistant turn into thoughts, words and calls. Never raises.

        Args:
            text: the sampled turn, decoded with special tokens, with or without its end-of-turn token.
            tools: what the model may call. Formats that write arguments as untyped text convert them to the types
                declared there; the others ignore it.
        """

    def render(self, turn: ParsedTurn) -> str:
        """The text a model writes for a turn; ``parse(render(turn), tools)`` gives the turn back."""


class BlockFormat(ToolParser):
    """A format whose calls stand in blocks that a mark begins, with words before, between and after them.

    Thoughts are one stretch at the start of a turn, up to the first ``</think>``, as for the engines' reasoning
    parsers, which take them off before the tool parser sees the turn. It starts inside them if it starts with
    ``<think>``, or if a ``</think>`` comes without one: then the prompt opened them. A ``</think>`` inside a
    well-formed call is part of an argument and ends nothing. Thoughts that the turn opened and never closes last to its
    first call or to its end (``call_ends_thoughts``). Of thoughts that the prompt opened and the turn never closes the
    text says nothing: they are words, and calls in them are calls.

    Cannot express: words that end with one of ``stop_tokens``, and thoughts that hold ``</think>``.
    """

    opening: re.Pattern[str]
    """Where a block may begin."""
    think: tuple[str, str] = ("<think>", "</think>")
    call_ends_thoughts: bool = True
    """True where a call ends thoughts that no ``</think>`` ends. Qwen, GLM, Kimi and Mistral models sometimes go over
    to a call without it, and the engines' parsers for them count that call; those for DeepSeek do not."""

    @abstractmethod
    def block(self, text: str, start: int, tools: Sequence[ToolSchema] | None) -> tuple[list[ParsedCall], int]:
        """The calls of the block that begins at ``start``, and where the text goes on after it (beyond ``start``).
        No calls: it is words after all."""

    @abstractmethod
    def write(self, calls: Sequence[ParsedCall]) -> str:
        """The blocks of at least one call."""

    def join(self, content: str, calls: str) -> str:
        """Words, if any, and the blocks that follow them."""
        return f"{content}\n{calls}" if content else calls

    def parse(self, text: str, tools: Sequence[ToolSchema] | None = None) -> ParsedTurn:
        for token in self.stop_tokens:
            text = text.removesuffix(token)
        position = answer = self._answer_start(text, tools)
        words: list[str] = []
        calls: list[ParsedCall] = []
        for start, end, found in self._blocks(text, answer, tools):
            words.append(text[position:start])
            calls += found
            position = end
        words.append(text[position:])
        thoughts = text[:answer].strip().removeprefix(self.think[0]).removesuffix(self.think[1])
        return ParsedTurn("".join(words).strip(), calls, thoughts.strip())

    def render(self, turn: ParsedTurn) -> str:
        answer = self.join(turn.content, self.write(turn.calls)) if turn.calls else turn.content
        begin, end = self.think
        # Empty thoughts keep words about thoughts from being taken for some.
        if turn.reasoning or end in answer or answer.startswith(begin):
            return f"{begin}\n{turn.reasoning}\n{end}\n\n{answer}"
        return answer

    def _blocks(
        self, text: str, position: int, tools: Sequence[ToolSchema] | None
    ) -> Iterator[tuple[int, int, list[ParsedCall]]]:
        """(start, end, calls) of each block from ``position`` on."""
        while match := self.opening.search(text, position):
            calls, position = self.block(text, match.start(), tools)
            if calls:
                yield match.start(), position, calls

    def _answer_start(self, text: str, tools: Sequence[ToolSchema] | None) -> int:
        """Where the thoughts end: 0 without any, the text's length if they are all of it."""
        begin, end = self.think
        closed = text.find(end)
        if text.lstrip().startswith(begin):
            call = self.opening.search(text) if closed < 0 and self.call_ends_thoughts else None
            return closed + len(end) if closed >= 0 else call.start() if call else len(text)
        if closed < 0:
            return 0
        for start, after, calls in self._blocks(text, 0, tools):
            if start <= closed < after and not any(call.error for call in calls):
                closed = text.find(end, after)  # that one was part of an argument
                if closed < 0:
                    return 0
            elif closed < after:
                break
        return closed + len(end)


def unreadable(text: str, start: int, reason: str, close: str, edge: re.Pattern[str]) -> tuple[ParsedCall, int]:
    """A call with an error, and where the text goes on: after its closing tag, or at the next edge if that comes first.

    Args:
        start: from where on to look.
        edge: ``close`` and whatever else ends a call that was never closed.
    """
    found = edge.search(text, start)
    if found and found[0] == close:
        return ParsedCall("", error=reason), found.end()
    error = f"the tool call has no closing {close}"
    return ParsedCall("", error=error), found.start() if found else len(text)


def to_call(name: Any, arguments: Any) -> ParsedCall:
    """A call with what a format found as name and arguments; their types are checked here."""
    if not isinstance(name, str) or not name:
        return ParsedCall("", error="the tool call has no 'name'")
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments, 0, whole=True)[0]
        except BadJson:
            return ParsedCall(name, error="'arguments' is a string that is not valid JSON")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return ParsedCall(name, error="'arguments' must be a JSON object")
    try:
        write_json([name, arguments]).encode("utf-8")
    except UnicodeEncodeError:
        return ParsedCall("", error="the tool call holds text that is not valid Unicode")
    return ParsedCall(name, arguments)


def object_to_call(value: Any) -> ParsedCall:
    """The call in a JSON object ``{"name": ..., "arguments": {...}}``; Llama's ``parameters`` is read as well."""
    if not isinstance(value, dict):
        return ParsedCall("", error="the tool call must be a JSON object with 'name' and 'arguments'")
    return to_call(value.get("name"), value.get("arguments", value.get("parameters")))
