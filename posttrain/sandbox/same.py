"""Compare a result with what a data set expects. Stdlib only: the tests' process finds this file by its path."""

from __future__ import annotations

import math
from collections import deque
from decimal import Decimal
from typing import Any

_CLOSE = 1e-6


def close(number: float, wanted: str) -> bool:
    """Return whether a number is as near to a decimal text as its digits tell: within 1e-6 of its value, or absolutely
    within 1e-6 or half a unit of its last digit, whichever is less. 0 is not near to 0.0000005."""
    target = Decimal(wanted)
    last = target.as_tuple().exponent
    if not isinstance(last, int):  # nan, infinity
        return number == float(target) or (math.isnan(number) and target.is_nan())
    slack = min(_CLOSE, 0.5 * 10.0 ** min(last, 0))
    return math.isclose(number, float(target), rel_tol=_CLOSE, abs_tol=slack)


def same_result(result: Any, expected: Any) -> bool:
    """Return whether a result equals what JSON can express of it: a tuple or a deque is a list, keys are text, an
    expected number with a point need only be close, one without must be met exactly, and ``true`` is not 1."""
    if isinstance(expected, list):
        same_length = isinstance(result, list | tuple | deque) and len(result) == len(expected)
        return same_length and all(map(same_result, result, expected))
    if isinstance(expected, dict):
        if not isinstance(result, dict):
            return False
        texts = {str(key): value for key, value in result.items()}
        return texts.keys() == expected.keys() and all(same_result(texts[key], expected[key]) for key in expected)
    if isinstance(expected, bool) or isinstance(result, bool) or not isinstance(result, int | float):
        return type(result) is type(expected) and bool(result == expected)
    if isinstance(expected, float):
        return isinstance(result, float | int) and _close_to(result, expected)
    return isinstance(expected, int) and result == expected


def _close_to(result: float, expected: float) -> bool:
    try:
        return close(float(result), repr(expected))
    except OverflowError:  # an integer beyond all floats
        return False
