"""Graders: ``(data_source, response, ground_truth, extra_info) -> Score``.

``DATA_SOURCES`` is the one table that says which grader judges which data. A user's file adds a grader with
``@GRADERS.register("mine")`` and a row with ``DATA_SOURCES["my/data"] = "mine"``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from posttrain.errors import ConfigError
from posttrain.registry import Registry, nearest
from posttrain.types import Score

__all__ = ["DATA_SOURCES", "GRADERS", "Grader", "cheap", "compute_score", "grader_name", "is_cheap"]


class Grader(Protocol):
    """Judges one response. May raise: ``compute_score`` turns that into ``Score.error``, never into a silent 0."""

    def __call__(self, response: str, ground_truth: Any, extra_info: dict[str, Any]) -> Score: ...


GRADERS: Registry[Grader] = Registry("grader", {"gsm8k": "posttrain.rewards.gsm8k:grade"})

DATA_SOURCES: dict[str, str] = {
    "openai/gsm8k": "gsm8k",
    "posttrain/arith": "gsm8k",
}

F = TypeVar("F", bound=Callable[..., Score])


def cheap(grader: F) -> F:
    """Decorator: this grader takes microseconds and cannot hang, so it runs in process, without a deadline."""
    grader.cheap = True  # type: ignore[attr-defined]
    return grader


def grader_name(data_source: str) -> str:
    """The grader of a data source. Raises ``ConfigError`` for an unknown one, naming the nearest."""
    name = DATA_SOURCES.get(data_source)
    if name is None:
        close = nearest(data_source, DATA_SOURCES)
        hint = f"did you mean {close!r}?" if close else f"known: {', '.join(sorted(DATA_SOURCES))}"
        raise ConfigError(f"no grader for data source {data_source!r}", hint=hint)
    return name


def is_cheap(data_source: str) -> bool:
    return bool(getattr(GRADERS.get(grader_name(data_source)), "cheap", False))


def compute_score(
    data_source: str, response: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> Score:
    """Grade one response in this process.

    A grader that raises, or returns something that is not a finite ``Score``, gives ``Score(error=...)``.

    Raises:
        ConfigError: no grader is known for ``data_source``.
    """
    name = grader_name(data_source)
    grader = GRADERS.get(name)
    try:
        score = grader(response, ground_truth, extra_info or {})
    except Exception as error:
        return failed(f"grader {name!r} raised {type(error).__name__}: {error}")
    if not isinstance(score, Score):
        return failed(f"grader {name!r} returned {type(score).__name__}, not Score")
    if not math.isfinite(score.score):
        return failed(f"grader {name!r} returned the score {score.score}")
    return score


def failed(message: str) -> Score:
    """The verdict of a grader that could not give one."""
    return Score(score=0.0, correct=False, error=message)
