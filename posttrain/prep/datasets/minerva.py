"""Minerva's OCWCourses (Lewkowycz et al. 2022, arXiv:2206.14858): 272 problems of MIT's science courses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from posttrain.prep.datasets.problems import MathProblems


class Minerva(MathProblems):
    r"""Raw rows ``{"problem", "solution", "type"}``, the answer in the solution's last ``\boxed``; or
    ``{"question", "answer"}``."""

    name = "minerva"
    data_source = "math-ai/minervamath"
    licence = "MIT (OpenCourseWare: CC-BY-NC-SA-4.0)"
    hub_id: str | None = "math-ai/minervamath"
    splits: tuple[str, ...] = ("test",)
    size: Mapping[str, int] = {"test": 272}
    patterns: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "test": ("minerva_math", "minervamath", "minerva", "test", "test-*", "data/test-*")
    }
