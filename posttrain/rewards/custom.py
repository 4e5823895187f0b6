"""A grading function of the user's own: ``reward.function = "my_file.py:name"``."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.core.errors import CodeError, ConfigError
from posttrain.core.plugins import definition_of, innermost_is_in_a_file, number_of, with_place
from posttrain.core.registry import load_object
from posttrain.core.text import shortened
from posttrain.core.types import Score
from posttrain.core.user_calls import value_of
from posttrain.rewards import checked, raised

RewardFunction = Callable[..., Any]
"""``(data_source, solution_str, ground_truth, extra_info, **kwargs)``, the signature verl uses; plain or ``async``."""

_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_BUGS = (NameError, TypeError, AttributeError, ImportError, NotImplementedError)
"""What the code of a function raises, and not the row that it is given."""


@dataclass(frozen=True)
class BrokenFunction(Score):
    """The verdict of a function that is wrong whatever the row is: a bug, or a result that is no score."""


def load_function(path: str, kwargs: Mapping[str, Any] | None = None) -> RewardFunction:
    """Return the function that ``my_file.py:name`` or ``package.module:name`` names.

    Args:
        kwargs: `reward.function_kwargs`, where it shall be found out whether the function takes them.

    Raises:
        ConfigError: there is no such file, module or function. As ``CodeError``: it raises while it is imported, or
            does not take the arguments of a reward function.
    """
    function: RewardFunction = load_object(path, what="reward.function")
    if not callable(function):
        raise ConfigError(f"reward.function: {path} is {type(function).__name__}, not a function")
    if kwargs is not None:
        _check_signature(function, path, kwargs)
    return function


def _check_signature(function: RewardFunction, path: str, kwargs: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a function written in C
        return
    try:
        signature.bind(**dict.fromkeys(_ARGUMENTS), **kwargs)
    except TypeError as error:
        message = f"reward.function: {path} cannot be called as a reward function: {error}"
        raise CodeError(
            with_place(message, definition_of(function)),
            hint=f"it is called with {', '.join([*_ARGUMENTS, *kwargs])}, by keyword; `**kwargs` takes the rest",
        ) from error


def call_function(
    function: RewardFunction,
    kwargs: Mapping[str, Any],
    data_source: str,
    response: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
) -> Score:
    """Call it by keyword, as verl does, and make a ``Score`` of what it returns. What it raises is ``Score.error``, of
    a ``BrokenFunction`` where it is the function's own fault."""
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
            result = asyncio.run(value_of(result))
    except (SystemExit, asyncio.CancelledError, Exception) as error:
        # An answer that is evaluated may raise a NameError too.
        bug = isinstance(error, SystemExit) or (isinstance(error, _BUGS) and innermost_is_in_a_file(error))
        verdict = raised(name, error, function)
        return BrokenFunction(0.0, correct=False, error=verdict.error) if bug else verdict
    try:
        score = to_score(result)
    except (TypeError, ValueError) as error:
        message = with_place(f"{name} returned no score: {error}", definition_of(function))
        return BrokenFunction(0.0, correct=False, error=message)
    return checked(score, name)


def to_score(result: Any) -> Score:
    """A ``Score`` as it is; a number; or a mapping with ``score``, and perhaps ``acc`` or ``correct``, ``pred`` or
    ``extracted``, and other numbers, which become parts. Correct is an ``acc``, or without one a score, of at least 1.
    A number alone has no ``extracted``.

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
        right = rest.pop("correct", rest.pop("acc", None))
        correct = (score if right is None else _number(right, "acc")) >= 1.0
        extracted = rest.pop("extracted", rest.pop("pred", None))
        parts = {key: number for key, value in rest.items() if (number := number_of(value)) is not None}
        return Score(score, correct, None if extracted is None else str(extracted), parts)
    score = _number(result)
    # It does not say which answer was found: there is none to vote on, but none is missing either.
    return Score(score, score >= 1.0, parts={"format": 1.0})


def _number(value: Any, what: str = "the score") -> float:
    number = number_of(value)
    if number is None:
        raise TypeError(f"{what} is {shortened(repr(value), 80)}, not a number")
    return number
