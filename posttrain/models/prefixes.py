"""Prompts that packed sequences share: how the tokens of all sequences follow from those that are computed.

Shape legend: T tokens of all sequences, C of them computed, B sequences, K key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class SharedPrefixes:
    """How T tokens of sequences follow from the C of them that are computed."""

    source: Tensor
    """[T] which of the computed tokens each token is"""
    own: Tensor
    """[C] where each computed token stands among all; of several places the first"""
    offsets: Tensor
    """[B + 1] int32 offsets of the sequences among the computed tokens"""
    copies: Tensor
    """[T] the places of all tokens, by the computed token that they are"""
    first: Tensor
    """[C] where the places of each computed token begin in ``copies``"""

    @staticmethod
    def build(cu_seqlens: Tensor, shared: Tensor) -> SharedPrefixes:
        """Lay out sequences of which the first ``shared`` [B] tokens are those of the last one before that has 0
        there."""
        offsets = cu_seqlens.long()
        lengths, numbers = offsets.diff(), torch.arange(len(shared))
        leader = torch.where(shared == 0, numbers, 0).cummax(0).values
        sequence = torch.repeat_interleave(numbers, lengths)
        column = torch.arange(len(sequence)) - offsets[sequence]
        place = offsets[leader[sequence]] + column
        computed = column >= shared[sequence]
        place = torch.where(computed, torch.arange(len(sequence)), place)
        source = (computed.cumsum(0) - 1)[place]
        first = torch.bincount(source).cumsum(0).roll(1)
        first[0] = 0
        own_offsets = torch.zeros(len(offsets), dtype=torch.int32)
        own_offsets[1:] = (lengths - shared).cumsum(0)
        return SharedPrefixes(source, computed.nonzero().flatten(), own_offsets, source.argsort(stable=True), first)

    def to(self, device: torch.device) -> SharedPrefixes:
        """Move it to the device."""
        return SharedPrefixes(*(getattr(self, field.name).to(device) for field in fields(self)))

    def spread(self, x: Tensor) -> Tensor:
        """[C, K, D] of the computed tokens -> [T, K, D] of all."""
        result: Tensor = _Spread.apply(x, self.source, self.copies, self.first)  # type: ignore[no-untyped-call]
        return result


class _Spread(torch.autograd.Function):
    """Copies tokens to their places. The gradient of a token is the sum over its places, always in the same order, and
    on a GPU in float32; that of indexing would be added up with atomics, in the type of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, copies: Tensor, first: Tensor) -> Tensor:
        ctx.save_for_backward(copies, first)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        copies, first = ctx.saved_tensors
        grad = upstream[0]
        summed = F.embedding_bag(copies, grad.flatten(1), first, mode="sum")
        return summed.view(-1, *grad.shape[1:]), None, None, None
