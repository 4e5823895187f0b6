r"""PRIME's grader for maths (Cui et al. 2025, arXiv:2502.01456): the boxed answer, equal as text or else by value.

The sources that it serves (``numina_*``) have answers in LaTeX. Tuples and intervals are compared part by part.
"""

from __future__ import annotations

import re
from typing import Any

from posttrain.core.types import Score
from posttrain.rewards.boxed import last_boxed, truth_text
from posttrain.rewards.normal_form import same_answer, tidy
from posttrain.rewards.symbolic import describes, equal, read_answer, read_gold

LONGEST_BARE = 500
"""Characters of the longest response without a box that may be an answer itself."""

_COMMANDS = re.compile(r"\\(?:begin|end)\{[a-z]{1,20}\*?\}|\\[a-zA-Z]+")
_WORDS = re.compile(r"[a-zA-Z]{3}|[a-zA-Z]{2}\s+[a-zA-Z]{2}")


def grade(response: str, ground_truth: Any, extra_info: dict[str, Any]) -> Score:
    """1.0 if the last box equals the ground truth, as text or by value, else 0.0.

    Without a box, a short response that is nothing but an expression is the answer. ``extra_info`` is not used.

    Raises:
        ValueError: the ground truth is empty, or (where the texts differ) cannot be read as mathematics.
    """
    truth = truth_text(ground_truth)
    gold = last_boxed(truth) or truth
    found = last_boxed(response) or _bare(response)
    correct = found is not None and equal_by_parts(gold, found)
    return Score(score=float(correct), correct=correct, extracted=found)


def equal_by_parts(gold: str, found: str) -> bool:
    """Equality of two answers in LaTeX; a tuple or interval needs the same brackets and each part in its place, or to
    be described without brackets: ``x > 2``, ``x = 1, y = 2``."""
    if same_answer(gold, found):
        return True
    gold_parts = _parts(gold)
    if gold_parts is None:
        return _equal(gold, found)
    # Read first: a ground truth that cannot be read is an error, whatever was answered.
    golds = [read_gold(part) for part in gold_parts[1]]
    parts = _parts(found)
    if parts is None:
        answer = read_answer(found)
        return answer is not None and describes(answer) and equal(read_gold(gold), answer)
    if parts[0] != gold_parts[0] or len(parts[1]) != len(golds):
        return False
    return all(_equal(part, other) for part, other in zip(gold_parts[1], parts[1], strict=True))


def _equal(gold: str, found: str) -> bool:
    expected = read_gold(gold)
    answer = read_answer(found)
    return answer is not None and equal(expected, answer)


def _parts(answer: str) -> tuple[str, list[str]] | None:
    """The brackets and parts of ``(a, b)`` or ``[a, b)``; None for anything else, such as ``(a, b), (c, d)``."""
    text = tidy(answer)
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]":
        return None
    depth, start, parts = 0, 1, []
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and position < len(text) - 1:
            return None
        if depth == 1 and character == ",":
            parts.append(text[start:position])
            start = position + 1
    parts.append(text[start:-1])
    return (text[0] + text[-1], parts) if len(parts) > 1 and all(parts) else None


def _bare(response: str) -> str | None:
    text = response.strip()
    if not 0 < len(text) <= LONGEST_BARE or r"\boxed" in text or _WORDS.search(_COMMANDS.sub(" ", text)):
        return None
    return text
