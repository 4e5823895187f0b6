"""DeepMath-103K (He et al. 2025, arXiv:2504.11456): hard, decontaminated problems with an answer of any kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from posttrain.prep.datasets.problems import MathProblems


class DeepMath(MathProblems):
    """Raw rows ``{"question", "final_answer", "difficulty", "topic", "r1_solution_1", ...}``, or
    ``{"prompt", "ground_truth", "difficulty"}`` with the problem's text as prompt."""

    name = "deepmath"
    data_source = "zwhe99/DeepMath-103K"
    licence = "MIT"
    hub_id: str | None = "zwhe99/DeepMath-103K"
    splits: tuple[str, ...] = ("train",)
    size: Mapping[str, int] = {"train": 103110}
    patterns: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "train": ("deepmath*", "DeepMath*", "train", "train-*", "data/train-*")
    }
    hub_files: ClassVar[tuple[str, ...]] = ("data/*.parquet",)
    solution_columns: ClassVar[tuple[str, ...]] = ("r1_solution_1", "solution")
