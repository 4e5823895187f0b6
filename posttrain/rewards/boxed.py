r"""Where an answer stands in a response: ``\boxed{...}``, "answer is ...", the text after a mark such as ``</think>``.

Every search takes one pass over the text, whatever the text is.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = ["after", "answer_phrase", "last_boxed", "nesting", "truth_text"]

_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])[ \t]*(?=(\{)?)")
_TOKEN = re.compile(r"[0-9]|\\?[a-zA-Z]+")
_PHRASE = re.compile(r"answer(?: is|:)[:*\s]*+(\S[^\n]{0,200})", re.IGNORECASE)
_OPEN = {")": "(", "]": "[", "}": "{"}
_BRACKET = re.compile(r"[][(){}]")


def last_boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed{...}`` or ``\fbox{...}`` whose braces close, or None.

    Escaped braces (``\{``) do not count. ``\boxed 5`` is the one token ``5``, as TeX reads it.
    """
    ends: dict[int, int] | None = None
    for box in reversed(list(_BOX.finditer(text))):
        if box[1] is None:
            token = _TOKEN.match(text, box.end())
            if token is not None:
                return token[0]
            continue
        ends = _closing_braces(text) if ends is None else ends
        if box.end() in ends:
            return text[box.end() + 1 : ends[box.end()]].strip()
    return None


def _closing_braces(text: str) -> dict[int, int]:
    """Position of each opening brace that closes -> position of its closing brace."""
    ends: dict[int, int] = {}
    waiting: list[int] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            waiting.append(brace.start())
        elif brace[0] == "}" and waiting:
            ends[waiting.pop()] = brace.start()
    return ends


def nesting(text: str) -> int:
    """Greatest depth of brackets of any kind that close."""
    depth: dict[str, list[int]] = {"(": [], "[": [], "{": []}
    deepest = 0
    for bracket in _BRACKET.findall(text):
        if bracket in depth:
            depth[bracket].append(0)
        elif depth[_OPEN[bracket]]:
            inner = depth[_OPEN[bracket]].pop() + 1
            deepest = max(deepest, inner)
            if depth[_OPEN[bracket]]:
                depth[_OPEN[bracket]][-1] = max(depth[_OPEN[bracket]][-1], inner)
    return deepest


def after(text: str, mark: str) -> str | None:
    """What follows the last ``mark``, or None where there is no mark."""
    _, found, rest = text.rpartition(mark)
    return rest if found else None


def answer_phrase(text: str) -> str | None:
    """The rest of the line (200 characters at most) after the last "answer is" or "answer:", or None."""
    found = _PHRASE.findall(text)
    return found[-1].strip() if found else None


def truth_text(ground_truth: Any) -> str:
    """A ground truth as text.

    Raises:
        ValueError: it is empty, or neither text nor a number.
    """
    if isinstance(ground_truth, str):
        text = ground_truth.strip()
    elif isinstance(ground_truth, bool) or not hasattr(ground_truth, "__float__"):
        raise ValueError(f"ground truth {ground_truth!r} is neither text nor a number")
    else:
        text = str(ground_truth)
    if not text:
        raise ValueError("the ground truth is empty")
    return text
