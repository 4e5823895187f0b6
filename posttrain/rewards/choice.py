r"""Multiple choice: one or several letters A to J, from a box, "answer is (B)", "答案是B", or a last lone letter."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Any

from posttrain.core.types import Score
from posttrain.rewards import cheap
from posttrain.rewards.boxed import last_boxed

# Of one line, and no first letter of a word.
_LETTERS = r"[A-J](?>(?:[^\S\n]*+(?:(?:,|、|和|及|与|或|\band\b|\bor\b|&)[^\S\n]*+)?[A-J](?![a-z]))*)"
_OPENING = r"(?:\\(?:text|textbf|mathrm|mathbf)\s*+\{\s*+)?\(?\s*+"
_BEFORE = r"[\s\"'*$(\[{]*+"
# "the answer is A good one" has the article, "the answer is I think" the pronoun: no word but a reason may follow.
_CHOICE = _BEFORE + _OPENING + "(" + _LETTERS + r")(?![A-Za-z])(?!\s++(?!because|since|as\b)[a-z])"
_ENGLISH = r"(?i:(?:answer|option|choice)s?\s*+(?:is|are|:))"
# 选项D ("option D ...") and 不选D ("not D") say nothing of what is chosen.
_CHINESE = r"答案\s*+(?:应?(?:是|为|选)|:)|正确(?:的)?选项\s*+(?:是|为|:)|(?<!不)选(?!项)择?\s*+(?:是|为|:)?"
_NAMED = rf"(?:{_BEFORE}(?i:(?:the\s++)?(?:option|choice)s?+)(?![A-Za-z]))?"
_SAID = re.compile(rf"(?:{_ENGLISH}|{_CHINESE})\s*+:?{_NAMED}" + _CHOICE)
_FORMULA = re.compile(r"\\[()\[\]]")
"""The marks of formulas that are no dollar signs."""
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*+\{([^{}]*+)\}")
_BOX = re.compile(r"\s*+\(?\s*+(" + _LETTERS + r")(?![A-Za-z])\s*+(?:[).:,}\\].*)?", re.DOTALL)
_LONE = re.compile(r"[\s\"'*$(\[]*+(" + _LETTERS + r")[\s\"'*$)\].]*+")
_TRUTH = re.compile(r"[\s(\[]*([A-J](?:[\s,、;]*[A-J])*)[\s)\].]*")


@cheap
def grade(response: str, ground_truth: Any, extra_info: dict[str, Any]) -> Score:
    r"""1.0 if the letters that the response chooses are exactly those of the ground truth, in any order, else 0.0.

    ``ground_truth``: "B", "(B)", "ABD", "A, C", or a list of letters, which all belong to the one answer.
    The answer is the last ``\boxed`` with letters, else the last "answer is ..." (also Chinese), else a last line that
    is letters alone. ``extracted`` is the letters, sorted ("BD"). ``extra_info`` is not used.

    Raises:
        ValueError: the ground truth is not letters A to J, or names a letter twice.
    """
    gold = truth_letters(ground_truth)
    found = chosen_letters(response)
    correct = found == gold
    return Score(score=float(correct), correct=correct, extracted=found)


def truth_letters(ground_truth: Any) -> str:
    """The letters of a ground truth, sorted. Raises ``ValueError`` if it is no answer to one question."""
    parts = [ground_truth] if isinstance(ground_truth, str) or not isinstance(ground_truth, Iterable) else ground_truth
    matches = [_TRUTH.fullmatch(unicodedata.normalize("NFKC", str(part))) for part in parts]
    letters = [letter for match in matches if match is not None for letter in match[1] if letter.isalpha()]
    if not letters or None in matches:
        raise ValueError(f"ground truth {ground_truth!r} is not letters A to J")
    if len(set(letters)) < len(letters):
        raise ValueError(f"ground truth {ground_truth!r} names a letter twice: one row for each question")
    return "".join(sorted(letters))


def chosen_letters(response: str) -> str | None:
    """The letters that a response chooses, sorted, or None if it chooses none."""
    text = _FORMULA.sub("$", unicodedata.normalize("NFKC", response))
    box = last_boxed(text)
    match = _BOX.fullmatch(_WRAPPED.sub(r" \1 ", box.replace("$", " "))) if box else None
    if match is None:
        said = list(_SAID.finditer(text))
        match = said[-1] if said else _LONE.fullmatch(text.strip().rpartition("\n")[2])
    return _sorted_letters(match[1]) if match else None


def _sorted_letters(text: str) -> str:
    return "".join(sorted(set(re.findall(r"(?<![a-z])[A-J](?![a-z])", text))))
