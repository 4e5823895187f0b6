"""Importance corrections for the gap between trainer and engine.

The engine sampled with probabilities that differ from the trainer's, by its kernels or because its weights are older. A
correction multiplies the loss weight of each token by something that depends on ratio = trainer / engine, and leaves
out what is too far off. It is no function of the policy that is being trained: nothing here has a gradient.

A loss whose ratio is taken to the engine's log-probabilities has the correction in that ratio. These are for losses
whose ratio is taken to the trainer's.

Shape legend: T tokens of a packed batch, all of it. ``sequence`` and ``mask`` as in ``algos.segments``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posttrain.algos.ops import bounded
from posttrain.algos.segments import last_tokens, sequence_max, sequence_mean, sequence_sum

WEIGHTS = ("none", "token", "sequence")
REJECTIONS = ("none", "geometric_mean", "max_token")


def correct(
    log_ratio: Tensor,
    sequence: Tensor,
    mask: Tensor,
    *,
    weight: str,
    upper: float,
    lower: float | None,
    reject: str,
    reject_above: float,
) -> tuple[Tensor, dict[str, float]]:
    """Return factors of the loss weights, and metrics of them.

    The weights they multiply were those of the whole batch: what is left out leaves a smaller loss behind, not larger
    weights for the rest.

    Args:
        log_ratio: [T] log-probability of the trainer less that of the engine.
        weight: ``token``: the token's ratio (TIS, Yao et al. 2025, https://fengyao.notion.site/off-policy-rl).
            ``sequence``: the product of the sequence's, unbiased and of large variance. ``none``: 1.
        upper: a weight above it is cut to it, or is 0 where ``lower`` is given.
        lower: weights outside [lower, upper] become 0, the others stay (IcePop, Ring-1T, arXiv:2510.18855).
        reject: sequences to leave out altogether. ``geometric_mean``: those whose geometric mean of ratios lies outside
            [1 / reject_above, reject_above]. ``max_token``: those with any token's ratio outside it.

    Returns:
        [T] of the type of ``log_ratio``, 0 where the mask is false, without gradient; and metrics:
        ``correction/truncated``, ``correction/masked``: shares of tokens above ``upper`` and outside the band;
        ``correction/rejected``: share of sequences; ``correction/weight/mean``: over tokens;
        ``correction/effective_sample_size``: (sum of w)^2 / (N sum of w^2), 1 where all weights are equal.

    Raises:
        ValueError: a name or a bound that means nothing.
    """
    if weight not in WEIGHTS or reject not in REJECTIONS:
        raise ValueError(f"unknown correction: weight {weight!r}, reject {reject!r}")
    if not 0.0 < (lower or upper) <= upper or reject_above < 1.0:
        raise ValueError("bounds of a correction: 0 < lower <= upper, and reject_above at least 1")
    log_ratio = log_ratio.detach()
    ratio = _ratios(log_ratio, sequence, mask, weight)
    weights, truncated, outside = _within(ratio, upper, lower)
    keep = _kept(log_ratio, sequence, mask, reject, reject_above)
    weights = weights * keep * mask
    return weights, {
        "correction/truncated": _mean(truncated[mask]),
        "correction/masked": _mean(outside[mask]),
        "correction/rejected": _mean(~keep[mask][last_tokens(sequence[mask])]),
        "correction/weight/mean": _mean(weights[mask]),
        "correction/effective_sample_size": effective_sample_size(weights[mask]),
    }


def token_factors(log_ratio: Tensor, upper: float, lower: float | None) -> Tensor:
    """Return the factors [N] of ``correct`` with ``weight`` token that rejects nothing, of N tokens of the policy: each
    follows from its own ``log_ratio`` [N]. Without gradient."""
    return _within(bounded(log_ratio.detach()).exp(), upper, lower)[0]


def effective_sample_size(weights: Tensor) -> float:
    """Return (sum of w)^2 / (N sum of w^2) of [N] weights, from 1 / N to 1; 0 where all are 0."""
    weights = weights.double()
    squares = float(weights.square().sum())
    return float(weights.sum()) ** 2 / (len(weights) * squares) if squares > 0.0 else 0.0


def _ratios(log_ratio: Tensor, sequence: Tensor, mask: Tensor, weight: str) -> Tensor:
    if weight == "none":
        return torch.ones_like(log_ratio)
    if weight == "sequence":
        log_ratio = sequence_sum(log_ratio, sequence, mask)
    return bounded(log_ratio).exp()


def _within(ratio: Tensor, upper: float, lower: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights, and where they were cut, and where they were set to 0."""
    above = ratio > upper
    if lower is None:
        return ratio.clamp(max=upper), above, torch.zeros_like(above)
    outside = above | (ratio < lower)
    return ratio.masked_fill(outside, 0.0), torch.zeros_like(above), outside


def _kept(log_ratio: Tensor, sequence: Tensor, mask: Tensor, reject: str, reject_above: float) -> Tensor:
    """Return where a sequence is kept, [T] bool, the same on all tokens of a sequence."""
    if reject == "none":
        return torch.ones_like(mask)
    if reject == "geometric_mean":
        distance = sequence_mean(log_ratio, sequence, mask).abs()
    else:
        distance = sequence_max(log_ratio.abs(), sequence, mask)
    return distance <= math.log(reject_above)


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else 0.0
