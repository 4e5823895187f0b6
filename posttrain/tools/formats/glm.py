"""``glm``: GLM-4.5, GLM-4.6, GLM-4.7."""

from __future__ import annotations

import re
from collections.abc import Sequence

from posttrain.tools.formats.base import ParsedCall
from posttrain.tools.formats.untyped import UntypedFormat, to_text


class Glm(UntypedFormat):
    """A name, then ``<arg_key>`` and ``<arg_value>`` by turns, between ``<tool_call>`` tags.

    GLM-4.7 writes no line breaks between the tags; both are read, and ``render`` writes them.

    Cannot express: arguments that hold ``<arg_key>``, or ``</arg_value>`` with ``<arg_key>`` or ``</tool_call>`` after
    it; names with white space, ``<`` or ``{``; words that hold ``<tool_call>``; and without the tool's schema anything
    but text.
    """

    stop_tokens = ("<|observation|>", "<|user|>")
    opening = re.compile(r"<tool_call>")
    head = re.compile(r"<tool_call>\s*+(?P<name>[^\s<{]++)")
    argument = re.compile(r"\s*+<arg_key>(?P<name>[^<]*+)</arg_key>\s*+<arg_value>")
    value_end = re.compile(r"(?P<closed></arg_value>(?=\s*+(?:<arg_key>|</tool_call>)))|<arg_key>")
    tail = re.compile(r"\s*+</tool_call>")
    close = "</tool_call>"
    edge = re.compile(r"</?tool_call>")
    shape = "<tool_call>NAME\n<arg_key>NAME</arg_key>\n<arg_value>value</arg_value>\n</tool_call>"

    def write(self, calls: Sequence[ParsedCall]) -> str:
        return "\n".join(map(_one, calls))


def _one(call: ParsedCall) -> str:
    arguments = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{to_text(value)}</arg_value>\n" for key, value in call.arguments.items()
    )
    return f"<tool_call>{call.name}\n{arguments}</tool_call>"


GLM = Glm()
