"""Sums, means and scans over the sequences of a packed batch.

Shape legend: T tokens of all sequences. ``sequence`` [T] int64 holds the segment id of each token, which numbers its
sequence; the tokens of a sequence stand side by side and in order. ``mask`` [T] bool is true on the tokens that count
(the policy's). Sums are taken in float64, and results have the type of the values.
"""

from __future__ import annotations

import torch
from torch import Tensor


def segment_ids(cu_seqlens: Tensor) -> Tensor:
    """Return the sequence [T] of each token, from offsets [B + 1]."""
    lengths = cu_seqlens.diff().long()
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def segment_sum(values: Tensor, segment_ids: Tensor, count: int) -> Tensor:
    """Return the sum of the values of each segment, [count] float64."""
    return torch.zeros(count, dtype=torch.float64, device=values.device).index_add_(0, segment_ids, values.double())


def sequence_sum(values: Tensor, sequence: Tensor, mask: Tensor) -> Tensor:
    """Return the sum [T] over the masked tokens of a token's sequence."""
    return segment_sum(torch.where(mask, values, 0.0), sequence, _count(sequence))[sequence].to(values.dtype)


def sequence_mean(values: Tensor, sequence: Tensor, mask: Tensor) -> Tensor:
    """Return the mean [T] over the masked tokens of a token's sequence; 0 where it has none."""
    tokens = segment_sum(mask, sequence, _count(sequence)).clamp(min=1)
    sums = segment_sum(torch.where(mask, values, 0.0), sequence, _count(sequence))
    return (sums / tokens)[sequence].to(values.dtype)


def sequence_max(values: Tensor, sequence: Tensor, mask: Tensor) -> Tensor:
    """Return the largest [T] of the values, which are not negative, over the masked tokens of a token's sequence; 0
    where it has none."""
    largest = values.new_zeros(_count(sequence))
    return largest.scatter_reduce_(0, sequence, torch.where(mask, values, 0.0), "amax")[sequence]


def discounted_sums(values: Tensor, sequence: Tensor, discount: float) -> Tensor:
    """Return y_t = x_t + discount * y_(t+1), [T], within each sequence.

    By doubling (Hillis and Steele 1986): after the pass with a shift of s, y_t holds the first 2s terms of its sum. So
    log2 of the longest sequence passes over all tokens do it, without a loop over tokens and without padding.
    """
    sums = values.clone()
    shift, longest = 1, int(torch.bincount(sequence).max()) if len(sequence) else 0
    while shift < longest:
        later = torch.where(sequence[shift:] == sequence[:-shift], sums[shift:], 0.0)
        sums = torch.cat([sums[:-shift] + discount**shift * later, sums[-shift:]])
        shift *= 2
    return sums


def following(values: Tensor, sequence: Tensor) -> Tensor:
    """Return the value [T] of the next token of the sequence; 0 after the last."""
    following = torch.zeros_like(values)
    following[:-1] = torch.where(sequence[1:] == sequence[:-1], values[1:], 0.0)
    return following


def last_tokens(sequence: Tensor) -> Tensor:
    """Return a column, [T] bool, that is true on the last token of each sequence."""
    last = torch.ones_like(sequence, dtype=torch.bool)
    last[:-1] = sequence[1:] != sequence[:-1]
    return last


def whiten(values: Tensor) -> Tensor:
    """Return (x - mean) / sqrt(variance + 1e-8), with the unbiased variance. One value alone becomes 0."""
    centered = values - values.mean()
    variance = centered.square().sum() / max(1, len(values) - 1)
    return centered * (variance + 1e-8).rsqrt()


def _count(sequence: Tensor) -> int:
    return int(sequence.max()) + 1 if len(sequence) else 0
