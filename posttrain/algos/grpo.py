"""GRPO, and its settings known as Dr. GRPO and DAPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.algos.catalog import advantage_estimator, bundle

if TYPE_CHECKING:
    from posttrain.algos.episodes import Advantages, Episodes


@advantage_estimator(
    "grpo",
    formula="(score - mean of the group) / (std of the group + 1e-6); Dr. GRPO without the division",
    source="arXiv:2402.03300, arXiv:2503.20783",
    group=True,
)
def grpo(episodes: Episodes, *, normalize_by_std: bool) -> Advantages:
    """Return group-relative advantages (GRPO, DeepSeekMath, arXiv:2402.03300, section 4.1.2).

    A_i = (s_i - mean of the group) / (std of the group + eps), with the unbiased standard deviation. Without the
    division it is Dr. GRPO (arXiv:2503.20783).
    """
    return episodes.advantages(episodes.by_group().relative(episodes.scores(), normalize_by_std))


bundle("grpo", advantage="grpo", loss_agg="token-mean")
# No division by the group's standard deviation or by length.
bundle("dr_grpo", advantage="grpo", normalize_by_std=False, loss_agg="seq-mean-token-sum-norm")
# Clip-higher, dynamic sampling, token-mean. Overlong shaping needs a length: reward.overlong.buffer_tokens.
bundle("dapo", advantage="grpo", clip_high=0.28, loss_agg="token-mean", **{"rollout.filter_groups": True})
