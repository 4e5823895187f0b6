"""Advantages for pass@k."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.algos.catalog import advantage_estimator, bundle
from posttrain.algos.ops import EPS

if TYPE_CHECKING:
    from posttrain.algos.episodes import Advantages, Episodes


@advantage_estimator(
    "grpo_passk",
    formula="best of the group: its lead over the second, over the std; others: 0",
    source="arXiv:2503.19595",
    group=True,
)
def grpo_passk(episodes: Episodes, *, normalize_by_std: bool) -> Advantages:
    """Return advantages for the best of k episodes (arXiv:2503.19595): only the best of a group has one, the distance
    to the second best, over the standard deviation as in ``grpo``. Two that are best have none. Branches of an
    agent's episode count as the one that they are, with the best score of theirs, and all have its advantage."""
    scores, episode, group = episodes.without_branches()
    # By group, and within it from best to worst.
    order = scores.argsort(descending=True, stable=True)
    order = order[group.member[order].argsort(stable=True)]
    first = group.size.cumsum(0) - group.size
    best, second = order[first], order[(first + 1).clamp(max=len(order) - 1)]
    lead = (scores[best] - scores[second]).where(group.size > 1, 0.0)
    if normalize_by_std:
        lead = lead / (group.std(scores) + EPS)
    return episodes.advantages(scores.new_zeros(len(scores)).index_copy_(0, best, lead)[episode])


bundle("passk", advantage="grpo_passk", loss_agg="token-mean")
