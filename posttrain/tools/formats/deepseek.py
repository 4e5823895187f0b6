"""``deepseek`` (V3, R1 and its distilled models) and ``deepseek_v31`` (V3.1): one parser that reads both.

V3.2 writes calls in another way, which this one does not know.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from posttrain.tools.formats.base import ParsedCall
from posttrain.tools.formats.json_text import write_json
from posttrain.tools.formats.section import SectionFormat, any_of

_SEP = "<｜tool▁sep｜>"


class DeepSeek(SectionFormat):
    """A name and a JSON object: in V3 after the word ``function`` and in a Markdown fence, in V3.1 bare.

    Cannot express: names with ``<`` or a line break, and words that hold the section's or the call's begin token.
    """

    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    call_ends_thoughts = False
    opening = any_of(section[0], call[0])
    edge = any_of(*section, *call)
    forms = (
        (
            re.compile(rf"\s*+function{_SEP}(?P<name>[^<\n]+)\n```json\n"),
            re.compile(rf"\s*```\s*{call[1]}"),
        ),
        (
            re.compile(rf"\s*+(?P<name>[^<\n]+){_SEP}"),
            re.compile(rf"\s*{call[1]}"),
        ),
    )

    def __init__(self, *, fenced: bool) -> None:
        self.fenced = fenced
        self.shape = self._one("NAME", "{...}")

    def write(self, calls: Sequence[ParsedCall]) -> str:
        blocks = (self._one(call.name, write_json(call.arguments)) for call in calls)
        return self.section[0] + ("\n" if self.fenced else "").join(blocks) + self.section[1]

    def _one(self, name: str, arguments: str) -> str:
        begin, end = self.call
        if self.fenced:
            return f"{begin}function{_SEP}{name}\n```json\n{arguments}\n```{end}"
        return f"{begin}{name}{_SEP}{arguments}{end}"


DEEPSEEK = DeepSeek(fenced=True)
DEEPSEEK_V31 = DeepSeek(fenced=False)
