"""Tasks whose answer is a Python program: HumanEval (Chen et al. 2021, arXiv:2107.03374), MBPP (Austin et al. 2021,
arXiv:2108.07732). For tasks of competitive programming see ``competition``."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from posttrain.core.errors import DataError
from posttrain.core.types import Message, Score
from posttrain.data.parquet import Conversation
from posttrain.prep.datasets.base import FileSet, RawRow, text_field
from posttrain.rewards import compute_score


class Programs(FileSet, ABC):
    """What sets of programming tasks share: the ground truth is JSON text of tests, the response a fenced program."""

    @abstractmethod
    def task(self, row: RawRow) -> str:
        """What the user asks. Raises ``DataError`` if it is missing."""

    @abstractmethod
    def tests(self, row: RawRow) -> dict[str, Any]:
        """What the grader reads as ground truth. Raises ``DataError`` if it is missing."""

    @abstractmethod
    def solution(self, row: RawRow) -> str | None:
        """A reference program, if there is one."""

    def source_of(self, row: RawRow) -> str:
        """The row's data source."""
        return self.data_source

    def prompt(self, row: RawRow) -> list[Message]:
        """The messages that ask the task."""
        return [{"role": "user", "content": self.task(row)}]

    def to_rlhf(self, row: RawRow, index: int, split: str) -> dict[str, Any]:
        return {
            "data_source": self.source_of(row),
            "prompt": self.prompt(row),
            "ability": "code",
            "reward_model": {"style": "rule", "ground_truth": json.dumps(self.tests(row), ensure_ascii=False)},
            "extra_info": {"split": split, "index": index, "answer": self.solution(row), "question": self.task(row)},
        }

    def to_sft(self, row: RawRow, index: int, split: str) -> Conversation | None:
        solution = self.solution(row)
        if solution is None:
            return None
        return Conversation([*self.prompt(row), {"role": "assistant", "content": fenced(solution)}])

    def check(self, row: RawRow) -> Score:
        """The verdict on the reference program. Without one "right" means that the grader can read the tests."""
        self.prompt(row)
        solution, tests = self.solution(row), self.tests(row)
        # The tests of an empty response are read, and not run.
        score = compute_score(self.source_of(row), "" if solution is None else fenced(solution), tests)
        return score if solution is not None or score.error else Score(score=1.0, correct=True)


class HumanEval(Programs):
    """Raw rows ``{"task_id", "prompt", "entry_point", "canonical_solution", "test"}``."""

    name = "humaneval"
    data_source = "openai/openai_humaneval"
    licence = "MIT"
    hub_id: str | None = "openai/openai_humaneval"
    splits: tuple[str, ...] = ("test",)
    size: Mapping[str, int] = {"test": 164}
    patterns: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "test": ("HumanEval", "humaneval", "openai_humaneval/test-*", "test", "test-*")
    }

    def task(self, row: RawRow) -> str:
        start = text_field(row, "prompt")
        return f"Complete this Python function. Answer with the whole program in one block.\n\n{fenced(start)}"

    def tests(self, row: RawRow) -> dict[str, Any]:
        return {name: text_field(row, name) for name in ("prompt", "test", "entry_point")}

    def solution(self, row: RawRow) -> str:
        return text_field(row, "prompt") + text_field(row, "canonical_solution")


class Mbpp(Programs):
    """Raw rows ``{"text", "code", "task_id", "test_list", "test_setup_code", "challenge_test_list"}``. Where one file
    holds all rows, the number of a task says its split, as published: 11-510 test, 511-600 validation, 601-974 train,
    1-10 for prompts with examples."""

    name = "mbpp"
    data_source = "google-research-datasets/mbpp"
    licence = "CC-BY-4.0"
    hub_id: str | None = "google-research-datasets/mbpp"
    splits: tuple[str, ...] = ("train", "validation", "test", "prompt")
    size: Mapping[str, int] = {"train": 374, "validation": 90, "test": 500, "prompt": 10}
    patterns: ClassVar[Mapping[str, tuple[str, ...]]] = {
        split: (f"full/{split}-*", f"{split}-*", split, "mbpp") for split in ("train", "validation", "test", "prompt")
    }
    hub_files: ClassVar[tuple[str, ...]] = ("full/*.parquet",)
    tasks: ClassVar[Mapping[str, range]] = {
        "prompt": range(1, 11),
        "test": range(11, 511),
        "validation": range(511, 601),
        "train": range(601, 975),
    }

    def belongs(self, row: RawRow, split: str) -> bool:
        try:
            return int(row["task_id"]) in self.tasks[split]
        except (KeyError, TypeError, ValueError):
            return True

    def task(self, row: RawRow) -> str:
        tests = "\n".join(self.tests(row)["test_list"])
        return (
            f"You are an expert Python programmer, and here is your task: {text_field(row, 'text')} "
            f"Your code should pass these tests:\n\n{fenced(tests)}"
        )

    def tests(self, row: RawRow) -> dict[str, Any]:
        tests = row.get("test_list")
        if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
            raise DataError("there are no tests", hint=f"the row has {', '.join(row)}")
        return {
            "test_list": tests,
            "test_setup_code": row.get("test_setup_code") or "",
            "challenge_test_list": row.get("challenge_test_list") or [],
        }

    def solution(self, row: RawRow) -> str:
        return text_field(row, "code").replace("\r\n", "\n")


def fenced(program: str) -> str:
    """A program in a Markdown fence."""
    return f"```python\n{program.rstrip()}\n```"
