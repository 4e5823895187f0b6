"""Contests for evaluation: AIME 2024 and 2025 (30 problems each), AMC 2023 (40). Answers are whole numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from posttrain.prep.datasets.base import Kind
from posttrain.prep.datasets.problems import ANSWER_LINE, AnswerForm, MathProblems

_LICENCE = "problems: (c) MAA; the hub's files state none or Apache-2.0"


class Contest(MathProblems):
    """One contest: the one split ``test``, whatever split the hub's files call it."""

    licence = _LICENCE
    splits: tuple[str, ...] = ("test",)
    form: ClassVar[AnswerForm] = ANSWER_LINE
    whole_numbers: ClassVar[bool] = True


class Aime24(Contest):
    """Raw rows ``{"problem", "answer"}``, most with ``solution``."""

    name = "aime24"
    data_source = "aime24"
    hub_id: str | None = "HuggingFaceH4/aime_2024"
    size: Mapping[str, int] = {"test": 30}
    patterns: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "test": ("aime24", "aime_2024*", "aime2024*", "test", "test-*", "data/train-*", "train-*", "train")
    }


class Aime25(Contest):
    """Raw rows ``{"problem" | "question" | "input", "answer" | "output"}``; one file, or one each of AIME I and II."""

    name = "aime25"
    data_source = "aime25"
    kinds: tuple[Kind, ...] = ("rlhf",)
    solution_columns: ClassVar[tuple[str, ...]] = ()
    hub_id: str | None = "opencompass/AIME2025"
    size: Mapping[str, int] = {"test": 30}
    patterns: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "test": ("aime25", "aime_2025*", "aime2025*", "AIME25", "test", "test-*", "data/train-*", "train-*", "train")
    }


class Amc23(Contest):
    """Raw rows ``{"problem" | "question", "answer"}``; the answer is a number such as 27.0."""

    name = "amc23"
    data_source = "amc23"
    kinds: tuple[Kind, ...] = ("rlhf",)
    solution_columns: ClassVar[tuple[str, ...]] = ()
    hub_id: str | None = "math-ai/amc23"
    size: Mapping[str, int] = {"test": 40}
    patterns: ClassVar[Mapping[str, tuple[str, ...]]] = {"test": ("amc23", "test", "test-*", "data/test-*")}
