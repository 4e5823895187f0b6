"""Log-probabilities and entropies of given tokens, straight from hidden states.

The [tokens, vocabulary] matrix of logits exists only one chunk at a time, forward and backward.

Shape legend: N tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 1 << 26
"""Logits that exist at once (256 MiB in float32)."""


def token_logprobs(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of each target token and entropy of its distribution, at a sampling temperature.

    Args:
        hidden: [N, D], with gradient.
        head: [V, D] output weights, with gradient.
        targets: [N] int64.
        temperature: logits are divided by it, as the engine does before it samples.

    Returns:
        logprobs [N] float32 with gradient, entropies [N] float32 without.
    """
    chunk = max(1, CHUNK_ELEMENTS // head.shape[0])
    if len(hidden) <= chunk:
        return _chunk(hidden, head, targets, temperature)
    parts = [
        checkpoint(_chunk, h, head, t, temperature, use_reentrant=False)
        for h, t in zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True)
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _chunk(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = (hidden @ head.t()).float()
    if temperature != 1.0:
        logits = logits / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy
