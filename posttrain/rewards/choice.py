r"""Multiple choice: one or several letters A to J, from a box, "answer is (B)", "答案是B", or a last lone letter."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Any

from posttrain.core.types import Score
from posttrain.rewards import cheap
from posttrain.rewards.boxed import last_boxed

_SPACE = r"[^\S\n]*+"
_OPENING, _CLOSING = r"\"'*$(\[“‘【", r"\"'*$)\]”’】"
_OPEN, _CLOSE = f"[{_OPENING}]", f"[{_CLOSING}]"
# "the answer is A good one" has the article, "the answer is I think" the pronoun: no word but a reason may follow.
_REASON = r"because|since|as\b"
_NO_WORD = rf"(?!\s++(?!{_REASON})[a-z])"
_AND = r"(?:、|和|及|与|或|\band\b|\bor\b|[&/+])"
_LINK = rf"(?:{_CLOSE}*+{_SPACE}{_AND}{_SPACE}{_OPEN}*+|{_SPACE}|{_CLOSE}++{_SPACE}{_OPEN}++)"
# Of one line, and no first letter of a word: "AC", "A and C", "(A)(C)", "**A**/**C**".
_GROUP = rf"[A-J](?>(?:{_LINK}[A-J](?![a-z])(?!\s++(?!{_REASON}|and\b|or\b)[a-z]))*)"
_COMMA = rf"{_CLOSE}*+{_SPACE}[,;]{_SPACE}(?:{_AND}{_SPACE})?{_OPEN}*+"
# After a comma something else may be said of other letters: "A, B is wrong", 选A,B错. A,C两项 means "A and C, the two".
_NO_CLAUSE = rf"(?![A-Za-z]|{_CLOSE}*+{_SPACE}(?!{_REASON}|[二两三四五]项)[a-z\u4e00-\u9fff])"
_LETTERS = rf"(?>{_GROUP}(?:{_COMMA}(?>{_GROUP}){_NO_CLAUSE})*)"
_BEFORE = rf"[\s{_OPENING}{{]*+"
_CHOICE = rf"{_BEFORE}({_LETTERS})(?![A-Za-z]){_NO_WORD}"
_ENGLISH = r"(?i:(?:answer|option|choice)s?\s*+(?:is|are|:))"
# 选项D ("option D ...") and 不选D and 不应选D ("not D") say nothing of what is chosen.
_NOT = r"(?<!不)(?<!不[应该能可会要宜])"
_CHINESE = rf"答案\s*+(?:应?(?:是|为|选)|:)|正确(?:的)?选项\s*+(?:是|为|:)|{_NOT}选(?!项)择?\s*+(?:是|为|:)?"
_NAMED = rf"(?:{_BEFORE}(?i:(?:the\s++)?(?:option|choice)s?+)(?![A-Za-z]))?"
_SAID = re.compile(rf"(?:{_ENGLISH}|{_CHINESE})\s*+:?{_NAMED}" + _CHOICE)
_FORMULA = re.compile(r"\\[()\[\]]")
"""The marks of formulas that are no dollar signs."""
_FONT = r"\\(?:text|textbf|mathrm|mathbf)\s*+\{"
_LETTER_IN_FONT = re.compile(rf"{_FONT}\s*+\(?([A-J])\)?\s*+\}}")
_WRAPPED = re.compile(_FONT + r"([^{}]*+)\}")
_BETWEEN_BOXES = re.compile(
    rf"(?<=[A-J])\)?\}}[\s$]*+(?:[,;]|{_AND})[\s$]*+(?:{_AND}[\s$]*+)?\\(?:boxed|fbox)\{{(?=\(?[A-J][^a-z])"
)
_BOX = re.compile(rf"{_BEFORE}({_LETTERS})(?![A-Za-z])\s*+(?:[).:,}}\\].*)?", re.DOTALL)
_LONE = re.compile(rf"{_BEFORE}({_LETTERS})[\s{_CLOSING}.]*+")
_TRUTH = re.compile(r"[\s(\[]*([A-J](?:[\s,、;]*[A-J])*)[\s)\].]*")


@cheap
def grade(response: str, ground_truth: Any, extra_info: dict[str, Any]) -> Score:
    r"""1.0 if the letters that the response chooses are exactly those of the ground truth, in any order, else 0.0.

    ``ground_truth``: "B", "(B)", "ABD", "A, C", or a list of letters, which all belong to the one answer.
    The answer is the last ``\boxed`` with letters, or several with "and" or a comma between them, else the last
    "answer is ..." (also Chinese), else a last line that is letters alone. ``extracted`` is the letters, sorted ("BD").
    ``extra_info`` is not used.

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
    text = _WRAPPED.sub(r" \1 ", _LETTER_IN_FONT.sub(r"(\1)", text))
    box = last_boxed(_BETWEEN_BOXES.sub(", ", text))
    match = _BOX.fullmatch(box.replace("$", " ")) if box else None
    if match is None:
        said = list(_SAID.finditer(text))
        match = said[-1] if said else _LONE.fullmatch(text.strip().rpartition("\n")[2])
    return _sorted_letters(match[1]) if match else None


def _sorted_letters(text: str) -> str:
    return "".join(sorted(set(re.findall(r"(?<![a-z])[A-J](?![a-z])", text))))
