"""A task of your own in one file: a data set, a tool and a reward. docs/your-own-task.md says how to run it."""

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

from posttrain.core.types import Message, Score, ToolCall
from posttrain.data.parquet import Conversation
from posttrain.prep.datasets import DATASETS, Dataset
from posttrain.rewards import DATA_SOURCES, GRADERS, cheap, compute_score
from posttrain.tools import TOOLS, Tool, ToolResult, function_schema

DATA_SOURCES["my/larger"] = "larger"  # rows of this data source are judged by the grader of this name


@GRADERS.register("larger")
@cheap  # takes microseconds, cannot hang: runs in process. Others get a process of their own and a deadline
def grade(response: str, ground_truth: Any, extra_info: dict[str, Any]) -> Score:
    correct = re.findall(r"\d+", response)[-1:] == [ground_truth]  # the last number it wrote
    return Score(float(correct), correct)


def larger(a: int, b: int) -> int:
    """The larger of two numbers."""
    return max(a, b)


@TOOLS.register("larger")
class LargerTool(Tool):
    name, schema = "larger", function_schema(larger)

    async def call(self, state: Any, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(str(larger(int(arguments["a"]), int(arguments["b"]))))  # the model reads an exception too


@DATASETS.register("larger")
class Larger(Dataset):
    name, data_source, licence, hub_id, splits = "larger", "my/larger", "CC0-1.0", None, ("train", "test")

    def available(self, source: str | None) -> Sequence[str]:
        return self.splits

    def rows(self, split: str, source: str | None, *, n: int | None = None, seed: int = 0) -> Iterator[dict[str, Any]]:
        pairs = [p for p in itertools.permutations(range(1, 10), 2) if (sum(p) % 5 == 0) == (split == "test")]
        for a, b in random.Random(seed).sample(pairs, min(n or len(pairs), len(pairs))):
            prompt = [{"role": "user", "content": f"Which is larger, {a} or {b}?"}]
            yield {"prompt": prompt, "args": {"a": a, "b": b}, "gold": str(larger(a, b))}

    def to_rlhf(self, row: dict[str, Any], index: int, split: str) -> dict[str, Any]:
        return {"data_source": self.data_source, "prompt": row["prompt"], "reward_model": {"ground_truth": row["gold"]}}

    def to_sft(self, row: dict[str, Any], index: int, split: str) -> Conversation:
        call: ToolCall = {"function": {"name": "larger", "arguments": row["args"]}}
        work: list[Message] = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": row["gold"]}]
        return Conversation([*row["prompt"], *work, {"role": "assistant", "content": row["gold"]}], [LargerTool.schema])

    def check(self, row: dict[str, Any]) -> Score:
        return compute_score(self.data_source, row["gold"], row["gold"])
