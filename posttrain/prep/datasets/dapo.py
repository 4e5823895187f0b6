"""DAPO-Math-17k (Yu et al. 2025, arXiv:2503.14476): 17 thousand problems whose answers are whole numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from posttrain.core.errors import DataError
from posttrain.prep.datasets.base import Kind, RawRow
from posttrain.prep.datasets.problems import (
    ANSWER_LINE,
    AnswerForm,
    MathProblems,
    first,
    given_truth,
    plain,
    problem_text,
)


class DapoMath(MathProblems):
    """Raw rows as verl's parquet, ``{"prompt": [message], "reward_model": {"ground_truth"}, ...}``, in which each
    problem stands about a hundred times: the first is taken. Or with the problem's text as ``prompt`` and the answer in
    ``solution``."""

    name = "dapo-math-17k"
    data_source = "math_dapo"
    licence = "Apache-2.0"
    hub_id: str | None = "BytedTsinghua-SIA/DAPO-Math-17k"
    splits: tuple[str, ...] = ("train",)
    kinds: tuple[Kind, ...] = ("rlhf",)
    size: Mapping[str, int] = {"train": 17917}
    patterns: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "train": ("data/dapo-math-17k", "dapo-math-17k*", "all/train-*", "data/train-*", "train-*", "train")
    }
    form: ClassVar[AnswerForm] = ANSWER_LINE
    whole_numbers: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def rows(self, split: str, source: str | None, *, n: int | None = None, seed: int = 0) -> Iterator[RawRow]:
        self._seen = set()
        return super().rows(split, source, n=n, seed=seed)

    def skip(self, row: RawRow) -> str | None:
        problem = str(row.get("prompt"))
        if problem in self._seen:
            return "a duplicate"
        self._seen.add(problem)
        return None

    def problem(self, row: RawRow) -> str:
        before, after = self.form.prompt.split("{problem}")
        return problem_text(row, ["prompt"]).strip().removeprefix(before).removesuffix(after).strip()

    def gold(self, row: RawRow) -> str:
        text = plain(first({**row, "given": given_truth(row)}, ("given", "answer", "solution")))
        if not text:
            raise DataError("the gold answer is missing or empty", hint=f"the row has {', '.join(row)}")
        return text

    def solution(self, row: RawRow) -> None:
        """There is none."""
