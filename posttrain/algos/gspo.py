"""GSPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.algos.catalog import bundle, policy_loss
from posttrain.algos.ops import bounded, clipped_surrogate

if TYPE_CHECKING:
    from torch import Tensor

    from posttrain.algos.tokens import Columns, TokenInputs, UpdateTokens


def mean_log_ratio(update: UpdateTokens) -> Tensor:
    """Return the mean log-ratio [T] over the policy's tokens of each token's sequence."""
    return update.sequence_mean((update.logprobs - update.old_logprobs).detach())


@policy_loss(
    "gspo",
    formula="-min(s A, clip(s) A), with the gradient s dlogp",
    source="arXiv:2507.18071",
    aggregation="seq-mean-token-mean",
    prepare=mean_log_ratio,
    prepared_on_policy=0.0,
    by_sequence=True,
    nothing_without_advantage=True,
)
def gspo(logprobs: Tensor, tokens: TokenInputs, *, clip_low: float, clip_high: float) -> tuple[Tensor, Columns]:
    """Return the clipped surrogate of the sequence's ratio (GSPO-token, arXiv:2507.18071).

    The ratio is s = exp(mean log-ratio of the sequence); each token has its value, and the gradient s dlogp.
    """
    own = tokens.prepared + (logprobs - logprobs.detach())
    surrogate, was_clipped = clipped_surrogate(bounded(own), tokens.advantages, clip_low, clip_high)
    return surrogate, {"pg_clipfrac": was_clipped, "ppo_kl": -tokens.log_ratio(logprobs).detach()}


bundle("gspo", advantage="grpo", policy_loss="gspo", clip_low=3e-4, clip_high=4e-4, loss_agg="seq-mean-token-mean")
