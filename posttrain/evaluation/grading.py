"""Grading the rows of a responses file: each response by what its environment or agent has said, by the grader of its
data source, or by `reward.function`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from posttrain.core.types import Score
from posttrain.evaluation.rows import ResponseRow
from posttrain.rewards.grade import GradeItem, GraderPool

_AT_ONCE = 4096
"""Responses that are graded together, about."""


@dataclass(frozen=True)
class Graded:
    """A row with its verdicts."""

    row: ResponseRow
    scores: list[Score | None]
    """Score of each response; None: its episode failed, nothing to grade. ``Score.error``: the grader failed."""


@dataclass(frozen=True)
class GradedProblem:
    """What statistics need of a row. Small, since all are in memory."""

    number: int
    data_source: str
    level: str | None
    responses: int
    right: tuple[bool, ...]
    """Verdicts of the graded responses. Those that their grader did not finish are among them, and wrong; those whose
    episode failed, or whose grader did, count neither as right nor as wrong."""
    answers: tuple[str | None, ...]
    """That the grader found in these."""
    unfinished: int
    """Number of graded responses that their grader did not finish."""
    grader_errors: int
    generation_errors: int
    by_index: str | None
    by_prompt: str | None
    truth: str
    rewards: tuple[float, ...] = ()
    """That environments or agents gave, of the graded responses."""

    @property
    def graded(self) -> int:
        return len(self.right)

    @property
    def share(self) -> float:
        """Return the share of graded responses that are right. There is at least one."""
        return sum(self.right) / len(self.right)


Failure = Literal["episode_failed", "grader_failed", "unfinished"]


def failure_of(score: Score | None) -> Failure | None:
    """Return why a response has no verdict; None: it has one."""
    if score is None:
        return "episode_failed"
    if score.error is None:
        return None
    return "unfinished" if score.unfinished else "grader_failed"


def problem_of(graded: Graded) -> GradedProblem:
    row = graded.row
    failures = Counter(map(failure_of, graded.scores))
    known = [score for score in graded.scores if score is not None and failure_of(score) != "grader_failed"]
    return GradedProblem(
        number=row.number,
        data_source=row.data_source,
        level=row.level,
        responses=len(row.responses),
        right=tuple(score.correct for score in known),
        answers=tuple(score.extracted for score in known),
        unfinished=failures["unfinished"],
        grader_errors=failures["grader_failed"],
        generation_errors=failures["episode_failed"],
        by_index=row.by_index,
        by_prompt=row.by_prompt,
        truth=str(row.ground_truth),
        rewards=tuple(
            verdict.score
            for verdict, error in zip(row.given, row.errors, strict=True)
            if verdict is not None and error is None
        ),
    )


def grade(
    rows: Iterable[ResponseRow], pool: GraderPool, seen: Callable[[Graded], None], graded: Callable[[int], None] | None
) -> list[GradedProblem]:
    """Grade rows, some at a time.

    Args:
        seen: is given each row with its verdicts, in order.
        graded: is called with the number of responses that are graded since the call before.

    Raises:
        ConfigError: a data source has no grader.
    """
    return asyncio.run(_grade(iter(rows), pool, seen, graded))


async def _grade(
    rows: Iterator[ResponseRow], pool: GraderPool, seen: Callable[[Graded], None], graded: Callable[[int], None] | None
) -> list[GradedProblem]:
    problems = []
    while chunk := _chunk(rows):
        items = [_item(row, i) for row in chunk for i in to_grade(row)]
        verdicts = iter(await pool.grade(items, graded=graded))
        for row in chunk:
            scores = [None if error is not None else own for error, own in zip(row.errors, row.given, strict=True)]
            for i in to_grade(row):
                scores[i] = next(verdicts)
            with_verdicts = Graded(row, scores)
            seen(with_verdicts)
            problems.append(problem_of(with_verdicts))
    return problems


def to_grade(row: ResponseRow) -> list[int]:
    """Return the numbers of the responses that a grader is asked for."""
    return [i for i, error in enumerate(row.errors) if error is None and row.given[i] is None]


def _chunk(rows: Iterator[ResponseRow]) -> Sequence[ResponseRow]:
    first = next(rows, None)
    return [] if first is None else [first, *islice(rows, max(1, _AT_ONCE // len(first.responses)) - 1)]


def _item(row: ResponseRow, number: int) -> GradeItem:
    return GradeItem(row.data_source, row.responses[number], row.ground_truth, row.extra_info)
