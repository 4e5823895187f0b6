"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): 7,473 train and 1,319 test grade-school word problems."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from posttrain.core.types import Message
from posttrain.data.parquet import Conversation
from posttrain.prep.datasets.base import FileSet, RawRow, WordProblems, reasoning, without_annotations
from posttrain.tools.calculator import SCHEMA, Calculator, CalculatorError, calculate

_SYSTEM = {
    "check": "Reason step by step. Check your answer with the `calc_gsm8k_reward` tool, then end with a line "
    "`#### <answer>`.",
    "calculator": "Reason step by step. Work out each calculation with the `calculator` tool, then end with a line "
    "`#### <answer>`.",
    "plain": "Reason step by step, then end with a line `#### <answer>`.",
}
"""By kind of demonstrations, the default first."""
_STEP = re.compile(r"<<([^<>]+)=([^<>=]+)>>")
"""A calculation of a solution, and its result."""
_ROUNDED = 0.02
"""How far, relatively, the result that a solution states may lie from the calculator's."""


class Gsm8k(WordProblems, FileSet):
    """Raw rows ``{"question", "answer"}``; the answer ends with a line ``#### <number>``.

    Args:
        demos: what the SFT conversations show, and the prompts ask for. ``check``: a call of the tool that tells
            whether the answer is right. ``calculator``: a call of the calculator for each calculation that the solution
            marks as ``<<48/2=24>>``. ``plain``: the solution.
    """

    name = "gsm8k"
    data_source = "openai/gsm8k"
    licence = "MIT"
    hub_id: str | None = "openai/gsm8k"
    splits: tuple[str, ...] = ("train", "test")
    size: Mapping[str, int] = {"train": 7473, "test": 1319}
    demos: tuple[str, ...] = tuple(_SYSTEM)
    patterns: ClassVar[Mapping[str, tuple[str, ...]]] = {
        split: (split, f"{split}-*", f"main/{split}-*") for split in ("train", "test")
    }
    hub_files: ClassVar[tuple[str, ...]] = ("main/*.parquet",)

    def __init__(self, demos: str = "check") -> None:
        super().__init__()
        self._shown = demos
        self.system = _SYSTEM[demos]
        self.answer_tool = demos == "check"

    def to_rlhf(self, row: RawRow, index: int, split: str) -> dict[str, Any]:
        """``extra_info`` has how many ``calculations`` the solution marks: a measure of how hard the problem is."""
        made = super().to_rlhf(row, index, split)
        made["extra_info"]["calculations"] = len(_STEP.findall(row["answer"]))
        return made

    def to_sft(self, row: RawRow, index: int, split: str) -> Conversation:
        if self._shown == "check":
            return super().to_sft(row, index, split)
        gold = self.gold(row)
        if self._shown == "plain":
            return Conversation([*self._prompt(row), _close(reasoning(row["answer"]), gold)])
        return Conversation([*self._prompt(row), *_with_calls(row["answer"], gold)], [SCHEMA])


def _with_calls(answer: str, gold: str) -> list[Message]:
    """Return a worked answer as assistant's turns, each ending with a call of the calculator, and the results.

    A calculation that the calculator cannot do, or of which the answer states another result, stays text: what follows
    would contradict what the model has read.
    """
    worked = answer.rpartition("####")[0]
    calculator = Calculator()
    turns: list[Message] = []
    begin = 0
    for step in _STEP.finditer(worked):
        expression, stated = step[1].strip(), step[2].strip()
        if not _agree(expression, stated):
            continue
        call: Message = {
            "role": "assistant",
            "content": without_annotations(worked[begin : step.start()]).strip(),
            "tool_calls": [
                {"type": "function", "function": {"name": calculator.name, "arguments": {"expression": expression}}}
            ],
        }
        result: Message = {"role": "tool", "name": calculator.name, "content": calculator.work_out(expression)}
        turns += [call, result]
        begin = step.end()
    return [*turns, _close(without_annotations(worked[begin:]).strip(), gold)]


def _agree(expression: str, stated: str) -> bool:
    """Return whether the calculator can do a calculation, and comes to the stated result but for rounding."""
    try:
        return math.isclose(calculate(expression), calculate(stated), rel_tol=_ROUNDED)
    except (CalculatorError, OverflowError):  # whole numbers may be too large to be compared
        return False


def _close(worked: str, gold: str) -> Message:
    """Return the assistant's last turn."""
    return {"role": "assistant", "content": f"{worked}\n#### {gold}".lstrip()}
