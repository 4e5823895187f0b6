"""Sequences that begin with the same prompt, kept together so that a worker computes the prompt once.

Plain Python and numpy, but for the batch that is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from posttrain.data.bins import assign, partition

if TYPE_CHECKING:
    from posttrain.data.pack import PackedBatch

_EVEN = 1.02
"""Load of the fullest worker, over the mean, at which groups are not split any further."""


@dataclass(frozen=True)
class Prompts:
    """The prompts of a batch's sequences.

    A prompt ends before the token that predicts the first one with loss. So each hidden state that predicts is a
    sequence's own, and each row of the output head has one target.
    """

    lengths: list[int]
    """Tokens of each sequence"""
    prefixes: list[int]
    """Tokens of each sequence's prompt"""
    groups: list[list[int]]
    """Sequences by prompt. One whose prompt is empty is alone."""

    @staticmethod
    def of(batch: PackedBatch) -> Prompts:
        """Compare the tokens of all prompts."""
        ids, mask, starts = batch.input_ids.numpy(), batch.loss_mask.numpy(), batch.cu_seqlens.tolist()
        prefixes: list[int] = []
        groups: dict[bytes | int, list[int]] = {}
        for number, (start, end) in enumerate(pairwise(starts)):
            own = mask[start:end]
            prefix = max(0, int(own.argmax()) - 1) if own.any() else 0
            prefixes.append(prefix)
            groups.setdefault(ids[start : start + prefix].tobytes() or number, []).append(number)
        return Prompts(batch.lengths, prefixes, list(groups.values()))

    @property
    def saved(self) -> int:
        """Tokens that need not be computed where every prompt is computed once."""
        return sum((len(group) - 1) * self.prefixes[group[0]] for group in self.groups)

    @cached_property
    def _number(self) -> list[int]:
        """The group of each sequence."""
        numbers = [0] * len(self.lengths)
        for number, group in enumerate(self.groups):
            for sequence in group:
                numbers[sequence] = number
        return numbers

    def ordered(self, sequences: Sequence[int]) -> list[int]:
        """Return the sequences of a micro-batch in an order in which groups stand side by side."""
        return sorted(sequences, key=lambda b: (self._number[b], b))

    def shared(self, sequences: Sequence[int]) -> list[int]:
        """Return how many tokens each of these sequences takes from the first one of its group, which stands before it
        (``ordered``); 0 for the first one."""
        before = [None, *sequences][: len(sequences)]
        return [
            self.prefixes[b] if a is not None and self._number[a] == self._number[b] else 0
            for a, b in zip(before, sequences, strict=True)
        ]

    def computed(self, sequences: Sequence[int]) -> int:
        """Return the tokens that a worker computes of a micro-batch of these sequences, ``ordered``."""
        return sum(self.lengths[b] for b in sequences) - sum(self.shared(sequences))

    def assign(self, *, ranks: int, token_budget: int) -> list[list[list[int]]]:
        """Assign sequences to workers and micro-batches, as ``bins.assign`` does, by the tokens that are computed.

        A group stays whole unless a micro-batch cannot hold it, or workers would wait for the one that has it: then
        groups are split into 2, 4, ... parts, each of which computes the prompt, and the fewest are taken among the
        divisions whose fullest worker has the least to do.
        """
        best: tuple[int, list[list[list[int]]]] | None = None
        even = _EVEN * (sum(self.lengths) - self.saved) / ranks
        pieces, most = 1, max(map(len, self.groups))
        while best is None or (ranks > 1 and best[0] > even and pieces < 2 * most):
            units = [unit for group in self.groups for unit in self._split(group, pieces, token_budget)]
            placed = assign([self.computed(unit) for unit in units], ranks=ranks, token_budget=token_budget)
            parts = [[self.ordered([b for i in micro for b in units[i]]) for micro in of_rank] for of_rank in placed]
            load = max(sum(map(self.computed, of_rank)) for of_rank in parts)
            if best is None or load < best[0]:
                best = load, parts
            pieces *= 2
        return best[1]

    def _split(self, group: list[int], pieces: int, token_budget: int) -> list[list[int]]:
        """Split a group into at least ``pieces`` parts of equal size that a micro-batch can hold."""
        prefix = self.prefixes[group[0]]
        own = [self.lengths[b] - prefix for b in group]
        space = max(1, token_budget - prefix)
        count = min(len(group), max(pieces, -(-sum(own) // space)))
        while True:
            parts = partition(own, count)
            if count == len(group) or all(sum(own[i] for i in part) <= space for part in parts):
                return [[group[i] for i in part] for part in parts]
            count += 1
