"""Losses of tokens as weighted sums (see ``algos.reduce``): the sum of a policy loss, and the losses that belong to no
algorithm of RL.

Each returns ``(loss, sums)``: a scalar to differentiate, and detached scalars to be added up over micro-batches and
workers. The sum of a loss is the step's metric; that of another column, divided by the sum of the weights, is its mean.

Shape legend: N tokens that carry loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from posttrain.algos.catalog import PolicyLoss
from posttrain.algos.kl import kl_penalty
from posttrain.algos.tokens import TokenInputs

Sums = dict[str, Tensor]
METRICS = ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl")
"""Metrics that the losses of this package have"""


def weighted_policy_loss(
    loss: PolicyLoss, logprobs: Tensor, tokens: TokenInputs, values: Mapping[str, Any], weights: Tensor
) -> tuple[Tensor, Sums]:
    """Return the weighted sum of a policy loss, as ``pg_loss`` too, and of its metrics: those of ``METRICS`` by their
    names, others as ``actor/NAME``.

    Args:
        logprobs: [N], with gradient.
        values: by name, of the loss's options and of anything else.
        weights: [N].
    """
    per_token, metrics = loss(logprobs, tokens, values)
    total = (weights * per_token).sum()
    named = {name if name in METRICS else f"actor/{name}": column for name, column in metrics.items()}
    return total, {"pg_loss": total.detach()} | {name: (weights * column).sum() for name, column in named.items()}


def nll(logprobs: Tensor, weights: Tensor) -> tuple[Tensor, Sums]:
    """Return the weighted negative log-likelihood, the SFT loss. ``logprobs`` and ``weights`` are [N]."""
    loss = -(weights * logprobs).sum()
    return loss, {"loss": loss.detach()}


def kl(logprobs: Tensor, ref_logprobs: Tensor, weights: Tensor, *, estimator: str) -> tuple[Tensor, Sums]:
    """Return the weighted KL to the reference model (``algos.kl``), to be scaled by its coefficient. Tensors are
    [N]."""
    loss = (weights * kl_penalty(logprobs, ref_logprobs, estimator)).sum()
    return loss, {"kl_loss": loss.detach()}


def entropy(entropies: Tensor, weights: Tensor) -> tuple[Tensor, Sums]:
    """Return the weighted entropy of the policy. As a bonus it is scaled and *subtracted* from the loss. Tensors are
    [N]."""
    total = (weights * entropies).sum()
    return total, {"entropy": total.detach()}


def value(values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, *, clip: float) -> tuple[Tensor, Sums]:
    """Return the clipped loss of a critic (PPO): max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2.
    Tensors are [N], ``values`` with gradient."""
    unclipped = (values - returns).square()
    nearby = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    held = (nearby - returns).square()
    loss = 0.5 * (weights * torch.maximum(unclipped, held)).sum()
    clipfrac = (weights * (held > unclipped)).sum()
    return loss, {"vf_loss": loss.detach(), "vf_clipfrac": clipfrac}
