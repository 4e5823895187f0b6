"""OPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.algos.catalog import advantage_estimator, bundle

if TYPE_CHECKING:
    from posttrain.algos.episodes import Advantages, Episodes


@advantage_estimator(
    "opo", formula="score - mean of the group weighted by length", source="arXiv:2505.23585", group=True
)
def opo(episodes: Episodes) -> Advantages:
    """Return the score less the mean of the group weighted by length (optimal reward baseline, OPO, arXiv:2505.23585).

    That is the baseline of least variance where the norm of a gradient grows with the number of tokens.
    """
    scores, group = episodes.scores(), episodes.by_group()
    lengths = episodes.segment_ids.bincount(minlength=len(scores)).double()
    baselines = group.sum(lengths * scores) / group.sum(lengths).clamp(min=1)
    return episodes.advantages((scores - baselines[group.member]).where(group.unequal(scores), 0.0))


bundle("opo", advantage="opo", loss_agg="token-mean")
