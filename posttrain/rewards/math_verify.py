r"""Answers compared by value, by Hugging Face's math-verify: ``\frac{2}{4}`` is ``0.5``, ``2(x+1)`` is ``2x+2``."""

from __future__ import annotations

from typing import Any

from posttrain.core.types import Score
from posttrain.rewards.boxed import after, answer_phrase, last_boxed
from posttrain.rewards.symbolic import Answer, as_word, equal, find_answer, read_gold


def grade(response: str, ground_truth: Any, extra_info: dict[str, Any]) -> Score:
    r"""1.0 if the answer of the response has the value of the ground truth, else 0.0.

    The answer is the last box, else what follows "answer is", else the last formula or number of the response.
    ``ground_truth`` is an answer in LaTeX ("\\frac{1}{2}", "12"), or a text with a box or formulas. Where it is a word
    ("Yes"), the response must say that word in a box, after "answer is", or as its last line.

    ``extra_info["after"]``: a mark such as ``</think>``; only what follows its last occurrence is graded, and a
    response without it has no answer.

    May run for minutes on a hard integral: runs in a grader process, with a deadline.

    Raises:
        ValueError: the ground truth cannot be read as mathematics.
    """
    gold = read_gold(ground_truth)
    mark = extra_info.get("after")
    graded = response if mark is None else after(response, str(mark))
    if graded is None:
        return Score(score=0.0, correct=False)
    answer = find_answer(graded) if as_word(gold.text) is None else _find_word(graded)
    correct = answer is not None and equal(gold, answer)
    return Score(score=float(correct), correct=correct, extracted=None if answer is None else answer.text)


def _find_word(response: str) -> Answer | None:
    """The answer where a word is asked for: the box, else the word after "answer is", else a last line of one word.

    "The answer is yes or no" has none.
    """
    if last_boxed(response):
        return find_answer(response)
    lines = response.strip().splitlines()
    phrase = answer_phrase(response) or (lines[-1] if lines else "")
    words = phrase.replace("*", " ").replace(",", " ").replace(".", " ").split()
    if not words or as_word(words[0]) is None or (len(words) > 1 and answer_phrase(response) is None):
        return find_answer(response)
    if words[1:2] == ["or"]:
        return None
    return Answer(words[0], ())
