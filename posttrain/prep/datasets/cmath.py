"""CMATH (Wei et al. 2023, arXiv:2306.16636): Chinese word problems of the six grades of elementary school."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from posttrain.prep.datasets.base import Kind
from posttrain.prep.datasets.problems import BOXED_CHINESE, AnswerForm, MathProblems


class Cmath(MathProblems):
    """Raw rows ``{"grade", "question", "answer" | "golden", "reasoning_step", "num_digits"}``."""

    name = "cmath"
    data_source = "weitianwen/cmath"
    licence = "CC-BY-4.0"
    hub_id: str | None = "weitianwen/cmath"
    splits: tuple[str, ...] = ("validation", "test")
    kinds: tuple[Kind, ...] = ("rlhf",)
    solution_columns: ClassVar[tuple[str, ...]] = ()
    size: Mapping[str, int] = {"validation": 600, "test": 1098}
    patterns: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "validation": ("cmath_dev", "dev", "validation"),
        "test": ("cmath_test", "test", "test-*"),
    }
    form: ClassVar[AnswerForm] = BOXED_CHINESE
    kept_columns: ClassVar[tuple[str, ...]] = ("grade", "reasoning_step", "num_digits")
