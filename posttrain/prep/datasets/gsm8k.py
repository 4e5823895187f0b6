"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): 7,473 train and 1,319 test grade-school word problems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from posttrain.prep.datasets.base import FileSet, WordProblems


class Gsm8k(WordProblems, FileSet):
    """Raw rows ``{"question", "answer"}``; the answer ends with a line ``#### <number>``."""

    name = "gsm8k"
    data_source = "openai/gsm8k"
    licence = "MIT"
    hub_id: str | None = "openai/gsm8k"
    splits: tuple[str, ...] = ("train", "test")
    size: Mapping[str, int] = {"train": 7473, "test": 1319}
    patterns: ClassVar[Mapping[str, tuple[str, ...]]] = {
        split: (split, f"{split}-*", f"main/{split}-*") for split in ("train", "test")
    }
    hub_files: ClassVar[tuple[str, ...]] = ("main/*.parquet",)
    system = (
        "Reason step by step. Check your answer with the `calc_gsm8k_reward` tool, then end with a line "
        "`#### <answer>`."
    )
