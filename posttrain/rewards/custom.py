"""A grading function of the user's own: ``reward.function = "my_file.py:name"``."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from posttrain.errors import ConfigError
from posttrain.registry import load_object
from posttrain.rewards import checked, raised
from posttrain.types import Score

RewardFunction = Callable[..., Any]
"""``(data_source, solution_str, ground_truth, extra_info, **kwargs)``, the signature verl uses; plain or ``async``."""


def load_function(path: str) -> RewardFunction:
    """The function that ``my_file.py:name`` or ``package.module:name`` names.

    Raises:
        ConfigError: there is no such file, module or function.
    """
    function: RewardFunction = load_object(path, what="reward.function")
    if not callable(function):
        raise ConfigError(f"reward.function: {path} is {type(function).__name__}, not a function")
    return function


def call_function(
    function: RewardFunction,
    kwargs: Mapping[str, Any],
    data_source: str,
    response: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
) -> Score:
    """Call it by keyword, as verl does, and make a ``Score`` of what it returns. What it raises is ``Score.error``."""
    name = f"reward.function {getattr(function, '__name__', function)!r}"
    try:
        result = function(
            data_source=data_source,
            solution_str=response,
            ground_truth=ground_truth,
            extra_info=extra_info,
            **kwargs,
        )
        if inspect.isawaitable(result):
            result = asyncio.run(_wait(result))
        return checked(to_score(result), name)
    except Exception as error:
        return raised(name, error)


async def _wait(result: Any) -> Any:
    return await result


def to_score(result: Any) -> Score:
    """A ``Score`` as it is; a number; or a mapping with ``score``, and perhaps ``acc`` or ``correct``, ``pred`` or
    ``extracted``, and other numbers, which become parts. Without ``acc``, correct is a score of at least 1.

    Raises:
        TypeError, ValueError: it is something else.
    """
    if isinstance(result, Score):
        return result
    if isinstance(result, Mapping):
        if "score" not in result:
            raise ValueError(f"the dict it returned has no 'score': {sorted(map(str, result))}")
        rest = {str(key): value for key, value in result.items() if key != "score"}
        score = _number(result["score"])
        correct = bool(rest.pop("correct", rest.pop("acc", score >= 1.0)))
        extracted = rest.pop("extracted", rest.pop("pred", None))
        parts = {key: float(value) for key, value in rest.items() if isinstance(value, bool | int | float)}
        return Score(score, correct, None if extracted is None else str(extracted), parts)
    score = _number(result)
    return Score(score, score >= 1.0, extracted=str(result))


def _number(value: Any) -> float:
    if value is None or isinstance(value, str):
        raise TypeError(f"the score is {value!r}, not a number")
    return float(value)
