"""What advantage estimators read, and what they return.

Shape legend: B episodes, T tokens of all of them, P of these the policy's, G groups.

What holds for all estimators:

- An episode earns its reward at its last policy token; a KL penalty is subtracted token by token. Where an estimator
  takes one number an episode, that is its *score*: the reward less its penalties.
- Prompts and tool replies are not actions. Sums, discounts and values run over policy tokens only, as if the others
  were not there, and the advantage is 0 on the others.
- Each episode of ``Episodes`` counts in the statistics of its group, also one without a policy token, which gets no
  advantage. The policy took no action in such an episode, and `rl` leaves it out (``rl.batch.usable``).
- A group of one, or of equal scores, says nothing about which action was better: a group-relative advantage is 0.
- Whitening is over all policy tokens of the batch, so that every token has the same say in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from posttrain.algos import segments
from posttrain.algos.ops import EPS


@dataclass(frozen=True)
class Advantages:
    """What an estimator returns. 0 where the mask is false."""

    advantages: Tensor
    """[T] float32"""
    returns: Tensor | None = None
    """[T] float32: what a critic is trained to predict"""


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
    """name -> [B], the rewards by part (for an estimator that declares ``parts``)"""
    part_weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of a part; 1 where none is given"""
    baselines: Tensor | None = None
    """[B] reward of the greedy episode of the same prompt (``greedy``)"""
    values: Tensor | None = None
    """[T] the critic's values (``critic``)"""
    teacher_log_ratio: Tensor | None = None
    """[T] log-probability under the teacher less that under the policy (``teacher``)"""
    played: Tensor | None = None
    """[B] int, equal for branches of one episode of an agent; None: each is an episode of its own"""

    @property
    def segment_ids(self) -> Tensor:
        """Return the episode [P] of each policy token."""
        return self.sequence[self.mask]

    def token_rewards(self) -> Tensor:
        """Return the rewards of tokens, [P] float64: less the penalty, plus the episode's reward on its last token."""
        rewards = torch.where(segments.last_tokens(self.segment_ids), self.rewards.double()[self.segment_ids], 0.0)
        return rewards if self.penalties is None else rewards - self.penalties[self.mask].double()

    def scores(self) -> Tensor:
        """Return the reward of each episode less all penalties, [B] float64."""
        if self.penalties is None:
            return self.rewards.double()
        penalties = segments.segment_sum(self.penalties[self.mask], self.segment_ids, len(self.rewards))
        return self.rewards.double() - penalties

    def by_group(self) -> Groups:
        """Return the statistics of the groups."""
        return Groups(self.groups)

    def without_branches(self) -> tuple[Tensor, Tensor, Groups]:
        """Return the best score [E] of each episode that was played, the episode [B] of each branch, and the groups of
        the E episodes."""
        scores = self.scores()
        played = torch.arange(len(scores)) if self.played is None else self.played
        numbers, episode = played.unique(return_inverse=True)
        best = scores.new_full((len(numbers),), -torch.inf).scatter_reduce(0, episode, scores, "amax")
        return best, episode, Groups(self.groups.new_empty(len(numbers)).scatter(0, episode, self.groups))

    def following(self, values: Tensor) -> Tensor:
        """Return the value [P] of the next policy token of the episode; 0 after the last."""
        return segments.following(values, self.segment_ids)

    def discounted_sums(self, values: Tensor, discount: float) -> Tensor:
        """Return y_t = x_t + discount * y_(t+1), [P], within each episode."""
        return segments.discounted_sums(values, self.segment_ids, discount)

    def advantages(self, per_episode: Tensor, *, whiten: bool = False) -> Advantages:
        """Return [B] advantages as ``Advantages``: all policy tokens of an episode have its advantage."""
        return self.token_advantages(per_episode[self.segment_ids], whiten=whiten)

    def token_advantages(self, per_token: Tensor, returns: Tensor | None = None, *, whiten: bool = False) -> Advantages:
        """Return advantages, and returns for a critic, of the policy's tokens, both [P], as ``Advantages``.

        Args:
            whiten: shift and scale the advantages to mean 0 and variance 1.
        """
        whitened = segments.whiten(per_token) if whiten else per_token
        return Advantages(self._scattered(whitened), None if returns is None else self._scattered(returns))

    def _scattered(self, values: Tensor) -> Tensor:
        """Return [T] from [P]."""
        column = torch.zeros(len(self.mask), device=values.device)
        column[self.mask] = values.float()
        return column


class Groups:
    """Statistics of groups of episodes."""

    member: Tensor
    """[B] int64, the group of each episode"""
    size: Tensor
    """[G]"""

    def __init__(self, groups: Tensor) -> None:
        _, self.member, self.size = torch.unique(groups, return_inverse=True, return_counts=True)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum [G] of values [B] in each group."""
        return segments.segment_sum(values, self.member, len(self.size))

    def centered(self, values: Tensor) -> Tensor:
        """Return values [B] less the mean of their group; exactly 0 in a group of equal values."""
        centered = values - (self.sum(values) / self.size)[self.member]
        return torch.where(self.unequal(values), centered, 0.0)

    def std(self, values: Tensor) -> Tensor:
        """Return the unbiased standard deviation [G] of values [B]; 0 for a group of one."""
        return (self.sum(self.centered(values).square()) / (self.size - 1).clamp(min=1)).sqrt()

    def unequal(self, values: Tensor) -> Tensor:
        """Return where the values of the group differ, [B] bool."""
        blank = torch.zeros(len(self.size), dtype=values.dtype, device=values.device)
        low = blank.scatter_reduce(0, self.member, values, "amin", include_self=False)
        high = blank.scatter_reduce(0, self.member, values, "amax", include_self=False)
        return torch.lt(low, high)[self.member]

    def relative(self, values: Tensor, normalize_by_std: bool) -> Tensor:
        """Return values [B] less the mean of their group, over its standard deviation if asked for."""
        centered = self.centered(values)
        return centered / (self.std(values) + EPS)[self.member] if normalize_by_std else centered
