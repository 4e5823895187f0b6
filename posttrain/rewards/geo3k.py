r"""Geometry3K (Lu et al. 2021, arXiv:2105.04165), as RL recipes grade it: 0.9 for the answer, 0.1 for the format."""

from __future__ import annotations

import re
from typing import Any

from posttrain.core.types import Score
from posttrain.rewards.boxed import last_boxed
from posttrain.rewards.symbolic import equal, read_answer, read_gold

FORMAT_WEIGHT = 0.1

_THINK = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)


def grade(response: str, ground_truth: Any, extra_info: dict[str, Any]) -> Score:
    r"""0.9 x accuracy + 0.1 x format; ``correct`` is the accuracy alone, ``parts`` has both.

    accuracy: the last ``\boxed`` has the value of the ground truth. format: the response starts with
    ``<think>...</think>`` and has a ``\boxed`` after it. ``extra_info`` is not used.

    Raises:
        ValueError: the ground truth cannot be read as mathematics.
    """
    gold = read_gold(ground_truth)
    found = last_boxed(response)
    answer = read_answer(found) if found else None
    correct = answer is not None and equal(gold, answer)
    thought = _THINK.match(response)
    formatted = thought is not None and bool(last_boxed(response[thought.end() :]))
    score = (1 - FORMAT_WEIGHT) * correct + FORMAT_WEIGHT * formatted
    return Score(
        score=score,
        correct=correct,
        extracted=found or None,
        parts={"accuracy": float(correct), "format": float(formatted)},
    )
