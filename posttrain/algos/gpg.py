"""GPG: its advantages and its loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.algos.catalog import advantage_estimator, bundle, policy_loss

if TYPE_CHECKING:
    from torch import Tensor

    from posttrain.algos.episodes import Advantages, Episodes
    from posttrain.algos.tokens import Columns, TokenInputs


@advantage_estimator(
    "gpg",
    formula="(score - mean of the group) B / (episodes of groups with unequal scores)",
    source="arXiv:2504.02546",
    group=True,
)
def gpg_advantages(episodes: Episodes) -> Advantages:
    """Return the advantages of group policy gradient (GPG, arXiv:2504.02546).

    They are the score less the mean of the group, times B / (episodes of groups with unequal scores), so that groups
    without a gradient do not shrink that of the others.
    """
    scores, group = episodes.scores(), episodes.by_group()
    scale = len(scores) / group.unequal(scores).sum().clamp(min=1)
    return episodes.advantages(group.centered(scores) * scale)


@policy_loss("gpg", formula="-A logp", source="arXiv:2504.02546", nothing_without_advantage=True)
def gpg_loss(logprobs: Tensor, tokens: TokenInputs) -> tuple[Tensor, Columns]:
    """Return the plain policy-gradient loss -A logp (GPG, arXiv:2504.02546)."""
    return -tokens.advantages * logprobs, {"ppo_kl": -tokens.log_ratio(logprobs).detach()}


bundle("gpg", advantage="gpg", policy_loss="gpg", loss_agg="token-mean")
