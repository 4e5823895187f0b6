"""Advantage estimators: from rewards of episodes to advantages of tokens.

Shape legend: B episodes, T tokens of all of them, P of these the policy's.

What holds for all of them:

- An episode earns its reward at its last policy token; a KL penalty is subtracted token by token. Where an estimator
  takes one number an episode, that is its *score*: the reward less its penalties.
- Prompts and tool replies are not actions. Sums, discounts and values run over policy tokens only, as if the others
  were not there, and the advantage is 0 on the others.
- Each episode of ``Episodes`` counts in the statistics of its group, also one without a policy token, which gets no
  advantage. The policy took no action in such an episode, and `rl` leaves it out (``rl_batch.usable``).
- A group of one, or of equal scores, says nothing about which action was better: a group-relative advantage is 0.
- Whitening is over all policy tokens of the batch, so that every token has the same say in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from posttrain.algos import segments

EPS = 1e-6
"""Added to a standard deviation before dividing by it."""


@dataclass(frozen=True)
class Episodes:
    """What an estimator reads."""

    rewards: Tensor
    """[B] float"""
    groups: Tensor
    """[B] int, equal for episodes of the same prompt"""
    mask: Tensor
    """[T] bool, true on the policy's tokens"""
    sequence: Tensor
    """[T] int64 in [0, B): the episode of each token. Tokens of an episode stand side by side and in order."""
    penalties: Tensor | None = None
    """[T] KL in the reward, times its coefficient"""
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """name -> [B], the rewards that ``gdpo`` normalises one by one"""
    baselines: Tensor | None = None
    """[B] reward of the greedy episode of the same prompt (``remax``)"""
    values: Tensor | None = None
    """[T] the critic's values (``gae``)"""
    teacher_log_ratio: Tensor | None = None
    """[T] log-probability under the teacher less that under the policy (``distill``)"""

    @property
    def owners(self) -> Tensor:
        """[P] the episode of each policy token."""
        return self.sequence[self.mask]

    def token_rewards(self) -> Tensor:
        """[P] float64: less the penalty, plus the episode's reward on its last token."""
        rewards = torch.where(segments.last_tokens(self.owners), self.rewards.double()[self.owners], 0.0)
        return rewards if self.penalties is None else rewards - self.penalties[self.mask].double()

    def scores(self) -> Tensor:
        """[B] float64: the reward less all penalties."""
        if self.penalties is None:
            return self.rewards.double()
        return self.rewards.double() - segments.totals(self.penalties[self.mask], self.owners, len(self.rewards))


@dataclass(frozen=True)
class AdvantageParams:
    """Settings of estimators; each reads what it needs. The defaults leave rewards undiscounted."""

    gamma: float = 1.0
    """Discount of a reward for each policy token that comes before it (``gae``, ``reinforce_plus_plus``)."""
    lam: float = 1.0
    """Lambda of ``gae``: 0 trusts the critic only, 1 the returns only."""
    normalize_by_std: bool = True
    """Divide by the standard deviation of the group (``grpo``, ``grpo_passk``, ``gdpo``)."""
    part_weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of a part in ``gdpo``; 1 where none is given."""


@dataclass(frozen=True)
class Advantages:
    """What an estimator returns. 0 where the mask is false."""

    advantages: Tensor
    """[T] float32"""
    returns: Tensor | None = None
    """[T] float32: what a critic is trained to predict"""


def gae(episodes: Episodes, params: AdvantageParams) -> Advantages:
    """Generalized advantage estimation (arXiv:1506.02438, equation 16), whitened; for PPO.

    A_t = sum over l of (gamma lam)^l delta_(t+l), with delta_t = r_t + gamma V_(t+1) - V_t, and V = 0 after the end.
    Returns are A + V before whitening.
    """
    if episodes.values is None:
        raise ValueError("gae needs values of a critic")
    owners, values = episodes.owners, episodes.values[episodes.mask].double()
    deltas = episodes.token_rewards() + params.gamma * segments.following(values, owners) - values
    advantages = segments.discounted_sums(deltas, owners, params.gamma * params.lam)
    return _of_tokens(episodes, segments.whiten(advantages), advantages + values)


def grpo(episodes: Episodes, params: AdvantageParams) -> Advantages:
    """Group-relative advantages (GRPO, DeepSeekMath, arXiv:2402.03300, section 4.1.2).

    A_i = (s_i - mean of the group) / (std of the group + eps), with the unbiased standard deviation. Without the
    division it is Dr. GRPO (arXiv:2503.20783).
    """
    return _of_episodes(episodes, _group_relative(episodes.scores(), episodes.groups, params.normalize_by_std))


def grpo_passk(episodes: Episodes, params: AdvantageParams) -> Advantages:
    """Advantages for the best of k episodes (arXiv:2503.19595): only the best of a group has one, the distance to the
    second best, over the standard deviation as in ``grpo``. Two that are best have none."""
    scores, group = episodes.scores(), _Groups(episodes.groups)
    # By group, and within it from best to worst.
    order = scores.argsort(descending=True, stable=True)
    order = order[group.member[order].argsort(stable=True)]
    first = group.size.cumsum(0) - group.size
    best, second = order[first], order[(first + 1).clamp(max=len(order) - 1)]
    lead = torch.where(group.size > 1, scores[best] - scores[second], 0.0)
    if params.normalize_by_std:
        lead = lead / (group.std(scores) + EPS)
    return _of_episodes(episodes, torch.zeros_like(scores).index_copy_(0, best, lead))


def rloo(episodes: Episodes, params: AdvantageParams) -> Advantages:
    """Leave-one-out (RLOO, arXiv:2402.14740, section 3.2): the score less the mean of the group's others, which is
    (s_i - mean) n / (n - 1)."""
    group = _Groups(episodes.groups)
    factor = group.size / (group.size - 1).clamp(min=1)
    return _of_episodes(episodes, group.centered(episodes.scores()) * factor[group.member])


def reinforce_plus_plus(episodes: Episodes, params: AdvantageParams) -> Advantages:
    """REINFORCE++ (arXiv:2501.03262): discounted returns, whitened over the batch."""
    returns = segments.discounted_sums(episodes.token_rewards(), episodes.owners, params.gamma)
    return _of_tokens(episodes, segments.whiten(returns), returns)


def reinforce_plus_plus_baseline(episodes: Episodes, params: AdvantageParams) -> Advantages:
    """REINFORCE++ with a baseline (arXiv:2501.03262): scores less the mean of their group, whitened over the batch."""
    centered = _Groups(episodes.groups).centered(episodes.scores())
    return _of_tokens(episodes, segments.whiten(centered[episodes.owners]))


def remax(episodes: Episodes, params: AdvantageParams) -> Advantages:
    """ReMax (arXiv:2310.10505): rewards still to come, less the reward of the prompt's greedy episode."""
    if episodes.baselines is None:
        raise ValueError("remax needs the reward of a greedy episode of each prompt")
    returns = segments.discounted_sums(episodes.token_rewards(), episodes.owners, 1.0)
    return _of_tokens(episodes, returns - episodes.baselines.double()[episodes.owners], returns)


def opo(episodes: Episodes, params: AdvantageParams) -> Advantages:
    """Optimal reward baseline (OPO, arXiv:2505.23585): the score less the mean of the group weighted by length, which
    is the baseline of least variance where the norm of a gradient grows with the number of tokens."""
    scores, group = episodes.scores(), _Groups(episodes.groups)
    lengths = torch.bincount(episodes.owners, minlength=len(scores)).double()
    baselines = group.sum(lengths * scores) / group.sum(lengths).clamp(min=1)
    return _of_episodes(episodes, torch.where(group.unequal(scores), scores - baselines[group.member], 0.0))


def gpg(episodes: Episodes, params: AdvantageParams) -> Advantages:
    """Group policy gradient (GPG, arXiv:2504.02546): the score less the mean of the group, times B / (episodes of
    groups with unequal scores), so that groups without a gradient do not shrink that of the others."""
    scores, group = episodes.scores(), _Groups(episodes.groups)
    scale = len(scores) / group.unequal(scores).sum().clamp(min=1)
    return _of_episodes(episodes, group.centered(scores) * scale)


