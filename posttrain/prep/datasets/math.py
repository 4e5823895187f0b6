"""MATH (Hendrycks et al. 2021, arXiv:2103.03874): 7,500 train and 5,000 test competition problems; and the 500 of its
test problems that Lightman et al. (2023, arXiv:2305.20050) evaluate on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from posttrain.prep.datasets.problems import MathProblems


class Math(MathProblems):
    r"""Raw rows ``{"problem", "level", "type", "solution"}``, the answer in the solution's last ``\boxed``; some files
    have it in ``answer`` too. Also the original folder of one JSON file a problem (``train/algebra/1.json``)."""

    name = "math"
    data_source = "DigitalLearningGmbH/MATH-lighteval"
    licence = "MIT"
    hub_id: str | None = "DigitalLearningGmbH/MATH-lighteval"
    splits: tuple[str, ...] = ("train", "test")
    size: Mapping[str, int] = {"train": 7500, "test": 5000}
    patterns: ClassVar[Mapping[str, tuple[str, ...]]] = {
        split: (f"math_{split}", split, f"{split}-*", f"data/{split}-*", f"default/{split}-*", f"{split}/*/*")
        for split in ("train", "test")
    }


class Math500(MathProblems):
    """Raw rows ``{"problem", "solution", "answer", "subject", "level", "unique_id"}``."""

    name = "math500"
    data_source = "HuggingFaceH4/MATH-500"
    licence = "MIT"
    hub_id: str | None = "HuggingFaceH4/MATH-500"
    splits: tuple[str, ...] = ("test",)
    size: Mapping[str, int] = {"test": 500}
    patterns: ClassVar[Mapping[str, tuple[str, ...]]] = {"test": ("math500", "math_500", "MATH-500", "test", "test-*")}
