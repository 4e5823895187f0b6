"""REINFORCE++, and its variant with a baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.algos.catalog import advantage_estimator, bundle

if TYPE_CHECKING:
    from posttrain.algos.episodes import Advantages, Episodes


@advantage_estimator(
    "reinforce_plus_plus", formula="discounted return, whitened", source="arXiv:2501.03262", to_come=True
)
def reinforce_plus_plus(episodes: Episodes, *, gamma: float) -> Advantages:
    """Return discounted returns, whitened over the batch (REINFORCE++, arXiv:2501.03262)."""
    returns = episodes.discounted_sums(episodes.token_rewards(), gamma)
    return episodes.token_advantages(returns, returns, whiten=True)


@advantage_estimator(
    "reinforce_plus_plus_baseline",
    formula="score - mean of the group, whitened",
    source="arXiv:2501.03262",
    group=True,
)
def reinforce_plus_plus_baseline(episodes: Episodes) -> Advantages:
    """Return scores less the mean of their group, whitened over the batch (REINFORCE++ with a baseline,
    arXiv:2501.03262)."""
    return episodes.advantages(episodes.by_group().centered(episodes.scores()), whiten=True)


bundle("reinforce++", advantage="reinforce_plus_plus", loss_agg="token-mean")
bundle("reinforce++-baseline", advantage="reinforce_plus_plus_baseline", loss_agg="token-mean")
