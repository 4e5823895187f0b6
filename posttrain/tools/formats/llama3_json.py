"""``llama3_json``: Llama 3.1, 3.2 and 3.3."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from posttrain.core.types import ToolSchema
from posttrain.tools.formats.base import BlockFormat, ParsedCall, object_to_call
from posttrain.tools.formats.json_text import BadJson, read_json, write_json

_TAG = "<|python_tag|>"


class Llama3Json(BlockFormat):
    """JSON objects with ``name`` and ``parameters`` (or ``arguments``), bare or after ``<|python_tag|>``.

    Without a tag an object is a call if it has both keys, wherever it stands; other JSON is the model's words. Several
    calls stand side by side, or with semicolons between them. Llama's own call of a built-in tool,
    ``<|python_tag|>brave_search.call(...)``, is an error.

    Cannot express: words that hold ``<|python_tag|>`` or such an object.
    """

    stop_tokens = ("<|eom_id|>", "<|eot_id|>")
    call_ends_thoughts = False
    opening = re.compile(
        r'(?P<tag><\|python_tag\|>)|(?:;\s*+)?(?P<object>\{)\s*+"(?:name|type|parameters|arguments)"\s*+:'
    )

    def block(self, text: str, start: int, tools: Sequence[ToolSchema] | None) -> tuple[list[ParsedCall], int]:
        opened = self.opening.match(text, start)
        assert opened is not None
        begin = opened.end() if opened["tag"] else opened.start("object")
        try:
            value, end = read_json(text, begin)
        except BadJson as error:
            meant = opened["tag"] or _ATTEMPT.match(text, begin)
            # From where reading gave up, and not from the next brace: else deep nesting would be read again and again.
            return [ParsedCall("", error=str(error))] if meant else [], max(error.position, opened.end())
        return [object_to_call(value)] if opened["tag"] or _is_call(value) else [], end

    def write(self, calls: Sequence[ParsedCall]) -> str:
        return "; ".join(write_json({"name": call.name, "parameters": call.arguments}) for call in calls)

    def join(self, content: str, calls: str) -> str:
        return f"{content}{_TAG}{calls}" if content else calls


_ATTEMPT = re.compile(
    r'\{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?"name"\s*+:\s*+"[^"]*+"\s*+,\s*+"(?:parameters|arguments)"'
)
"""The start of an object that was to be a call."""


def _is_call(value: Any) -> bool:
    return isinstance(value.get("name"), str) and ("parameters" in value or "arguments" in value)


LLAMA3_JSON = Llama3Json()
