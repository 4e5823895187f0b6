"""What an evaluation found: numbers of all problems, of each data source and of each level, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from posttrain.core.statistics import Floats, intervals, majority, mean_of, pass_at_k
from posttrain.core.text import printable, table
from posttrain.evaluation.grading import GradedProblem
from posttrain.tools.base import telling_warning

if TYPE_CHECKING:
    from rich.console import Console

Summary = dict[str, Any]
"""Counts and scores by name, and under `ci` the interval of each score. A score is None where no problem has it."""


@dataclass
class Report:
    """What an evaluation found."""

    file: str
    n: int
    """Responses per problem (the most, where problems differ)."""
    overall: Summary
    sources: dict[str, Summary]
    levels: dict[str, dict[str, Summary]]
    """By data source, then by level; of sources whose problems have levels."""
    first_error: str | None
    """Message of the first grader that failed."""
    first_unfinished: str | None
    """Message of the first that did not finish."""
    tells_answer: list[str]
    """Tools that told the model whether its answer was right: the scores are none of a benchmark then."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "n": self.n,
            "overall": self.overall,
            "sources": self.sources,
            "levels": self.levels,
            "tells_answer": self.tells_answer,
        }


def make_report(
    file: str,
    problems: Sequence[GradedProblem],
    pass_at: Sequence[int],
    resamples: int,
    seed: int,
    *,
    first_error: str | None,
    first_unfinished: str | None,
    tells_answer: list[str],
) -> Report:
    """The numbers of graded problems.

    Args:
        resamples: of the bootstrap; 0: no intervals.
    """
    n = max(problem.responses for problem in problems)
    names = score_names(pass_at, n)
    sources = sorted({problem.data_source for problem in problems})
    # A grader that never says which answer it found leaves nothing to vote on.
    voting = {p.data_source for p in problems if any(answer is not None for answer in p.answers)}
    silent = {p.data_source for p in problems if any(p.right)} - voting
    values = np.array([problem_values(p, pass_at, n, votes=p.data_source not in silent) for p in problems])
    of_source = np.array([problem.data_source for problem in problems])
    of_level = np.array([problem.level or "" for problem in problems])

    def summary(chosen: np.typing.NDArray[np.bool_]) -> Summary:
        few = [problems[i] for i in np.flatnonzero(chosen).tolist()]
        return _summary(few, values[chosen], names, pass_at, resamples, seed)

    levels: dict[str, dict[str, Summary]] = {}
    for source in sources:
        known = sorted(set(of_level[(of_source == source) & (of_level != "")].tolist()), key=_natural)
        if known:
            levels[source] = {level: summary((of_source == source) & (of_level == level)) for level in known}
    return Report(
        file,
        n,
        summary(np.ones(len(problems), np.bool_)),
        {source: summary(of_source == source) for source in sources},
        levels,
        first_error,
        first_unfinished,
        tells_answer,
    )


def score_names(pass_at: Sequence[int], n: int) -> list[str]:
    """Return the names of the columns of ``problem_values``."""
    names = [*(f"pass@{k}" for k in dict.fromkeys(pass_at)), f"mean@{n}"]
    return names if n == 1 else [*names, f"best@{n}", f"maj@{n}"]


def problem_values(problem: GradedProblem, pass_at: Sequence[int], n: int, *, votes: bool = True) -> list[float]:
    """The scores of one problem, not a number where it has none. Their means over problems are the scores of a set."""
    graded, right = problem.graded, sum(problem.right)
    values = [pass_at_k(graded, right, k) if graded >= k else np.nan for k in dict.fromkeys(pass_at)]
    values.append(right / graded if graded else np.nan)
    if n > 1:
        values.append(float(right > 0) if graded else np.nan)
        values.append(majority(problem.answers, problem.right) if graded and votes else np.nan)
    return values


