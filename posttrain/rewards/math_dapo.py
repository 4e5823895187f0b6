r"""DAPO's grader (arXiv:2503.14476): an ``Answer:`` line near the end, compared as text in Minerva's way (Lewkowycz et
al. 2022, arXiv:2206.14858, appendix D.1). Right is 1.0 and wrong is -1.0."""

from __future__ import annotations

import re
from typing import Any

from posttrain.core.types import Score
from posttrain.rewards import cheap
from posttrain.rewards.boxed import last_boxed, truth_text
from posttrain.rewards.normal_form import tidy

WINDOW = 300
"""Characters at the end of a response that are searched for the answer line; DAPO's number."""
BOX_WINDOW = 100
"""The same where a box is required."""

_LINE = re.compile(r"answer\s?:[*\s]*+([^\n]+)", re.IGNORECASE)
_SPECIAL_TOKEN = re.compile(r"<\|[^|<>]{1,40}\|>")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_ZEROS = re.compile(r"(-?)0+(?=\d)")


@cheap
def grade(response: str, ground_truth: Any, extra_info: dict[str, Any]) -> Score:
    r"""1.0 if the last ``Answer: ...`` line in the last 300 characters says the ground truth, else -1.0.

    A box in that line is opened (``Answer: \boxed{42}``). Text is compared: ``0.5`` is not ``\frac{1}{2}``.
    ``extra_info["strict_box_verify"]`` true: the answer must be a ``\boxed`` in the last 100 characters instead.

    Raises:
        ValueError: the ground truth is empty, or neither text nor a number.
    """
    gold = minerva_form(truth_text(ground_truth))
    if not gold:
        raise ValueError(f"ground truth {ground_truth!r} has nothing to compare")
    found = last_boxed(response[-BOX_WINDOW:]) if extra_info.get("strict_box_verify") else _answer_line(response)
    correct = bool(found) and minerva_form(found or "") == gold
    return Score(score=1.0 if correct else -1.0, correct=correct, extracted=found or None)


def minerva_form(answer: str) -> str:
    """An answer without what does not count: the left side of an equation, units, thousands separators, typesetting."""
    boxed = last_boxed(answer)
    text = tidy((answer if boxed is None else boxed).split("=")[-1])
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    return _ZEROS.sub(r"\1", text, count=1) if text.lstrip("-").isdigit() else text


def _answer_line(response: str) -> str | None:
    lines = _LINE.findall(_SPECIAL_TOKEN.sub("", response[-WINDOW:]))
    if not lines:
        return None
    boxed = last_boxed(lines[-1])
    return (lines[-1] if boxed is None else boxed).strip(" *")
