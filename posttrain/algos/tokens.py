"""What policy losses read.

A policy loss is a function of each token by itself, ``loss(logprobs, tokens, **options) -> (losses, metrics)``, of [N]
tensors all. So weights are applied in one place (``losses.weighted_policy_loss``), and a loss may be computed chunk by
chunk. What depends on whole sequences or on the whole batch of an update comes in as a column without gradient,
``tokens.prepared``, which the loss's ``prepare(update, **options)`` computes before the update.

Shape legend: N tokens that carry loss, T tokens of the packed batch of an update.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.algos import segments
from posttrain.algos.ops import bounded

Columns = dict[str, Tensor]
"""Metrics [N] of tokens, without gradient, to be weighted as the loss is"""


@dataclass(frozen=True)
class TokenInputs:
    """What a policy loss reads besides the policy's log-probabilities. All [N], without gradient."""

    advantages: Tensor
    old_logprobs: Tensor
    """Log-probabilities under the policy that the ratio is taken to. Where the policy has not moved since it sampled,
    they are its own, detached: all ratios are exactly 1, with the right gradient."""
    column: Tensor | None = None
    """The loss's prepared column, if it declares one."""

    def log_ratio(self, logprobs: Tensor) -> Tensor:
        """Return the bounded log-ratio [N] of the policy to the old one, with the gradient of ``logprobs``."""
        return bounded(logprobs - self.old_logprobs)

    @property
    def prepared(self) -> Tensor:
        """Return the column [N] that the loss's ``prepare`` computed. Raises ``ValueError`` where it was not called."""
        if self.column is None:
            raise ValueError("the loss reads a column, and none was prepared")
        return self.column


@dataclass(frozen=True)
class UpdateTokens:
    """All tokens of an update, as ``prepare`` reads them. Without gradient."""

    logprobs: Tensor
    """[T] log-probabilities under the policy before the update"""
    old_logprobs: Tensor
    """[T] log-probabilities under the policy that ratios are taken to"""
    advantages: Tensor
    """[T]"""
    sequence: Tensor
    """[T] int64, the sequence of each token"""
    mask: Tensor
    """[T] bool, true on the policy's tokens"""
    generator: torch.Generator
    """The source of random choices, on the device of the tensors: the same state and the same order of tokens give the
    same choice."""

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Return the mean [T] of values [T] over the policy's tokens of each token's sequence."""
        return segments.sequence_mean(values, self.sequence, self.mask)

    def covariance(self) -> Tensor:
        """Return (logp - mean) (A - mean), [T] float64, with means over the policy's tokens."""
        logprobs, advantages = self.logprobs.detach().double(), self.advantages.double()
        count = self.mask.sum().clamp(min=1)
        means = [torch.where(self.mask, x, 0.0).sum() / count for x in (logprobs, advantages)]
        return (logprobs - means[0]) * (advantages - means[1])

    def count(self, share: float) -> int:
        """Return how many tokens are this share of the policy's: at least one."""
        return max(1, int(share * int(self.mask.sum())))

    def draw(self, candidates: Tensor, count: int) -> Tensor:
        """Return ``count`` of the candidates, [C] int64, at random, or all if there are fewer."""
        order = torch.randperm(len(candidates), generator=self.generator, device=candidates.device)
        return candidates[order[:count]]

    def only(self, indices: Tensor) -> Tensor:
        """Return a column [T] bool that is true at these indices."""
        return torch.zeros_like(self.mask).index_fill_(0, indices, True)
