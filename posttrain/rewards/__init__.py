"""Graders: ``(data_source, response, ground_truth, extra_info) -> Score``.

``DATA_SOURCES`` is the one table that says which grader judges which data; ``*`` in a name stands for anything. A
user's file adds a grader with ``@GRADERS.register("mine")`` and a row with ``DATA_SOURCES["my/data"] = "mine"``.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import replace
from math import isfinite  # `math` is the name of a grader in this package
from typing import Any, Protocol, TypeVar

from posttrain.core.errors import ConfigError
from posttrain.core.plugins import described, number_of
from posttrain.core.registry import Registry, nearest
from posttrain.core.types import Score

__all__ = [
    "DATA_SOURCES",
    "GRADERS",
    "Grader",
    "cheap",
    "checked",
    "compute_score",
    "failed",
    "grader_name",
    "is_cheap",
    "item_deadline_s",
    "needs_sandbox",
    "sandboxed",
]


class Grader(Protocol):
    """Judges one response. May raise: ``compute_score`` turns that into ``Score.error``, never into a silent 0."""

    def __call__(self, response: str, ground_truth: Any, extra_info: dict[str, Any]) -> Score: ...


GRADERS: Registry[Grader] = Registry(
    "grader",
    {
        "apps": "posttrain.rewards.code:grade_apps",
        "choice": "posttrain.rewards.choice:grade",
        "geo3k": "posttrain.rewards.geo3k:grade",
        "gsm8k": "posttrain.rewards.gsm8k:grade",
        "humaneval": "posttrain.rewards.code:grade_humaneval",
        "kk": "posttrain.rewards.kk:grade",
        "math": "posttrain.rewards.math:grade",
        "math_dapo": "posttrain.rewards.math_dapo:grade",
        "math_verify": "posttrain.rewards.math_verify:grade",
        "mbpp": "posttrain.rewards.code:grade_mbpp",
        "prime_code": "posttrain.rewards.code:grade_prime_code",
        "prime_math": "posttrain.rewards.prime_math:grade",
    },
)

DATA_SOURCES: dict[str, str] = {
    "openai/gsm8k": "gsm8k",
    "posttrain/arith": "gsm8k",
    "posttrain/shapes": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math_dapo": "math_dapo",
    "aime*": "math_dapo",
    "amc23": "math_dapo",
    "Hothan/OlympiadBench": "prime_math",
    "math-ai/minervamath": "prime_math",
    "zwhe99/DeepMath-103K": "prime_math",
    "weitianwen/cmath": "math_verify",
    "gaokao_choice": "choice",
    "gaokao_cloze": "math_verify",
    "numina_aops_forum": "prime_math",
    "numina_synthetic_math": "prime_math",
    "numina_amc_aime": "prime_math",
    "numina_synthetic_amc": "prime_math",
    "numina_cn_k12": "prime_math",
    "numina_olympiads": "prime_math",
    "codecontests": "prime_code",
    "apps": "apps",
    "codeforces": "prime_code",
    "taco": "apps",
    "openai/openai_humaneval": "humaneval",
    "google-research-datasets/mbpp": "mbpp",
    "kk": "kk",
    "kk_logic": "kk",
    "hiyouga/geometry3k": "geo3k",
}

F = TypeVar("F", bound=Callable[..., Score])


def cheap(grader: F) -> F:
    """Decorator: this grader takes microseconds and cannot hang, so it runs in process, without a deadline."""
    vars(grader)["cheap"] = True
    return grader


def sandboxed(grader: F) -> F:
    """Decorator: this grader runs programs in the sandbox (``posttrain.sandbox.shared_sandbox``)."""
    vars(grader)["sandboxed"] = True
    return grader


def grader_name(data_source: str) -> str:
    """The grader of a data source: of its own row, else of the first row with ``*`` that matches.

    Raises:
        ConfigError: there is none; the hint has the nearest name.
    """
    name = DATA_SOURCES.get(data_source)
    if name is None:
        patterns = (pattern for pattern in DATA_SOURCES if "*" in pattern)
        name = next((DATA_SOURCES[p] for p in patterns if fnmatch.fnmatchcase(data_source, p)), None)
    if name is None:
        close = nearest(data_source, DATA_SOURCES)
        guess = f"did you mean {close!r}? Else " if close else ""
        raise ConfigError(
            f"no grader for data source {data_source!r}",
            hint=f"{guess}bring one in a file of yours, --plugin my_task.py: DATA_SOURCES[{data_source!r}] = the "
            "name of a grader (docs/your-own-task.md); or grade every row with --set reward.function=my_task.py:grade",
        )
    return name


def is_cheap(data_source: str) -> bool:
    return bool(getattr(GRADERS.get(grader_name(data_source)), "cheap", False))


def needs_sandbox(data_source: str) -> bool:
    return bool(getattr(GRADERS.get(grader_name(data_source)), "sandboxed", False))


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
    except (SystemExit, Exception) as error:
        return raised(f"grader {name!r}", error, grader)
    return checked(score, f"grader {name!r}")


def checked(score: object, who: str) -> Score:
    """``score`` if it is a finite ``Score``, with `correct` as Python's truth value and `extracted` as text; else the
    failure that ``who`` returned something else."""
    if not isinstance(score, Score):
        return failed(f"{who} returned {type(score).__name__}, not Score")
    numbers = {"score": score.score, **score.parts}
    for name, value in numbers.items():
        try:
            finite = not isinstance(value, str) and isfinite(value)
        except (TypeError, ValueError, OverflowError):
            finite = False
        if not finite:
            return failed(f"{who} returned {value!r} as {name!r}, which is no finite number")
    right, found = number_of(score.correct), score.extracted
    if right not in (0.0, 1.0):
        return failed(f"{who} returned {score.correct!r} as 'correct', which is neither true nor false")
    return replace(score, correct=bool(right), extracted=None if found is None else str(found))


_deadline_s: float | None = None


def set_item_deadline(seconds: float) -> None:
    """Called by a grader process with `reward.deadline_s`, after which it is killed."""
    global _deadline_s
    _deadline_s = seconds


def item_deadline_s() -> float:
    """How long this process may take for one item. A grader that would take longer has to end by itself before."""
    if _deadline_s is not None:
        return _deadline_s
    from posttrain.config import RewardConfig  # on demand: it takes longer to import than graders do

    return RewardConfig().deadline_s


def failed(message: str, *, unfinished: bool = False) -> Score:
    """The verdict of a grader that could not give one.

    Args:
        unfinished: the response is the reason (``Score.unfinished``).
    """
    return Score(score=0.0, correct=False, error=message, unfinished=unfinished)


def raised(who: str, error: BaseException, function: Any = None) -> Score:
    """Return the verdict of a grader that raised; ``function`` is what was called (``usercode.described``)."""
    if isinstance(error, MemoryError):
        return failed(f"{who} needs more memory for this response than reward.memory_mb", unfinished=True)
    return failed(f"{who} raised {described(error, function)}")
