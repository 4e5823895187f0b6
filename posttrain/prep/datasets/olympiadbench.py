"""OlympiadBench (He et al. 2024, arXiv:2402.14008): its English, text-only problems of mathematics with an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from posttrain.core.errors import DataError
from posttrain.core.types import Message
from posttrain.prep.datasets.base import RawRow
from posttrain.prep.datasets.problems import MathProblems, plain


class OlympiadBench(MathProblems):
    """Raw rows ``{"question", "context", "solution": [...], "final_answer": [...], "is_multiple_answer", "unit",
    "answer_type", "subfield"}``. ``final_answer`` has one element, in which several answers are parted by commas."""

    name = "olympiadbench"
    data_source = "Hothan/OlympiadBench"
    licence = "Apache-2.0"
    hub_id: str | None = "Hothan/OlympiadBench"
    splits: tuple[str, ...] = ("test",)
    size: Mapping[str, int] = {"test": 675}
    patterns: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "test": ("olympiadbench", "OE_TO_maths_en_COMP", "OlympiadBench/OE_TO_maths_en_COMP/*", "test", "test-*")
    }
    hub_files: ClassVar[tuple[str, ...]] = ("OlympiadBench/OE_TO_maths_en_COMP/*",)
    kept_columns: ClassVar[tuple[str, ...]] = ("subfield", "answer_type", "unit", "is_multiple_answer")

    def gold(self, row: RawRow) -> str:
        answers = row.get("final_answer")
        text = ", ".join(map(plain, answers)) if isinstance(answers, list) else plain(answers)
        if not text:
            raise DataError("the gold answer is missing or empty", hint=f"the row has {', '.join(row)}")
        return text

    def solution(self, row: RawRow) -> str | None:
        solutions = row.get("solution")
        text = next(iter(solutions), "") if isinstance(solutions, list) else solutions
        return text.strip() or None if isinstance(text, str) else None

    def prompt(self, row: RawRow) -> list[Message]:
        context = row.get("context")
        parts = [context.strip()] if isinstance(context, str) and context.strip() else []
        parts.append(self.problem(row))
        if row.get("is_multiple_answer"):
            parts.append("There are several answers: put all of them into one box, with commas between them.")
        if row.get("unit"):
            parts.append(f"The answer is in the unit {row['unit']}; leave the unit out of the box.")
        return [{"role": "user", "content": self.form.ask("\n\n".join(parts))}]
