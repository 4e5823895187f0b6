"""Losses: pure functions of per-token tensors that return weighted sums (see ``algos.reduce``).

Each returns ``(loss, sums)``: a scalar tensor to differentiate, and detached scalars whose sum over micro-batches and
workers is the step's metric.

Shape legend: N tokens that carry loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.kl import kl_penalty

Sums = dict[str, Tensor]


def nll(logprobs: Tensor, weights: Tensor) -> tuple[Tensor, Sums]:
    """Negative log-likelihood, the SFT loss. ``logprobs`` and ``weights`` are [N]."""
    loss = -(weights * logprobs).sum()
    return loss, {"loss": loss.detach()}


def clipped_policy(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Sums]:
    """Clipped surrogate (PPO, arXiv:1707.06347, equation 7), with separate bounds (DAPO, arXiv:2503.14476) and
    dual-clip (Ye et al. 2020, arXiv:1912.09729, equation 5).

    loss_t = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and for A < 0 with dual clip at most -c A.

    Args:
        logprobs: [N] under the policy, with gradient.
        old_logprobs: [N] under the policy that the ratio is taken to.
        advantages: [N].
        weights: [N].
    """
    # A ratio beyond e^20 is infinite for any purpose, and must not turn into inf * 0.
    log_ratio = (logprobs - old_logprobs).clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    per_token = torch.maximum(unclipped, clipped)
    bounded = per_token
    if dual_clip is not None:
        bounded = torch.where(advantages < 0, torch.minimum(per_token, -advantages * dual_clip), per_token)
    loss = (weights * bounded).sum()
    with torch.no_grad():
        sums = {
            "pg_loss": loss.detach(),
            "pg_clipfrac": (weights * (clipped > unclipped)).sum(),
            "pg_clipfrac_lower": (weights * (bounded < per_token)).sum(),
            "ppo_kl": -(weights * log_ratio).sum(),
        }
    return loss, sums


def kl(logprobs: Tensor, ref_logprobs: Tensor, weights: Tensor, *, estimator: str) -> tuple[Tensor, Sums]:
    """Weighted KL to the reference model (``algos.kl``), to be scaled by its coefficient. Tensors are [N]."""
    loss = (weights * kl_penalty(logprobs, ref_logprobs, estimator)).sum()
    return loss, {"kl_loss": loss.detach()}
