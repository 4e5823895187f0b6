"""Operations on tensors that several algorithms share. Imports no torch (see ``posttrain.algos``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""A ratio beyond e^20 is infinite for any purpose, and must not turn into inf * 0."""
EPS = 1e-6
"""Added to a standard deviation before dividing by it."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Return the log-ratio within [-MAX_LOG_RATIO, MAX_LOG_RATIO]."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return the clipped surrogate [N], -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and where the clip acts, [N]
    bool."""
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return unclipped.maximum(clipped), (clipped > unclipped).detach()
