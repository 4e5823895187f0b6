"""GDPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.algos.catalog import advantage_estimator, bundle

if TYPE_CHECKING:
    from posttrain.algos.episodes import Advantages, Episodes


@advantage_estimator(
    "gdpo",
    formula="weighted sum of `grpo` of each part of the reward, whitened",
    source="arXiv:2601.05242",
    group=True,
    parts=True,
)
def gdpo(episodes: Episodes, *, normalize_by_std: bool) -> Advantages:
    """Return the weighted sum of ``grpo`` of each part of the reward, whitened over the batch (group reward-decoupled
    normalization, GDPO, arXiv:2601.05242). So a part of small spread is not drowned by one of large spread."""
    if not episodes.parts or episodes.penalties is not None:
        raise ValueError("gdpo needs rewards by part, and no KL in the reward, which belongs to no part")
    unknown = episodes.part_weights.keys() - episodes.parts.keys()
    if unknown:
        raise ValueError(f"gdpo has weights for parts that no episode earned: {', '.join(sorted(unknown))}")
    group = episodes.by_group()
    total = episodes.rewards.double().new_zeros(len(episodes.rewards))
    for name, rewards in episodes.parts.items():
        total += episodes.part_weights.get(name, 1.0) * group.relative(rewards.double(), normalize_by_std)
    return episodes.advantages(total, whiten=True)


bundle("gdpo", advantage="gdpo", loss_agg="token-mean")
