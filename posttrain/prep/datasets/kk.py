"""Knights and Knaves (Xie et al. 2024, arXiv:2410.23123): logic puzzles of 3, 5 and 7 people, as in Logic-RL
(Xie et al. 2025, arXiv:2502.14768)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from posttrain.core.types import Message, Score
from posttrain.data.parquet import Conversation
from posttrain.prep.datasets.base import FileSet, RawRow, list_of, text_field
from posttrain.rewards import compute_score


class KnightsAndKnaves(FileSet):
    """Raw rows ``{"quiz", "names", "solution": [bool], "solution_text_format", "cot_head", "cot_repeat_steps",
    "cot_foot", "statements"}``; those of Logic-RL have a rendered ``prompt`` too, which is not used, because it holds
    one model's chat marks. All numbers of people that the source has make one split."""

    name = "kk"
    data_source = "kk"
    licence = "CC-BY-NC-SA-4.0 (Logic-RL's files: Apache-2.0)"
    hub_id: str | None = "K-and-K/knights-and-knaves"
    splits: tuple[str, ...] = ("train", "test")
    size: Mapping[str, int] = {"train": 3000, "test": 300}
    patterns: ClassVar[Mapping[str, tuple[str, ...]]] = {
        split: (
            f"[357]ppl_{split}",
            f"[357]ppl/{split}",
            f"{split}/people3_*|{split}/people5_*|{split}/people7_*",
            f"{split}-*",
            split,
        )
        for split in ("train", "test")
    }
    hub_files: ClassVar[tuple[str, ...]] = tuple(
        f"{split}/people{n}_*.jsonl" for split in ("train", "test") for n in (3, 5, 7)
    )
    system = (
        "You are a helpful assistant. The assistant first thinks about the reasoning process in the mind and then "
        "provides the user with the answer. The reasoning process and answer are enclosed within <think> </think> and"
        "<answer> </answer> tags, respectively, i.e., <think> reasoning process here </think><answer> answer here "
        "</answer>.  Now the user asks you to solve a logical reasoning problem. After thinking, when you finally "
        "reach a conclusion, clearly state the identity of each character within <answer> </answer> tags. i.e., "
        "<answer> (1) Zoey is a knight\n(2) ... </answer>."
    )
    """Logic-RL's instruction."""

    def to_rlhf(self, row: RawRow, index: int, split: str) -> dict[str, Any]:
        return {
            "data_source": self.data_source,
            "prompt": self._prompt(row),
            "ability": "logic",
            "reward_model": {"style": "rule", "ground_truth": self._truth(row)},
            "extra_info": {
                "split": split,
                "index": index,
                "answer": _field(row, "solution_text_format"),
                "question": _field(row, "quiz"),
                "people": len(list_of(row, "names")),
            },
        }

    def to_sft(self, row: RawRow, index: int, split: str) -> Conversation:
        return Conversation([*self._prompt(row), {"role": "assistant", "content": self._worked(row)}])

    def check(self, row: RawRow) -> Score:
        self._prompt(row)
        return compute_score(self.data_source, self._worked(row), self._truth(row))

    def _prompt(self, row: RawRow) -> list[Message]:
        return [{"role": "system", "content": self.system}, {"role": "user", "content": _field(row, "quiz")}]

    def _truth(self, row: RawRow) -> dict[str, str]:
        return {"solution_text_format": _field(row, "solution_text_format"), "statements": str(row.get("statements"))}

    def _worked(self, row: RawRow) -> str:
        steps = [row.get("cot_head"), *list_of(row, "cot_repeat_steps"), row.get("cot_foot")]
        thoughts = "\n".join(step for step in steps if isinstance(step, str) and step)
        return f"<think>\n{thoughts}\n</think>\n<answer>\n{_field(row, 'solution_text_format')}\n</answer>"


def _field(row: RawRow, name: str) -> str:
    return text_field(row, name).strip()
