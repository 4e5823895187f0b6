"""What a dataset is, and what all math word problems in GSM8K's format share.

To add a dataset, write a class with the attributes and methods of ``Dataset`` (or derive from ``WordProblems``) and
register it: ``@DATASETS.register("mine")``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from posttrain.data.parquet import Conversation
from posttrain.errors import DataError
from posttrain.registry import Registry
from posttrain.rewards import compute_score
from posttrain.tools import gsm8k as tool
from posttrain.types import Message, Score

RawRow = dict[str, Any]


class Dataset(Protocol):
    """Raw rows to validated rows. Every method that reads raises ``DataError`` for bad input."""

    name: str
    data_source: str
    """Written into each row; ``posttrain.rewards.DATA_SOURCES`` maps it to its grader."""
    licence: str
    hub_id: str | None
    """Where it is fetched from without a source; None: it is generated."""
    splits: tuple[str, ...]

    def available(self, source: str | None) -> Sequence[str]:
        """The splits that can be had from ``source`` (a local folder or file; None: the hub, or generated)."""

    def rows(self, split: str, source: str | None, *, n: int | None = None, seed: int = 0) -> Iterator[RawRow]:
        """Raw rows of a split, at most ``n`` (None: all, or a generated dataset's default)."""

    def to_rlhf(self, row: RawRow, index: int, split: str) -> dict[str, Any]:
        """The row of RLHF parquet."""

    def to_sft(self, row: RawRow, index: int, split: str) -> Conversation:
        """The conversation to imitate."""

    def check(self, row: RawRow) -> Score:
        """The verdict of the dataset's own grader on the row's gold answer."""


DATASETS: Registry[type[Dataset]] = Registry(
    "dataset", {"gsm8k": "posttrain.datasets.gsm8k:Gsm8k", "arith": "posttrain.datasets.arith:Arith"}
)

_ANNOTATION = re.compile(r"<<[^<>]*>>")


class WordProblems:
    """Rows ``{"question", "answer"}`` whose answer ends with a line ``#### <number>``."""

    data_source: str
    system: str | None = None
    """System message of the prompt; None: the question alone."""

    def to_rlhf(self, row: RawRow, index: int, split: str) -> dict[str, Any]:
        gold = self.gold(row)
        return {
            "data_source": self.data_source,
            "prompt": self._prompt(row),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": gold},
            "extra_info": {
                "split": split,
                "index": index,
                "answer": row["answer"],
                "question": row["question"],
                "need_tools_kwargs": True,
                "tools_kwargs": {tool.FUNCTION: {"create_kwargs": {"ground_truth": gold}}},
            },
        }

    def to_sft(self, row: RawRow, index: int, split: str) -> Conversation:
        """The assistant reasons, hands its answer to the tool, reads the result and closes."""
        return self._conversation(row, reasoning(row["answer"]), self.gold(row), reward=1.0)

    def _conversation(self, row: RawRow, worked: str, answer: str, reward: float) -> Conversation:
        call: Message = {
            "role": "assistant",
            "content": worked,
            "tool_calls": [{"type": "function", "function": {"name": tool.FUNCTION, "arguments": {"answer": answer}}}],
        }
        result: Message = {"role": "tool", "name": tool.FUNCTION, "content": tool.result_text(answer, reward)}
        close: Message = {"role": "assistant", "content": f"#### {answer}"}
        return Conversation([*self._prompt(row), call, result, close], [tool.SCHEMA])

    def check(self, row: RawRow) -> Score:
        return compute_score(self.data_source, row["answer"], self.gold(row))

    def gold(self, row: RawRow) -> str:
        """The gold answer as text without separators: "1,000" becomes "1000". Raises ``DataError`` if there is none."""
        question, answer = row.get("question"), row.get("answer")
        if not isinstance(question, str) or not question.strip():
            raise DataError("`question` is missing or empty")
        if not isinstance(answer, str) or "####" not in answer:
            raise DataError("`answer` has no last line `#### <number>`")
        return answer.rpartition("####")[2].strip().replace(",", "")

    def _prompt(self, row: RawRow) -> list[Message]:
        question: Message = {"role": "user", "content": row["question"]}
        return [question] if self.system is None else [{"role": "system", "content": self.system}, question]


def reasoning(answer: str) -> str:
    """A worked answer without its calculator annotations ``<<...>>`` and its last line ``#### ...``."""
    return _ANNOTATION.sub("", answer.rpartition("####")[0]).strip()
