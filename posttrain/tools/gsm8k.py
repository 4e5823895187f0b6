"""The tool of GSM8K-like data: the model hands in its answer and reads the reward it would get."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from posttrain.core.errors import DataError
from posttrain.core.types import Prompt, ToolSchema
from posttrain.rewards.gsm8k import extract, last_number, parse_number
from posttrain.tools.base import Tool, ToolResult, row_kwargs

FUNCTION = "calc_gsm8k_reward"


SCHEMA: ToolSchema = {
    "type": "function",
    "function": {
        "name": FUNCTION,
        "description": "Check an answer: the reward is 1.0 if it is right, 0.0 if not.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "The final number, without units."}},
            "required": ["answer"],
        },
    },
}


@dataclass
class Gsm8kState:
    ground_truth: Decimal
    best: float | None = None
    """Best reward of the calls so far; None before the first."""


class Gsm8kTool(Tool):
    """Checks an answer against the row's ground truth; the model calls it ``calc_gsm8k_reward``. Its reward is 1 once
    an answer was right. Scores sampled with it are no scores of a benchmark."""

    name = FUNCTION
    schema = SCHEMA
    tells_answer = True

    async def create(self, prompt: Prompt) -> Gsm8kState:
        """Raises ``DataError`` when the row's ground truth is not a number."""
        truth = row_kwargs(prompt, self.name, "create_kwargs").get("ground_truth", prompt.ground_truth)
        number = parse_number(str(truth))
        if number is None:
            raise DataError(
                f"row {prompt.index}: the ground truth {truth!r} is not a number, which tool 'gsm8k' needs",
                hint="leave the tool out of rollout.tools for this data",
            )
        return Gsm8kState(number)

    async def call(self, state: Gsm8kState, arguments: dict[str, Any]) -> ToolResult:
        if unknown := sorted(set(arguments) - {"answer"}):
            return ToolResult(f"error: unknown argument {unknown[0]!r}; give only 'answer'", error=True)
        if "answer" not in arguments:
            return ToolResult("error: argument 'answer' is missing", error=True)
        answer = arguments["answer"]
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            return ToolResult("error: argument 'answer' must be a string with one number", error=True)
        found = _number(str(answer))
        reward = float(found is not None and Decimal(found) == state.ground_truth)
        state.best = reward if state.best is None else max(state.best, reward)
        # Only a number is echoed: other text of the model could hold tokens of the chat format.
        return ToolResult(result_text(found or "not-a-number", reward))

    async def reward(self, state: Gsm8kState) -> float | None:
        return state.best


def result_text(answer: str, reward: float) -> str:
    """What the model reads after a call, in SFT data and in episodes alike."""
    return f"answer={answer} reward={reward:.1f}"


def _number(text: str) -> str | None:
    """The answer in plain form: after ``####`` if that is there, else the one number of the text."""
    if "####" in text:
        return extract(text)
    return last_number(text) if parse_number(text) is not None else None
