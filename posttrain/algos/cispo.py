"""CISPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.algos.catalog import bundle, policy_loss

if TYPE_CHECKING:
    from torch import Tensor

    from posttrain.algos.tokens import Columns, TokenInputs


@policy_loss(
    "cispo",
    formula="-clip(r) A logp, no gradient through clip(r)",
    source="arXiv:2506.13585",
    nothing_without_advantage=True,
)
def cispo(logprobs: Tensor, tokens: TokenInputs, *, clip_low: float, clip_high: float) -> tuple[Tensor, Columns]:
    """Return the loss of clipped importance weights (CISPO, MiniMax-M1, arXiv:2506.13585): -clip(r) A logp, with no
    gradient through the weight, so that no token loses its gradient."""
    log_ratio = tokens.log_ratio(logprobs).detach()
    ratio = log_ratio.exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * tokens.advantages * logprobs, {"pg_clipfrac": ratio != weight, "ppo_kl": -log_ratio}


# No lower bound. The upper one is not in the paper; 5 is among those that ScaleRL (arXiv:2510.13786) found alike.
bundle("cispo", advantage="grpo", policy_loss="cispo", clip_low=1.0, clip_high=4.0, loss_agg="token-mean")