def gdpo(episodes: Episodes, params: AdvantageParams) -> Advantages:
    """Group reward-decoupled normalization (GDPO, arXiv:2601.05242): ``grpo`` of each part of the reward, then the
    weighted sum, whitened over the batch. So a part of small spread is not drowned by one of large spread."""
    if not episodes.parts or episodes.penalties is not None:
        raise ValueError("gdpo needs rewards by part, and no KL in the reward, which belongs to no part")
    unknown = params.part_weights.keys() - episodes.parts.keys()
    if unknown:
        raise ValueError(f"gdpo has weights for parts that no episode earned: {', '.join(sorted(unknown))}")
    total = torch.zeros_like(episodes.rewards, dtype=torch.float64)
    for name, rewards in episodes.parts.items():
        relative = _group_relative(rewards.double(), episodes.groups, params.normalize_by_std)
        total += params.part_weights.get(name, 1.0) * relative
    return _of_tokens(episodes, segments.whiten(total[episodes.owners]))


def distill(episodes: Episodes, params: AdvantageParams) -> Advantages:
    """On-policy distillation (arXiv:2306.13649; https://thinkingmachines.ai/blog/on-policy-distillation): the
    log-probability under the teacher less that under the policy. With a policy loss at ratio 1 its gradient is that of
    the reverse KL of each token, for the contexts that the policy came to."""
    if episodes.teacher_log_ratio is None:
        raise ValueError("distill needs log-probabilities of a teacher")
    return _of_tokens(episodes, episodes.teacher_log_ratio[episodes.mask])


Estimator = Callable[[Episodes, AdvantageParams], Advantages]

ESTIMATORS: dict[str, Estimator] = {
    "gae": gae,
    "grpo": grpo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "opo": opo,
    "gpg": gpg,
    "gdpo": gdpo,
    "distill": distill,
}
"""``algos.catalog`` has what each needs."""


class _Groups:
    """Statistics of groups of episodes. G groups."""

    member: Tensor
    """[B] int64, the group of each episode"""
    size: Tensor
    """[G]"""

    def __init__(self, groups: Tensor) -> None:
        _, self.member, self.size = torch.unique(groups, return_inverse=True, return_counts=True)

    def sum(self, values: Tensor) -> Tensor:
        """[B] -> [G]"""
        return segments.totals(values, self.member, len(self.size))

    def centered(self, values: Tensor) -> Tensor:
        """[B] -> [B], less the mean of the group; exactly 0 in a group of equal values."""
        centered = values - (self.sum(values) / self.size)[self.member]
        return torch.where(self.unequal(values), centered, 0.0)

    def std(self, values: Tensor) -> Tensor:
        """[B] -> [G], unbiased; 0 for a group of one."""
        return (self.sum(self.centered(values).square()) / (self.size - 1).clamp(min=1)).sqrt()

    def unequal(self, values: Tensor) -> Tensor:
        """[B] -> [B] bool, whether the values of the group differ."""
        blank = torch.zeros(len(self.size), dtype=values.dtype, device=values.device)
        low = blank.scatter_reduce(0, self.member, values, "amin", include_self=False)
        high = blank.scatter_reduce(0, self.member, values, "amax", include_self=False)
        return torch.lt(low, high)[self.member]


def _group_relative(scores: Tensor, groups: Tensor, normalize_by_std: bool) -> Tensor:
    """[B] float64"""
    group = _Groups(groups)
    centered = group.centered(scores)
    return centered / (group.std(scores) + EPS)[group.member] if normalize_by_std else centered


def _of_episodes(episodes: Episodes, advantages: Tensor) -> Advantages:
    """From [B]: all policy tokens of an episode have its advantage."""
    return _of_tokens(episodes, advantages[episodes.owners])


def _of_tokens(episodes: Episodes, advantages: Tensor, returns: Tensor | None = None) -> Advantages:
    """From [P] to [T]."""

    def scattered(values: Tensor) -> Tensor:
        column = torch.zeros(len(episodes.mask), device=values.device)
        column[episodes.mask] = values.float()
        return column

    return Advantages(scattered(advantages), None if returns is None else scattered(returns))
