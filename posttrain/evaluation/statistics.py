"""Statistics of graded responses: numbers in, numbers out. docs/evaluate.md has the formulas and their sources.

Shape legend: P problems, M metrics of a problem, R resamples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
"""Of all intervals."""
_DRAWS = 1 << 22
"""Most draws of a bootstrap in memory at once."""

Floats = npt.NDArray[np.float64]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k responses, drawn without replacement from n of which c are right, is right.

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374), equation 1: ``1 - C(n-c, k) / C(n, k)``.

    Raises:
        ValueError: unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got n = {n}, c = {c}, k = {k}")
    subsets = math.comb(n, k)
    return (subsets - math.comb(n - c, k)) / subsets  # in whole numbers up to here, so that pass@1 is c / n


def majority(answers: Sequence[str | None], right: Sequence[bool]) -> float:
    """Whether the answer that most responses give is right: the share of right ones, where several are given equally
    often. A response without an answer (None) has no vote.

    Args:
        answers: of each response.
        right: whether it is.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    verdicts = dict(zip(answers, right, strict=True))
    most = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == most]
    return sum(verdicts[answer] for answer in winners) / len(winners) if winners else 0.0


def mean_of(values: Floats) -> float | None:
    """The mean of the values [P] that are numbers; None where there is none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def bootstrap(values: Floats, resamples: int, seed: int) -> Floats:
    """Percentile intervals of means over problems (Efron 1979), problems drawn with replacement.

    Args:
        values: [P, M]; not a number where a problem has no such value. A resample's mean is over those that have one.

    Returns:
        [2, M]: lower and upper ends; not a number for a metric without values.
    """
    problems, metrics = values.shape
    known = ~np.isnan(values)
    filled = np.where(known, values, 0.0)
    chance = np.random.default_rng(seed)
    means = np.empty((resamples, metrics))
    at_once = max(1, _DRAWS // max(1, problems))
    for begin in range(0, resamples, at_once):
        count = min(at_once, resamples - begin)
        drawn = chance.integers(problems, size=(count, problems)) + np.arange(count)[:, None] * problems
        times = np.bincount(drawn.ravel(), minlength=count * problems).reshape(count, problems).astype(np.float64)
        counted = times @ known
        sums = times @ filled
        means[begin : begin + count] = np.divide(sums, counted, out=np.full_like(sums, np.nan), where=counted > 0)
    tail = (1.0 - CONFIDENCE) / 2.0
    ends = np.full((2, metrics), np.nan)
    for metric in range(metrics):
        found = means[:, metric][~np.isnan(means[:, metric])]
        if len(found):
            ends[:, metric] = np.quantile(found, [tail, 1.0 - tail])
    return ends


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided p-value of the exact test (McNemar 1947) of whether two systems solve equally many problems.

    Of the problems that one of them alone solves, each is A's or B's with chance 1/2, if they are equal:
    ``p = min(1, 2 * sum(C(n, i) for i in 0..min(a, b)) / 2^n)`` with ``n = a + b``.

    Args:
        only_a: problems that A alone solves.
        only_b: problems that B alone solves.
    """
    n = only_a + only_b
    term = total = 1
    for i in range(min(only_a, only_b)):
        term = term * (n - i) // (i + 1)  # C(n, i + 1)
        total += term
    return min(1.0, float(2 * total / 2**n))
