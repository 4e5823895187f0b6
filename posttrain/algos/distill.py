"""On-policy distillation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.algos.catalog import advantage_estimator, bundle

if TYPE_CHECKING:
    from posttrain.algos.episodes import Advantages, Episodes


@advantage_estimator(
    "distill",
    formula="log-probability under the teacher - that under the policy",
    source="arXiv:2306.13649",
    teacher=True,
    by_token=True,
)
def distill(episodes: Episodes) -> Advantages:
    """Return the log-probability under the teacher less that under the policy (on-policy distillation,
    arXiv:2306.13649; https://thinkingmachines.ai/blog/on-policy-distillation).

    With a policy loss at ratio 1 its gradient is that of the reverse KL of each token, for the contexts that the policy
    came to.
    """
    if episodes.teacher_log_ratio is None:
        raise ValueError("distill needs log-probabilities of a teacher")
    return episodes.token_advantages(episodes.teacher_log_ratio[episodes.mask])


# It needs algo.teacher, and rewards only show how far it has come.
bundle("opd", advantage="distill", policy_loss="cispo", clip_low=1.0, clip_high=4.0, loss_agg="token-mean")
