"""GAOKAO-Bench (Zhang et al. 2023, arXiv:2305.12474): mathematics of the Chinese college entrance examination,
2010-2022: multiple choice, fill-in, and AGIEval's cloze questions (Zhong et al. 2023, arXiv:2304.06364)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from posttrain.core.errors import DataError
from posttrain.core.types import Message
from posttrain.prep.datasets.base import RawRow
from posttrain.prep.datasets.problems import BOXED_CHINESE, AnswerForm, MathProblems, first, plain

CHOICE, CLOZE = "gaokao_choice", "gaokao_cloze"

_SEVERAL = re.compile(r"[;；、]|[或和]|\(1\)\s*\.")
_STATEMENTS = re.compile(r"\\textcircled|[①-⑩]|\(\d\)\s*\(\d\)")
_WORDS = re.compile(r"[一-鿿]")
_VARIANTS = re.compile(r"\\#\s*\\#")
_SPLIT_DECIMAL = re.compile(r"(\d)\. (\d)")


class Gaokao(MathProblems):
    """Raw rows ``{"question", "answer", "analysis", "year", "category", "score"}``. ``answer`` is a list with the
    letter for multiple choice, else text, in which a full stop and a second notation of the same value do not count.

    Left out, because no formula is the whole answer: questions with several blanks, those that ask which statements
    are true, and answers in words. There is no file of open-ended questions either.
    """

    name = "gaokao"
    data_source = CHOICE
    licence = "Apache-2.0"
    hub_id: str | None = None
    splits: tuple[str, ...] = ("test",)
    size: Mapping[str, int] = {"test": 717}
    patterns: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "test": ("*Math*_MCQs|*Math*_Fill-in-the-Blank|gaokao_math_cloze|gaokao-mathcloze", "gaokao*", "test")
    }
    form: ClassVar[AnswerForm] = BOXED_CHINESE
    choice_form: ClassVar[AnswerForm] = AnswerForm(
        "{problem}\n请逐步推理,并把所选选项的字母写在 \\boxed{} 中。", BOXED_CHINESE.answer, BOXED_CHINESE.closing
    )
    solution_columns: ClassVar[Sequence[str]] = ("analysis", "solution")
    kept_columns: ClassVar[Sequence[str]] = ("year", "category", "score")

    @property
    def data_sources(self) -> tuple[str, ...]:
        return (CHOICE, CLOZE)

    def source_of(self, row: RawRow) -> str:
        return CHOICE if isinstance(row.get("answer"), list) else CLOZE

    def skip(self, row: RawRow) -> str | None:
        answer = row.get("answer")
        if not isinstance(answer, str):
            return None
        if _STATEMENTS.search(answer):
            return "the answer lists statements"
        if _SEVERAL.search(answer):
            return "the question has several blanks or answers"
        return "the answer is in words" if _WORDS.search(answer) else None

    def gold(self, row: RawRow) -> str:
        value = first(row, self.answer_columns)
        if isinstance(value, list):
            text = "".join(map(str, value))
        else:
            text = plain(_VARIANTS.split(str(value or ""))[0].strip().rstrip(".。").strip())
            # The second of two notations takes the closing dollar sign with it.
            text = _SPLIT_DECIMAL.sub(r"\1.\2", text.strip("$ ") if text.count("$") == 1 else text)
        if not text:
            raise DataError("the gold answer is missing or empty", hint=f"the row has {', '.join(row)}")
        return text

    def prompt(self, row: RawRow) -> list[Message]:
        form = self.choice_form if self.source_of(row) == CHOICE else self.form
        return [{"role": "user", "content": form.ask(self.problem(row))}]
