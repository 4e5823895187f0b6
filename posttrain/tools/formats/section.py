"""Formats whose calls stand together in a section between special tokens, each call between tokens of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence

from posttrain.core.types import ToolSchema
from posttrain.tools.formats.base import BlockFormat, ParsedCall, to_call, unreadable
from posttrain.tools.formats.json_text import BadJson, read_json


class SectionFormat(BlockFormat):
    """A call is a head with its name, a JSON object, and a tail.

    A section that its end token does not close goes to the end of the text. Text between the calls of a section is left
    out. A call outside a section is an error: the engines do not see it.
    """

    section: tuple[str, str]
    """Tokens around the section."""
    call: tuple[str, str]
    """Tokens around a call in it."""
    edge: re.Pattern[str]
    """Any of these four."""
    forms: tuple[tuple[re.Pattern[str], re.Pattern[str]], ...]
    """Ways to write a call: what comes before its arguments, with a group ``name``, and what comes after them."""
    shape: str
    """What a call should look like, for a model that has written another thing."""

    def block(self, text: str, start: int, tools: Sequence[ToolSchema] | None) -> tuple[list[ParsedCall], int]:
        begin, end = self.section
        if not text.startswith(begin, start):
            _, position = self._call(text, start + len(self.call[0]))
            return [ParsedCall("", error=f"the tool call is not between {begin} and {end}")], position
        calls: list[ParsedCall] = []
        position = start + len(begin)
        while edge := self.edge.search(text, position):
            position = edge.end()
            if edge[0] == self.call[0]:
                call, position = self._call(text, position)
                calls.append(call)
            elif edge[0] == end:
                break
        else:
            position = len(text)
        return calls or [ParsedCall("", error=f"no tool call follows {begin}; one looks like {self.shape}")], position

    def join(self, content: str, calls: str) -> str:
        return content + calls

    def _call(self, text: str, start: int) -> tuple[ParsedCall, int]:
        """The call whose inside begins at ``start``, and where the text goes on after it."""
        for head, tail in self.forms:
            if not (match := head.match(text, start)):
                continue
            try:
                arguments, end = read_json(text, match.end())
            except BadJson as error:
                return self._unreadable(text, match.end(), str(error))
            if closed := tail.match(text, end):
                return to_call(match["name"].strip(), arguments), closed.end()
            return self._unreadable(text, end, "the tool call has text after its JSON object")
        return self._unreadable(text, start, f"the tool call is not of the form {self.shape}")

    def _unreadable(self, text: str, start: int, reason: str) -> tuple[ParsedCall, int]:
        return unreadable(text, start, reason, self.call[1], self.edge)


def any_of(*tokens: str) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tokens)))
