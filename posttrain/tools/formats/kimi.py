"""``kimi``: Kimi K2 and K2 Thinking."""

from __future__ import annotations

import re
from collections.abc import Sequence

from posttrain.tools.formats.base import ParsedCall
from posttrain.tools.formats.json_text import write_json
from posttrain.tools.formats.section import SectionFormat, any_of


class Kimi(SectionFormat):
    """``functions.NAME:INDEX`` and a JSON object; the index counts the calls of the conversation.

    ``render`` counts from 0 in every turn. Cannot express: names with white space, ``<`` or ``:``, and words that hold
    ``<|tool_calls_section_begin|>`` or ``<|tool_call_begin|>``.
    """

    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    call = ("<|tool_call_begin|>", "<|tool_call_end|>")
    opening = any_of(section[0], call[0])
    edge = any_of(*section, *call)
    forms = (
        (
            # The prefix is optional, as it is for the engines: K2 sometimes leaves it out.
            re.compile(r"\s*(?:functions\.)?(?P<name>[^\s<:]+):\d+\s*<\|tool_call_argument_begin\|>"),
            re.compile(r"\s*<\|tool_call_end\|>"),
        ),
    )
    shape = "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{...}<|tool_call_end|>"

    def write(self, calls: Sequence[ParsedCall]) -> str:
        begin, end = self.call
        blocks = (
            f"{begin}functions.{call.name}:{i}<|tool_call_argument_begin|>{write_json(call.arguments)}{end}"
            for i, call in enumerate(calls)
        )
        return self.section[0] + "".join(blocks) + self.section[1]


KIMI = Kimi()
