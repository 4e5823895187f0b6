"""Estimators of KL(policy || reference) from log-probabilities of sampled tokens (Schulman 2020,
http://joschu.net/blog/kl-approx.html), and the coefficient of a KL penalty in the reward.

Estimators act token by token: [T] in, [T] out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ESTIMATORS = ("k1", "k2", "k3", "low_var_kl", "abs", "k1+", "k2+", "k3+")


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Return the KL estimate [T] of each token.

    - ``k1``: log p - log q, unbiased, of either sign;
    - ``k2``: (log p - log q)^2 / 2. Biased, but the expectation of its gradient is the gradient of the KL;
    - ``k3``, also called ``low_var_kl``: q/p - 1 - log(q/p), unbiased and never negative. As verl does, the log-ratio
      is clamped to [-20, 20] and the result to [-10, 10], so that one far-off token cannot dominate;
    - ``abs``: abs(log p - log q);
    - ``k1+``, ``k2+``, ``k3+``: the value of the one named, with the gradient of ``k2``. In a loss, the gradients of k1
      and k3 are not those of the KL, whatever their values are.
    """
    if estimator.endswith("+") and estimator in ESTIMATORS:
        straight = kl_penalty(logprobs, ref_logprobs, "k2")
        return kl_penalty(logprobs, ref_logprobs, estimator[:-1]).detach() + (straight - straight.detach())
    delta = ref_logprobs - logprobs
    if estimator == "k1":
        return -delta
    if estimator == "k2":
        return 0.5 * delta.square()
    if estimator == "abs":
        return delta.abs()
    if estimator in ("k3", "low_var_kl"):
        delta = delta.clamp(-20.0, 20.0)
        return (torch.expm1(delta) - delta).clamp(-10.0, 10.0)
    raise ValueError(f"unknown KL estimator {estimator!r}")


@dataclass
class FixedKl:
    """A coefficient that stays."""

    value: float

    def update(self, kl: float, episodes: int) -> None:
        """Leave the coefficient as it is."""


@dataclass
class AdaptiveKl:
    """A coefficient that steers the KL towards a target (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    After each step it is multiplied by 1 + clip(KL / target - 1, -0.2, 0.2) x episodes / horizon, or by 0.5 where that
    is less: a step of many episodes must not make it negative. ``value`` is its whole state.
    """

    value: float
    target: float
    horizon: int
    """Episodes over which a KL of 20 % above its target, or more, would raise the coefficient by 20 %."""

    def __post_init__(self) -> None:
        if self.target <= 0.0 or self.horizon <= 0:
            raise ValueError("an adaptive KL coefficient needs a target and a horizon above 0")

    def update(self, kl: float, episodes: int) -> None:
        """Steer the coefficient after a step.

        Args:
            kl: mean KL of the step's policy tokens to the reference.
            episodes: number of episodes of the step.
        """
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.value *= max(0.5, 1.0 + error * episodes / self.horizon)
