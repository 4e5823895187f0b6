"""NuminaMath-CoT (Li et al. 2024) as PRIME trains on it (Cui et al. 2025, arXiv:2502.01456): six of its sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from posttrain.core.types import Message
from posttrain.prep.datasets.base import RawRow
from posttrain.prep.datasets.problems import (
    AnswerForm,
    MathProblems,
    given_prompt,
    given_truth,
    last_question,
    without_figures,
)
from posttrain.rewards.boxed import last_boxed

SOURCES = ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")


class Numina(MathProblems):
    r"""Raw rows of PRIME's parquet, ``{"data_source": "numina_olympiads", "prompt": [message], "reward_model":
    {"ground_truth"}, ...}``, whose prompt is kept as it is; or of NuminaMath-CoT, ``{"source": "olympiads", "problem",
    "solution"}``, where the last ``\boxed`` of the solution is the answer.

    Rows of other sources and solutions without a box (proofs) are left out.
    """

    name = "numina"
    data_source = "numina_olympiads"
    licence = "MIT (NuminaMath-CoT: Apache-2.0)"
    hub_id: str | None = "PRIME-RL/Eurus-2-RL-Data"
    splits: tuple[str, ...] = ("train", "validation", "test")
    size: Mapping[str, int] = {"train": 455261, "validation": 1024}
    patterns: ClassVar[Mapping[str, tuple[str, ...]]] = {
        split: (split, f"{split}-*", f"data/{split}-*") for split in ("train", "validation", "test")
    }
    form: ClassVar[AnswerForm] = AnswerForm(
        "{problem}\n\nPresent the answer in LaTex format: \\boxed{Your answer}",
        r"\boxed{{answer}}",
        r"The final answer is $\boxed{{answer}}$.",
    )
    """PRIME's instruction."""

    @property
    def data_sources(self) -> tuple[str, ...]:
        return tuple(f"numina_{source}" for source in SOURCES)

    def source_of(self, row: RawRow) -> str:
        source = str(row.get("data_source") or row.get("source"))
        return source if source.startswith("numina_") else f"numina_{source}"

    def skip(self, row: RawRow) -> str | None:
        if self.source_of(row) not in self.data_sources:
            return "of another source"
        if given_truth(row) is not None or row.get("answer") is not None:
            return None
        return None if last_boxed(str(row.get("solution"))) else "the solution has no boxed answer"

    def problem(self, row: RawRow) -> str:
        given = given_prompt(row)
        if given is None:
            return without_figures(super().problem(row))
        before, after = self.form.prompt.split("{problem}")
        return super().problem({"problem": last_question(given).removeprefix(before).removesuffix(after)})

    def prompt(self, row: RawRow) -> list[Message]:
        asked = super().prompt(row)
        return given_prompt(row) or asked

    def gold(self, row: RawRow) -> str:
        given = given_truth(row)
        return super().gold(row if given is None else {"answer": given})
