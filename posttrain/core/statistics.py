"""Statistics of graded responses: numbers in, numbers out. docs/evaluate.md has the formulas and their sources.

Shape legend: P problems, M metrics of a problem, R resamples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
"""Confidence of all intervals."""
FEW_PROBLEMS, FEW_ODD = 30, 5
"""Fewer problems, or fewer of them right or wrong, have intervals by formula."""
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
    """Return whether the answer that most responses give is right: the share of right ones among the responses with
    it, where several are given equally often or the grader reads more than the answer. A response without an answer
    (None) has no vote.

    Args:
        answers: of each response.
        right: whether it is.
    """
    votes: Counter[str | None] = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    winning = [correct for answer, correct in zip(answers, right, strict=True) if most and votes[answer] == most]
    return sum(winning) / len(winning) if winning else 0.0


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


def intervals(values: Floats, resamples: int, seed: int) -> Floats:
    """Intervals of means over problems: of the bootstrap, and of Wilson where the bootstrap is too narrow.

    With few problems, or a mean near 0 or 1, resamples hardly differ (of a mean of 0 not at all). There the Wilson
    score interval of a share of P problems is taken. It is that of values that are 0 or 1; others vary less, and it is
    wider than need be.

    Args:
        values: [P, M] in [0, 1]; not a number where a problem has no such value.

    Returns:
        [2, M]: lower and upper ends; not a number for a metric without values.
    """
    ends = bootstrap(values, resamples, seed)
    for metric in range(values.shape[1]):
        known = values[~np.isnan(values[:, metric]), metric]
        if len(known) and _few(known):
            ends[:, metric] = wilson(float(known.mean()), len(known))
    return ends


def wilson(share: float, n: int) -> tuple[float, float]:
    """Return the score interval of Wilson 1927 of a share of ``n`` independent trials; within [0, 1] and never empty.

    Raises:
        ValueError: unless 0 <= share <= 1 and n >= 1.
    """
    if not (0.0 <= share <= 1.0 and n >= 1):
        raise ValueError(f"an interval needs 0 <= share <= 1 and n >= 1, got share = {share}, n = {n}")
    z2 = NormalDist().inv_cdf((1.0 + CONFIDENCE) / 2.0) ** 2
    centre = (share + z2 / (2 * n)) / (1.0 + z2 / n)
    half = math.sqrt(z2 * (share * (1.0 - share) + z2 / (4 * n)) / n) / (1.0 + z2 / n)
    # At its own end an interval is exact; elsewhere rounding must not carry it beyond.
    low = 0.0 if share == 0.0 else max(0.0, centre - half)
    high = 1.0 if share == 1.0 else min(1.0, centre + half)
    return low, high


def difference_interval(a: Floats, b: Floats, resamples: int, seed: int) -> tuple[float, float]:
    """Interval of the mean of ``b - a`` over problems: of the bootstrap of the differences; of Newcombe where it is
    too narrow.

    Newcombe 1998 (method 8, for paired shares) puts together the Wilson intervals of both means and the correlation of
    the two, which counts as 0 where one of them is the same for all problems.

    Args:
        a: [P] in [0, 1].
        b: [P] of the same problems.
    """
    if not (_few(a) or _few(b)):
        low, high = bootstrap((b - a)[:, None], resamples, seed)[:, 0].tolist()
        return low, high
    mean_a, mean_b = float(a.mean()), float(b.mean())
    (low_a, high_a), (low_b, high_b) = wilson(mean_a, len(a)), wilson(mean_b, len(b))
    spread = float(a.std() * b.std())
    correlation = float(((a - mean_a) * (b - mean_b)).mean()) / spread if spread > 0 else 0.0

    def distance(of_a: float, of_b: float) -> float:
        return math.sqrt(max(0.0, of_a**2 - 2 * correlation * of_a * of_b + of_b**2))

    below, above = distance(high_a - mean_a, mean_b - low_b), distance(mean_a - low_a, high_b - mean_b)
    return mean_b - mean_a - below, mean_b - mean_a + above


def _few(values: Floats) -> bool:
    """Return whether values in [0, 1] are too few for a bootstrap of their mean, or too alike."""
    return len(values) < FEW_PROBLEMS or min(values.sum(), (1.0 - values).sum()) < FEW_ODD


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
