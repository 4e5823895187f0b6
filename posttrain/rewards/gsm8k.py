"""GSM8K's grader: the number after the last ``####``, compared as a number ("18.00" is "18", "1,000" is "1000")."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from posttrain.core.types import Score
from posttrain.rewards import cheap

# Digits with or without thousands separators; not part of a fraction, time, power of ten or broken grouping.
_DIGITS = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_SIGN = r"(?:(?<![0-9])[-+\u2212])?(?:\$[-\u2212]?)?"
_END = r"(?![0-9]|[.,/:][0-9]|[eE][-+]?[0-9]|\^)"
_ANYWHERE = re.compile(_SIGN + r"(?<![0-9.,/:^])" + _DIGITS + _END)
_AFTER_MARK = re.compile(r"####[ \t]*(" + _SIGN + _DIGITS + r")" + _END)


@cheap
def grade(response: str, ground_truth: Any, extra_info: dict[str, Any]) -> Score:
    """1.0 for the right final number, else 0.0; ``extracted`` is the number found, in plain form.

    ``extra_info["method"]``: "strict" (default) reads the last ``#### number``; "flexible" reads the last number.

    Raises:
        ValueError: the ground truth is not a number, or the method is unknown.
    """
    gold = parse_number(str(ground_truth))
    if gold is None:
        raise ValueError(f"ground truth {ground_truth!r} is not a number")
    method = extra_info.get("method") or "strict"  # null: parquet fills in what other rows have
    if method not in ("strict", "flexible"):
        raise ValueError(f"unknown method {method!r}: strict or flexible")
    found = extract(response) if method == "strict" else last_number(response)
    correct = found is not None and Decimal(found) == gold
    return Score(score=float(correct), correct=correct, extracted=found)


def extract(text: str) -> str | None:
    """The number after the last ``####`` that has one, in plain form ("1000", "-3.5"), or None."""
    found = _AFTER_MARK.findall(text)
    return _plain(found[-1]) if found else None


def last_number(text: str) -> str | None:
    """The last number anywhere in the text, in plain form, or None."""
    found = _ANYWHERE.findall(text)
    return _plain(found[-1]) if found else None


def parse_number(text: str) -> Decimal | None:
    """The value of a text that holds exactly one number ("8", "#### 8", "$1,000", "8 apples"), else None."""
    found = _ANYWHERE.findall(text)
    return Decimal(_plain(found[0])) if len(found) == 1 else None


def _plain(number: str) -> str:
    """ "$1,000.00" -> "1000"."""
    cleaned = number.replace(",", "").replace("$", "").replace("\u2212", "-")
    sign = "-" if "-" in cleaned else ""
    digits = cleaned.lstrip("+-")
    if "." in digits:
        digits = digits.rstrip("0").rstrip(".")
    digits = digits.lstrip("0") or "0"
    if digits.startswith("."):
        digits = "0" + digits
    return digits if digits == "0" else sign + digits
