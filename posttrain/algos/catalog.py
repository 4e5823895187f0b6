"""What estimators and losses there are, and what a run must provide for each. No torch: the config reads it at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AdvantageFacts:
    """An estimator of ``algos.advantages``."""

    formula: str
    source: str
    """Where it was published."""
    group: bool = False
    """At least two episodes a prompt."""
    critic: bool = False
    """Values of tokens."""
    greedy: bool = False
    """One greedy episode a prompt, for its reward."""
    parts: bool = False
    """Rewards by part. A KL penalty in the reward belongs to no part, and is refused."""
    teacher: bool = False
    """Log-probabilities of a teacher. Rewards are not read."""

    @property
    def by_token(self) -> bool:
        """Whether tokens of one episode have different advantages."""
        return self.critic or self.teacher

    @property
    def needs(self) -> str:
        """In words."""
        words = {
            "n >= 2": self.group,
            "a critic": self.critic,
            "a greedy episode a prompt": self.greedy,
            "parts of the reward": self.parts,
            "a teacher": self.teacher,
        }
        return ", ".join(text for text, needed in words.items() if needed)


@dataclass(frozen=True)
class LossFacts:
    """A policy loss of ``algos.losses``."""

    formula: str
    source: str
    sequences: bool = False
    """It reads the column ``sequence_log_ratio``, under the current policy."""
    selection: bool = False
    """It reads the column ``selected``, from all tokens of the batch."""
    aggregation: str = "token-mean"
    """That of the paper; the loss is defined with any."""


ADVANTAGES: dict[str, AdvantageFacts] = {
    "grpo": AdvantageFacts(
        "(score - mean of the group) / (std of the group + 1e-6); Dr. GRPO without the division",
        "arXiv:2402.03300, arXiv:2503.20783",
        group=True,
    ),
    "grpo_passk": AdvantageFacts(
        "best of the group: its lead over the second, over the std; others: 0", "arXiv:2503.19595", group=True
    ),
    "rloo": AdvantageFacts("score - mean of the others of the group", "arXiv:2402.14740", group=True),
    "opo": AdvantageFacts("score - mean of the group weighted by length", "arXiv:2505.23585", group=True),
    "gpg": AdvantageFacts(
        "(score - mean of the group) B / (episodes of groups with unequal scores)", "arXiv:2504.02546", group=True
    ),
    "gdpo": AdvantageFacts(
        "weighted sum of `grpo` of each part of the reward, whitened", "arXiv:2601.05242", group=True, parts=True
    ),
    "reinforce_plus_plus": AdvantageFacts("discounted return, whitened", "arXiv:2501.03262"),
    "reinforce_plus_plus_baseline": AdvantageFacts(
        "score - mean of the group, whitened", "arXiv:2501.03262", group=True
    ),
    "remax": AdvantageFacts("rewards to come - reward of the prompt's greedy episode", "arXiv:2310.10505", greedy=True),
    "gae": AdvantageFacts(
        "sum of (gamma lam)^l of the TD errors, whitened; returns for the critic", "arXiv:1506.02438", critic=True
    ),
    "distill": AdvantageFacts(
        "log-probability under the teacher - that under the policy", "arXiv:2306.13649", teacher=True
    ),
}

POLICY_LOSSES: dict[str, LossFacts] = {
    "clipped": LossFacts(
        "-min(r A, clip(r) A), with dual clip for A < 0", "arXiv:1707.06347, arXiv:1912.09729, arXiv:2503.14476"
    ),
    "gspo": LossFacts(
        "-min(s A, clip(s) A), with the gradient s dlogp",
        "arXiv:2507.18071",
        sequences=True,
        aggregation="seq-mean-token-mean",
    ),
    "gmpo": LossFacts(
        "-A e^(mean of log-ratios, each clipped)",
        "arXiv:2507.20673",
        sequences=True,
        aggregation="seq-mean-token-mean",
    ),
    "cispo": LossFacts("-clip(r) A logp, no gradient through clip(r)", "arXiv:2506.13585"),
    "sapo": LossFacts("-A (4 / tau) sigmoid(tau (r - 1))", "arXiv:2511.20347", aggregation="seq-mean-token-mean"),
    "gpg": LossFacts("-A logp", "arXiv:2504.02546"),
    "clip_cov": LossFacts(
        "as `clipped`, but 0 for tokens drawn from those of large covariance", "arXiv:2505.22617", selection=True
    ),
    "kl_cov": LossFacts(
        "-r A, and + coef abs(log r) for the tokens of largest covariance", "arXiv:2505.22617", selection=True
    ),
}
