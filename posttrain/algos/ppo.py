"""PPO: generalized advantage estimation and the clipped surrogate, the default loss of other algorithms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.algos.catalog import advantage_estimator, bundle, policy_loss
from posttrain.algos.ops import clipped_surrogate

if TYPE_CHECKING:
    from torch import Tensor

    from posttrain.algos.episodes import Advantages, Episodes
    from posttrain.algos.tokens import Columns, TokenInputs


@advantage_estimator(
    "gae",
    formula="sum of (gamma lam)^l of the TD errors, whitened; returns for the critic",
    source="arXiv:1506.02438",
    critic=True,
    by_token=True,
)
def gae(episodes: Episodes, *, gamma: float, lam: float) -> Advantages:
    """Return generalized advantage estimates (arXiv:1506.02438, equation 16), whitened, and returns for the critic.

    A_t = sum over l of (gamma lam)^l delta_(t+l), with delta_t = r_t + gamma V_(t+1) - V_t, and V = 0 after the end.
    Returns are A + V before whitening.
    """
    if episodes.values is None:
        raise ValueError("gae needs values of a critic")
    values = episodes.values[episodes.mask].double()
    deltas = episodes.token_rewards() + gamma * episodes.following(values) - values
    advantages = episodes.discounted_sums(deltas, gamma * lam)
    return episodes.token_advantages(advantages, advantages + values, whiten=True)


@policy_loss(
    "clipped",
    formula="-min(r A, clip(r) A), with dual clip for A < 0",
    source="arXiv:1707.06347, arXiv:1912.09729, arXiv:2503.14476",
    nothing_without_advantage=True,
)
def clipped(
    logprobs: Tensor, tokens: TokenInputs, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Columns]:
    """Return the clipped surrogate (PPO, arXiv:1707.06347, equation 7), with separate bounds (DAPO, arXiv:2503.14476)
    and dual clip (Ye et al. 2020, arXiv:1912.09729, equation 5).

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and for A < 0 with dual clip at most -dual_clip A.
    """
    log_ratio = tokens.log_ratio(logprobs)
    surrogate, was_clipped = clipped_surrogate(log_ratio, tokens.advantages, clip_low, clip_high)
    bounded = surrogate
    if dual_clip is not None:
        most = -tokens.advantages * dual_clip
        bounded = surrogate.minimum(most).where(tokens.advantages < 0, surrogate)
    return bounded, {
        "pg_clipfrac": was_clipped,
        "pg_clipfrac_lower": (bounded < surrogate).detach(),
        "ppo_kl": -log_ratio.detach(),
    }


bundle("ppo", advantage="gae", loss_agg="token-mean")
