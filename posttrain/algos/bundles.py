"""The bundles of settings that `--algo` names. No torch and no config: the command line lists them at once."""

from __future__ import annotations

from typing import Any

ALGO_BUNDLES: dict[str, dict[str, Any]] = {
    # The KL term is the preset's choice, here as everywhere below.
    "grpo": {"algo.advantage": "grpo", "algo.loss_agg": "token-mean"},
    # No division by the group's standard deviation or by length.
    "dr_grpo": {
        "algo.advantage": "grpo", "algo.normalize_by_std": False, "algo.loss_agg": "seq-mean-token-sum-norm",
    },
    # Clip-higher, dynamic sampling, token-mean. Overlong shaping needs a length: reward.overlong.buffer_tokens.
    "dapo": {
        "algo.advantage": "grpo", "algo.clip_high": 0.28, "algo.loss_agg": "token-mean", "rollout.filter_groups": True,
    },
    "gspo": {
        "algo.advantage": "grpo", "algo.policy_loss": "gspo", "algo.clip_low": 3e-4, "algo.clip_high": 4e-4,
        "algo.loss_agg": "seq-mean-token-mean",
    },
    "gmpo": {
        "algo.advantage": "grpo", "algo.policy_loss": "gmpo", "algo.clip_low": 0.4, "algo.clip_high": 0.4,
        "algo.loss_agg": "seq-mean-token-mean",
    },
    # No lower bound. The upper one is not in the paper; 5 is among those that ScaleRL (arXiv:2510.13786) found alike.
    "cispo": {
        "algo.advantage": "grpo", "algo.policy_loss": "cispo", "algo.clip_low": 1.0, "algo.clip_high": 4.0,
        "algo.loss_agg": "token-mean",
    },
    "sapo": {"algo.advantage": "grpo", "algo.policy_loss": "sapo", "algo.loss_agg": "seq-mean-token-mean"},
    "clip_cov": {"algo.advantage": "grpo", "algo.policy_loss": "clip_cov", "algo.loss_agg": "token-mean"},
    "kl_cov": {"algo.advantage": "grpo", "algo.policy_loss": "kl_cov", "algo.loss_agg": "token-mean"},
    "passk": {"algo.advantage": "grpo_passk", "algo.loss_agg": "token-mean"},
    "rloo": {"algo.advantage": "rloo", "algo.loss_agg": "seq-mean-token-sum-norm"},
    "reinforce++": {"algo.advantage": "reinforce_plus_plus", "algo.loss_agg": "token-mean"},
    "reinforce++-baseline": {"algo.advantage": "reinforce_plus_plus_baseline", "algo.loss_agg": "token-mean"},
    "remax": {"algo.advantage": "remax", "algo.loss_agg": "seq-mean-token-sum-norm"},
    "opo": {"algo.advantage": "opo", "algo.loss_agg": "token-mean"},
    "gpg": {"algo.advantage": "gpg", "algo.policy_loss": "gpg", "algo.loss_agg": "token-mean"},
    "gdpo": {"algo.advantage": "gdpo", "algo.loss_agg": "token-mean"},
    "ppo": {"algo.advantage": "gae", "algo.lam": 0.95, "algo.loss_agg": "token-mean"},
    # On-policy distillation. It needs algo.teacher, and rewards only show how far it has come.
    "opd": {"algo.advantage": "distill", "algo.policy_loss": "cispo", "algo.clip_low": 1.0, "algo.clip_high": 4.0,
            "algo.loss_agg": "token-mean"},
}  # fmt: skip
"""Names and settings of algorithms, by their papers (algorithms.md). A loss written for one update a step is exact
there, and is bounded by its clip where a step makes several."""
