"""Advantage estimators: from one reward per episode to one advantage per episode.

Shape legend: B episodes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def grpo(rewards: Tensor, groups: Tensor, *, normalize_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Group-relative advantages (GRPO, DeepSeekMath, arXiv:2402.03300, section 4.1.2).

    A_i = (r_i - mean(r of its group)) / (std(r of its group) + eps), with the unbiased standard deviation. Without the
    division it is Dr. GRPO (arXiv:2503.20783). A group of one has no baseline: its advantage is 0.

    Args:
        rewards: [B] float.
        groups: [B] int, equal for episodes of the same prompt.

    Returns:
        [B] float32.
    """
    rewards = rewards.double()
    _, member, size = torch.unique(groups, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(size), dtype=torch.float64).index_add_(0, member, rewards)
    centered = rewards - (sums / size)[member]
    if normalize_by_std:
        squares = torch.zeros(len(size), dtype=torch.float64).index_add_(0, member, centered.square())
        std = (squares / (size - 1).clamp(min=1)).sqrt()
        centered = centered / (std[member] + eps)
    return torch.where(size[member] > 1, centered, 0.0).float()
