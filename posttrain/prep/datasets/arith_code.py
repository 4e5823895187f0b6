"""The generated word problems of ``arith``, worked with the code interpreter."""

from __future__ import annotations

import re

from posttrain.core.types import Message
from posttrain.data.parquet import Conversation
from posttrain.prep.datasets.arith import Arith
from posttrain.prep.datasets.base import RawRow
from posttrain.tools import code as tool

_STEP = re.compile(r"<<(\d+)([-+*])(\d+)=(\d+)>>")


class ArithCode(Arith):
    """The dataset of ``posttrain prep arith-code``. The assistant writes a program of one line, reads what it prints,
    and answers. As in ``arith``, some training conversations leave the last step out."""

    name = "arith-code"
    answer_tool = False

    def to_sft(self, row: RawRow, index: int, split: str) -> Conversation:
        steps = _STEP.findall(row["answer"])
        if self.is_hasty(row, split) and len(steps) > 1:
            steps.pop()
        expression = steps[0][0] + "".join(op + right for _, op, right, _ in steps)
        printed = steps[-1][3]
        call: Message = {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": tool.FUNCTION, "arguments": {"code": f"print({expression})"}}}
            ],
        }
        output: Message = {"role": "tool", "name": tool.FUNCTION, "content": printed}
        close: Message = {"role": "assistant", "content": f"#### {printed}"}
        return Conversation([*self._prompt(row), call, output, close], [tool.SCHEMA])
