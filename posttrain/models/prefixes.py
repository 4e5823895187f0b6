"""Prompts that packed sequences share: how the tokens of all sequences follow from those that are computed.

Shape legend: T tokens of all sequences, C of them computed, B sequences, K key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from posttrain.models.rows import copy_rows


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
        return copy_rows(x, self.source, self.copies, self.first)
