"""``qwen3_coder``: Qwen3-Coder, Qwen3-Next-Coder, Qwen3.5 and models that took over its format."""

from __future__ import annotations

import re
from collections.abc import Sequence

from posttrain.tools.formats.base import ParsedCall
from posttrain.tools.formats.untyped import UntypedFormat, to_text


class Qwen3Coder(UntypedFormat):
    """``<function=NAME>`` with ``<parameter=NAME>`` inside, between ``<tool_call>`` tags.

    Coder models sometimes leave out a ``<tool_call>`` tag; the function's own tags are enough, as for the engines.
    One line break at either end of an argument belongs to the format.

    Cannot express: arguments that hold ``<parameter=``, ``</function>``, or ``</parameter>`` with one of these after
    it; names with ``<``, ``>`` or a line break; words that hold ``<tool_call>`` or ``<function=``; and without the
    tool's schema anything but text.
    """

    opening = re.compile(r"<tool_call>(?:\s*+<function=)?|<function=")
    head = re.compile(r"(?:<tool_call>\s*+)?<function=(?P<name>[^<>\n]*+)>")
    argument = re.compile(r"\s*+<parameter=(?P<name>[^<>\n]*+)>\n?")
    value_end = re.compile(r"(?P<closed>\n?</parameter>(?=\s*+(?:<parameter=|</function>)))|<parameter=|</function>")
    tail = re.compile(r"\s*+</function>(?:\s*+</tool_call>)?")
    close = "</tool_call>"
    edge = re.compile(r"</?tool_call>|<function=")
    shape = "<tool_call>\n<function=NAME>\n<parameter=NAME>\nvalue\n</parameter>\n</function>\n</tool_call>"

    def write(self, calls: Sequence[ParsedCall]) -> str:
        return "\n".join(map(_one, calls))


def _one(call: ParsedCall) -> str:
    arguments = "".join(f"<parameter={k}>\n{to_text(v)}\n</parameter>\n" for k, v in call.arguments.items())
    return f"<tool_call>\n<function={call.name}>\n{arguments}</function>\n</tool_call>"


QWEN3_CODER = Qwen3Coder()
