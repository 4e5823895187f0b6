"""``mistral`` (tokenizer v11 and newer: Devstral, Magistral, Ministral 3) and ``mistral_v3`` (v3 to v7: Mistral 7B
v0.3, Nemo, Small 3): one parser that reads both."""

from __future__ import annotations

import re
from collections.abc import Sequence

from posttrain.core.types import ToolSchema
from posttrain.tools.formats.base import BlockFormat, ParsedCall, object_to_call, to_call
from posttrain.tools.formats.json_text import BadJson, read_json, write_json

_MARK = "[TOOL_CALLS]"


class Mistral(BlockFormat):
    """``[TOOL_CALLS]`` and then a JSON list of calls (v3), or a name and its arguments (v11), once a call.

    Between name and arguments stand ``[CALL_ID]`` with an id (v11 only) and ``[ARGS]``; both may be missing. Thoughts
    are between ``[THINK]`` and ``[/THINK]`` (Magistral).

    Cannot express: names with white space or brackets, and words that hold ``[TOOL_CALLS]``.
    """

    opening = re.compile(re.escape(_MARK))
    think = ("[THINK]", "[/THINK]")

    def __init__(self, *, listed: bool) -> None:
        self.listed = listed

    def block(self, text: str, start: int, tools: Sequence[ToolSchema] | None) -> tuple[list[ParsedCall], int]:
        start += len(_MARK)
        named = _NAME.match(text, start)
        try:
            value, end = read_json(text, named.end() if named else start)
        except BadJson as error:
            again = self.opening.search(text, start)
            return [ParsedCall("", error=str(error))], again.start() if again else len(text)
        if named:
            return [to_call(named["name"], value)], end
        calls = [object_to_call(item) for item in (value if isinstance(value, list) else [value])]
        return calls or [ParsedCall("", error=f"the list after {_MARK} is empty")], end

    def write(self, calls: Sequence[ParsedCall]) -> str:
        if self.listed:
            return f"{_MARK} " + write_json([{"name": call.name, "arguments": call.arguments} for call in calls])
        return "".join(f"{_MARK}{call.name}[ARGS]{write_json(call.arguments)}" for call in calls)

    def join(self, content: str, calls: str) -> str:
        return content + calls


_NAME = re.compile(r"\s*+(?P<name>[^\s\[\]{}]++)\s*+(?:\[CALL_ID\][^\s\[\]{}]*+)?(?:\[ARGS\])?")
MISTRAL = Mistral(listed=False)
MISTRAL_V3 = Mistral(listed=True)
