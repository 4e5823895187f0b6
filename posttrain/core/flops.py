"""How much arithmetic a model takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Flops:
    """Model FLOPs of a causal LM as PaLM counts them (arXiv:2204.02311, appendix B), attention as causal: half.

    A weight costs 2 FLOPs a token forward, 2 for the gradient of its input and 2 for its own, where it is trained.
    Recomputed activations do not count, and of experts those do that a token goes through.
    """

    forward: float
    """FLOPs of all weights that are multiplied, for a token."""
    trained: float
    """FLOPs of those weights that are trained."""
    attention: float
    """FLOPs of the attention's forward pass, for a token and each token before it, halved."""

    def training(self, lengths: Sequence[int]) -> float:
        """FLOPs of a forward and a backward pass over sequences of these lengths."""
        return (2 * self.forward + self.trained) * sum(lengths) + 3 * self.attention * squares(lengths)


@dataclass(frozen=True)
class TowerFlops:
    """Model FLOPs of a vision tower's forward pass; its attention is not causal."""

    weights: float
    """FLOPs of all weights that are multiplied, for a patch."""
    whole: float
    """FLOPs of attention over a whole image, for a patch and each patch of its image."""
    windows: float = 0.0
    """FLOPs of attention within windows, for a patch and each patch of its window."""
    window: int = 0
    """Patches of a window."""

    def forward(self, patches: Sequence[float]) -> float:
        """FLOPs of a forward pass over images of so many patches each."""
        attention = sum(n * (self.whole * n + self.windows * min(n, self.window)) for n in patches)
        return self.weights * sum(patches) + attention


def squares(lengths: Sequence[int]) -> int:
    """Sum of the squares."""
    return sum(n * n for n in lengths)
