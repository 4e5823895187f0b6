"""Clip-Cov and KL-Cov: losses that hold back the tokens of largest covariance of log-probability and
advantage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.algos.catalog import bundle, policy_loss
from posttrain.algos.ops import bounded, clipped_surrogate

if TYPE_CHECKING:
    from torch import Tensor

    from posttrain.algos.tokens import Columns, TokenInputs, UpdateTokens


def draw_between_bounds(
    update: UpdateTokens,
    *,
    clip_low: float,
    clip_high: float,
    clip_cov_share: float,
    clip_cov_low: float,
    clip_cov_high: float,
) -> Tensor:
    """Return the tokens that ``clip_cov`` leaves out, [T] bool.

    They are a share of all tokens, and at least one, drawn at random from those whose covariance of log-probability and
    advantage lies between the bounds and which the clip does not hold anyway.
    """
    log_ratio = bounded(update.logprobs - update.old_logprobs).detach()
    _, was_clipped = clipped_surrogate(log_ratio, update.advantages, clip_low, clip_high)
    covariance = update.covariance()
    between = (covariance > clip_cov_low) & (covariance < clip_cov_high)
    candidates = (update.mask & ~was_clipped & between).nonzero().flatten()
    return update.only(update.draw(candidates, update.count(clip_cov_share)))


def largest_covariances(update: UpdateTokens, *, kl_cov_share: float) -> Tensor:
    """Return the tokens that ``kl_cov`` penalises, [T] bool: the share of all, and at least one, with the largest
    covariance of log-probability and advantage."""
    covariance = update.covariance().masked_fill(~update.mask, float("-inf"))
    largest = covariance.argsort(descending=True, stable=True)[: update.count(kl_cov_share)]
    return update.only(largest) & update.mask


@policy_loss(
    "clip_cov",
    formula="as `clipped`, but 0 for tokens drawn from those of large covariance",
    source="arXiv:2505.22617",
    prepare=draw_between_bounds,
)
def clip_cov(logprobs: Tensor, tokens: TokenInputs, *, clip_low: float, clip_high: float) -> tuple[Tensor, Columns]:
    """Return the clipped surrogate, which is 0 for the selected tokens (Clip-Cov, arXiv:2505.22617)."""
    log_ratio = tokens.log_ratio(logprobs)
    surrogate, _ = clipped_surrogate(log_ratio, tokens.advantages, clip_low, clip_high)
    selected = tokens.prepared
    return surrogate.masked_fill(selected, 0.0), {"pg_clipfrac": selected, "ppo_kl": -log_ratio.detach()}


@policy_loss(
    "kl_cov",
    formula="-r A, and + coef abs(log r) for the tokens of largest covariance",
    source="arXiv:2505.22617",
    prepare=largest_covariances,
)
def kl_cov(logprobs: Tensor, tokens: TokenInputs, *, kl_cov_coef: float) -> tuple[Tensor, Columns]:
    """Return the policy gradient -r A, and for the selected tokens + kl_cov_coef abs(log r) (KL-Cov,
    arXiv:2505.22617)."""
    log_ratio = tokens.log_ratio(logprobs)
    penalty = (kl_cov_coef * log_ratio.abs()).where(tokens.prepared, 0.0)
    return -tokens.advantages * log_ratio.exp() + penalty, {"ppo_kl": -log_ratio.detach()}


bundle("clip_cov", advantage="grpo", policy_loss="clip_cov", loss_agg="token-mean")
bundle("kl_cov", advantage="grpo", policy_loss="kl_cov", loss_agg="token-mean")
