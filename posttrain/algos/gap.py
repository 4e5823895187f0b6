"""How far the trainer's probabilities are from the engine's, on the tokens that were sampled.

The two run different kernels, so a small gap is normal. A large one means that the loss is computed on a policy that
did not act: weights that did not arrive, another temperature, another template.
"""

from __future__ import annotations

import torch
from torch import Tensor

BELOW = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Bounds of |d| of which the share of tokens below each is reported: where one mean hides two very different kinds of
tokens, these show it."""


def gap_sums(logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, Tensor]:
    """Return sums over N tokens, to be divided by ``gap/tokens``, of d = trainer - engine log-probability.

    ``gap/diff``: d; ``gap/squares``: d^2; ``gap/abs``: |d|; ``gap/k3``: e^d - 1 - d, an estimate of
    KL(engine || trainer); ``gap/outside``: tokens whose ratio lies outside [0.9, 1.1]; ``gap/below/B``: tokens with
    |d| < B, for each of ``BELOW``; ``gap/tokens``: N.
    """
    d = (logprobs - rollout_logprobs).detach().double()
    ratio = d.clamp(-20.0, 20.0).exp()
    below = {f"gap/below/{bound:g}": (d.abs() < bound).double().sum() for bound in BELOW}
    return below | {
        "gap/diff": d.sum(),
        "gap/squares": (d * d).sum(),
        "gap/abs": d.abs().sum(),
        "gap/k3": (ratio - 1.0 - d).sum(),
        "gap/outside": ((ratio < 0.9) | (ratio > 1.1)).double().sum(),
        "gap/tokens": torch.tensor(float(len(d)), dtype=torch.float64),
    }
