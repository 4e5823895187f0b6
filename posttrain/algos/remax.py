"""ReMax."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.algos.catalog import advantage_estimator, bundle

if TYPE_CHECKING:
    from posttrain.algos.episodes import Advantages, Episodes


@advantage_estimator(
    "remax",
    formula="rewards to come - reward of the prompt's greedy episode",
    source="arXiv:2310.10505",
    greedy=True,
    to_come=True,
)
def remax(episodes: Episodes) -> Advantages:
    """Return the rewards still to come, less the reward of the prompt's greedy episode (ReMax, arXiv:2310.10505)."""
    if episodes.baselines is None:
        raise ValueError("remax needs the reward of a greedy episode of each prompt")
    returns = episodes.discounted_sums(episodes.token_rewards(), 1.0)
    return episodes.token_advantages(returns - episodes.baselines.double()[episodes.segment_ids], returns)


bundle("remax", advantage="remax", loss_agg="seq-mean-token-sum-norm")