def _summary(
    problems: Sequence[GradedProblem],
    values: Floats,
    names: Sequence[str],
    pass_at: Sequence[int],
    resamples: int,
    seed: int,
) -> Summary:
    out: Summary = {"problems": len(problems), "responses": sum(p.graded for p in problems)}
    out |= {name: mean_of(values[:, i]) for i, name in enumerate(names)}
    out |= {f"problems_below_{k}": sum(p.graded < k for p in problems) for k in pass_at}
    rewards = [p.rewards for p in problems if p.rewards]
    out["rewarded"] = sum(map(len, rewards))
    out["reward"] = float(np.mean([np.mean(of_problem) for of_problem in rewards])) if rewards else None
    out["unfinished"] = sum(p.unfinished for p in problems)
    out["grader_errors"] = sum(p.grader_errors for p in problems)
    out["generation_errors"] = sum(p.generation_errors for p in problems)
    if resamples:
        ends = intervals(values, resamples, seed)
        out["ci"] = {
            name: None if np.isnan(ends[0, i]) else [float(ends[0, i]), float(ends[1, i])]
            for i, name in enumerate(names)
        }
    return out


def _natural(text: str) -> tuple[int, int, str]:
    """Numbers in their order, before and within text: `Level 2` before `Level 10`."""
    digits = "".join(c for c in text if c.isdecimal())[:18]
    return (0 if text == digits else 1, int(digits or 0), text)


def print_report(report: Report, pass_at: Sequence[int], console: Console) -> None:
    """A table: one row a data source, below it one a level, and a row for all."""
    names = score_names(pass_at, report.n)
    if 1 in pass_at:
        names.remove(f"mean@{report.n}")  # it is pass@1
    parts: list[tuple[str, Summary]] = []
    for source, numbers in report.sources.items():
        parts.append((source, numbers))
        parts += [(f"  {level}", of_level) for level, of_level in report.levels.get(source, {}).items()]
    if len(report.sources) > 1:
        parts.append(("all", report.overall))
    rows = [(title, str(numbers["problems"]), *(_cell(numbers, name) for name in names)) for title, numbers in parts]
    console.print(table(("data source", "problems", *names), rows, title=report.file))
    for line in _remarks(report, pass_at):
        console.print(printable(line), markup=False, highlight=False)


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _cell(numbers: Mapping[str, Any], name: str) -> str:
    """A score, and below it its interval."""
    ends = numbers.get("ci", {}).get(name)
    return percent(numbers[name]) + ("" if ends is None else f"\n{100 * ends[0]:.1f} - {100 * ends[1]:.1f}")


def _remarks(report: Report, pass_at: Sequence[int]) -> Iterator[str]:
    """One line for each reason why scores are none of a benchmark, or why a response or a problem does not count, or
    is wrong unseen."""
    numbers = report.overall
    if report.tells_answer:
        yield telling_warning(report.tells_answer)
    if numbers["rewarded"]:
        yield (
            f"{numbers['rewarded']} of {numbers['responses']} responses have the reward of their environment or agent, "
            f"{numbers['reward']:.4g} in the mean; from 1 on it counts as right"
        )
    if numbers["unfinished"]:
        yield (
            f"{numbers['unfinished']} responses count as wrong: their grader did not finish, "
            f"first at {report.first_unfinished}"
        )
    if numbers["generation_errors"]:
        yield f"{numbers['generation_errors']} responses left out: their episodes failed"
    if numbers["grader_errors"]:
        yield f"{numbers['grader_errors']} responses left out: their grader failed, first at {report.first_error}"
    for k in dict.fromkeys(pass_at):
        if count := numbers[f"problems_below_{k}"]:
            yield f"{count} problems left out of pass@{k}: fewer than {k} graded responses"
    for source, of_source in report.sources.items():
        if of_source.get(f"maj@{report.n}", 0.0) is None and of_source["responses"]:
            who = "environment or agent" if of_source["rewarded"] else "grader"
            yield f"no maj@{report.n} of {source}: its {who} does not tell which answer it found"
