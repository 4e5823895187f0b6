"""``hermes``: a JSON object in tags. Nous Hermes, Qwen2.5, Qwen3 (not Coder), QwQ, SmolLM3."""

from __future__ import annotations

import re
from collections.abc import Sequence

from posttrain.core.types import ToolSchema
from posttrain.tools.formats.base import BlockFormat, ParsedCall, object_to_call, unreadable
from posttrain.tools.formats.json_text import BadJson, read_json, skip_space, write_json

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAG = re.compile(r"</?tool_call>")


class Hermes(BlockFormat):
    """``<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>``, one block a call.

    Cannot express: words that hold ``<tool_call>``.
    """

    opening = re.compile(_OPEN)

    def block(self, text: str, start: int, tools: Sequence[ToolSchema] | None) -> tuple[list[ParsedCall], int]:
        start += len(_OPEN)
        try:
            # The object's own end is found first, so that a tag inside a string argument does not end the block.
            value, end = read_json(text, start)
        except BadJson as error:
            return _unreadable(text, start, str(error))
        after = skip_space(text, end)
        if text.startswith(_CLOSE, after):
            return [object_to_call(value)], after + len(_CLOSE)
        return _unreadable(text, end, "the tool call has text after its JSON object")

    def write(self, calls: Sequence[ParsedCall]) -> str:
        bodies = (write_json({"name": call.name, "arguments": call.arguments}) for call in calls)
        return "\n".join(f"{_OPEN}\n{body}\n{_CLOSE}" for body in bodies)


def _unreadable(text: str, start: int, reason: str) -> tuple[list[ParsedCall], int]:
    call, end = unreadable(text, start, reason, _CLOSE, _TAG)
    return [call], end


HERMES = Hermes()
