"""GMPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.algos.catalog import bundle, policy_loss
from posttrain.algos.ops import bounded

if TYPE_CHECKING:
    from torch import Tensor

    from posttrain.algos.tokens import Columns, TokenInputs, UpdateTokens


def mean_clipped_log_ratio(update: UpdateTokens, *, clip_low: float, clip_high: float) -> Tensor:
    """Return the mean clipped log-ratio [T] over the policy's tokens of each token's sequence.

    The advantage is the same on all tokens of a sequence.
    """
    log_ratio = (update.logprobs - update.old_logprobs).detach()
    return update.sequence_mean(_clip(log_ratio, update.advantages, clip_low, clip_high))


@policy_loss(
    "gmpo",
    formula="-A e^(mean of log-ratios, each clipped)",
    source="arXiv:2507.20673",
    aggregation="seq-mean-token-mean",
    prepare=mean_clipped_log_ratio,
    prepared_on_policy=0.0,
    by_sequence=True,
    nothing_without_advantage=True,
)
def gmpo(logprobs: Tensor, tokens: TokenInputs, *, clip_low: float, clip_high: float) -> tuple[Tensor, Columns]:
    """Return the loss of geometric-mean policy optimization (GMPO, arXiv:2507.20673): log-ratios are clipped token by
    token to [-clip_low, clip_high], -A exp(mean of the clipped ones).

    Each token has that value, and the gradient -A exp(mean) dx of its own clipped log-ratio x. With the weights of
    ``seq-mean-token-mean`` this sums to the loss of the sequence and to its derivative.
    """
    log_ratio = tokens.log_ratio(logprobs)
    own = _clip(log_ratio, tokens.advantages, clip_low, clip_high)
    ratio = bounded(tokens.prepared + (own - own.detach())).exp()
    return -tokens.advantages * ratio, {"pg_clipfrac": (own != log_ratio).detach(), "ppo_kl": -log_ratio.detach()}


def _clip(log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Return the log-ratio bounded only where going on would gain: above for A > 0, below for A < 0."""
    from_above = log_ratio.clamp(max=clip_high)
    from_below = log_ratio.clamp(min=-clip_low)
    return from_above.where(advantages > 0, from_below.where(advantages < 0, log_ratio))


bundle("gmpo", advantage="grpo", policy_loss="gmpo", clip_low=0.4, clip_high=0.4, loss_agg="seq-mean-token-mean")
