"""Estimators of KL(policy || reference) from log-probabilities of sampled tokens (Schulman 2020,
http://joschu.net/blog/kl-approx.html). All act token by token: [T] in, [T] out."""

from __future__ import annotations

import torch
from torch import Tensor


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Per-token KL estimate [T].

    - ``k1``: log p - log q, unbiased, of either sign;
    - ``k2``: (log p - log q)^2 / 2;
    - ``low_var_kl`` (k3): q/p - 1 - log(q/p), unbiased and never negative. As verl does, the
      log-ratio is clamped to [-20, 20] and the result to [-10, 10], so that one far-off token cannot dominate.
    """
    delta = ref_logprobs - logprobs
    if estimator == "k1":
        return -delta
    if estimator == "k2":
        return 0.5 * delta.square()
    if estimator == "low_var_kl":
        delta = delta.clamp(-20.0, 20.0)
        return (torch.expm1(delta) - delta).clamp(-10.0, 10.0)
    raise ValueError(f"unknown KL estimator {estimator!r}")
