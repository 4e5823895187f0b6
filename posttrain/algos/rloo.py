"""RLOO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.algos.catalog import advantage_estimator, bundle

if TYPE_CHECKING:
    from posttrain.algos.episodes import Advantages, Episodes


@advantage_estimator("rloo", formula="score - mean of the others of the group", source="arXiv:2402.14740", group=True)
def rloo(episodes: Episodes) -> Advantages:
    """Return leave-one-out advantages (RLOO, arXiv:2402.14740, section 3.2): the score less the mean of the group's
    others, which is (s_i - mean) n / (n - 1)."""
    group = episodes.by_group()
    factor = group.size / (group.size - 1).clamp(min=1)
    return episodes.advantages(group.centered(episodes.scores()) * factor[group.member])


bundle("rloo", advantage="rloo", loss_agg="seq-mean-token-sum-norm")
