"""Ragged batches: sequences side by side without padding, balanced over workers, cut into micro-batches.

Shape legend: T tokens of all sequences, B sequences.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from posttrain.types import Ids

Bools = Sequence[bool] | npt.NDArray[np.bool_]


@dataclass
class PackedBatch:
    """B sequences side by side in T tokens. The same type feeds SFT and RL; columns a stage has no use for are None.

    Log-probability columns hold at position t the log-probability of token t given those before it.
    """

    input_ids: Tensor
    """[T] int64"""
    position_ids: Tensor
    """[T] int64, restarting at 0 in each sequence"""
    cu_seqlens: Tensor
    """[B + 1] int32 offsets: sequence b is tokens cu_seqlens[b]:cu_seqlens[b + 1]"""
    loss_mask: Tensor
    """[T] bool, true where the token carries loss (the assistant wrote it)"""
    loss_weights: Tensor | None = None
    """[T] float32: the loss is the sum of weight times per-token loss (see ``algos.reduce``)"""
    advantages: Tensor | None = None
    """[T] float32"""
    rollout_logprobs: Tensor | None = None
    """[T] float32, the engine's"""
    old_logprobs: Tensor | None = None
    """[T] float32, under the policy that ratios are taken to; None: the policy has not moved since it sampled"""
    ref_logprobs: Tensor | None = None
    """[T] float32, the reference model's"""
    correction: Tensor | None = None
    """[T] float32 factor of the loss weights (``algos.corrections``)"""
    sequence_log_ratio: Tensor | None = None
    """[T] float32 (``algos.losses.sequence_log_ratio``)"""
    selected: Tensor | None = None
    """[T] bool, tokens that a loss treats apart (``clip_cov``, ``kl_cov``)"""
    values: Tensor | None = None
    """[T] float32, the critic's before this step's first update"""
    returns: Tensor | None = None
    """[T] float32, what the critic is to predict"""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> list[int]:
        return self.cu_seqlens.diff().tolist()

    @staticmethod
    def from_sequences(ids: Sequence[Ids], masks: Sequence[Bools]) -> PackedBatch:
        """Pack sequences in order. The first token of a sequence never carries loss: nothing predicts it."""
        lengths = torch.tensor([len(s) for s in ids], dtype=torch.int64)
        offsets = torch.zeros(len(ids) + 1, dtype=torch.int32)
        offsets[1:] = lengths.cumsum(0)
        mask = torch.cat([torch.as_tensor(m, dtype=torch.bool) for m in masks])
        mask[offsets[:-1].long()] = False
        return PackedBatch(
            input_ids=torch.cat([torch.as_tensor(s, dtype=torch.int64) for s in ids]),
            position_ids=torch.cat([torch.arange(n) for n in lengths.tolist()]),
            cu_seqlens=offsets,
            loss_mask=mask,
        )

    def select(self, sequences: Sequence[int]) -> PackedBatch:
        """The batch of these sequences, in this order."""
        starts = self.cu_seqlens.tolist()
        tokens = torch.cat([torch.arange(starts[b], starts[b + 1]) for b in sequences])
        lengths = torch.tensor([starts[b + 1] - starts[b] for b in sequences])
        offsets = torch.zeros(len(sequences) + 1, dtype=torch.int32)
        offsets[1:] = lengths.cumsum(0)
        columns: dict[str, Any] = {
            f.name: None if (column := getattr(self, f.name)) is None else column[tokens]
            for f in fields(self)
            if f.name != "cu_seqlens"
        }
        return PackedBatch(cu_seqlens=offsets, **columns)

    def empty_like(self) -> PackedBatch:
        """A two-token batch without loss, for a worker that has run out of micro-batches while others have not
        (collectives need every worker)."""
        one = replace(self.select([0]))
        blank: dict[str, Any] = {
            f.name: None if (column := getattr(one, f.name)) is None else torch.zeros(2, dtype=column.dtype)
            for f in fields(one)
        }
        blank |= {"cu_seqlens": torch.tensor([0, 2], dtype=torch.int32), "position_ids": torch.arange(2)}
        return PackedBatch(**blank)


@dataclass(frozen=True)
class Placement:
    """Which sequences go to which worker and micro-batch. ``parts[rank][m]`` lists sequence indices; every rank has the
    same number of micro-batches, and an empty list stands for a micro-batch without work."""

    parts: list[list[list[int]]]

    def shards(self, batch: PackedBatch) -> list[list[PackedBatch]]:
        """``batch`` as ``[rank][micro-batch]``."""
        return [[batch.select(part) if part else batch.empty_like() for part in rank] for rank in self.parts]

    def gather(self, columns: Sequence[Sequence[Tensor]], batch: PackedBatch) -> Tensor:
        """Put per-token columns computed as ``[rank][micro-batch]`` back into the order of ``batch``: [T]."""
        starts = batch.cu_seqlens.tolist()
        out = torch.zeros(batch.num_tokens, dtype=columns[0][0].dtype)
        for rank, rank_columns in zip(self.parts, columns, strict=True):
            for part, column in zip(rank, rank_columns, strict=True):
                at = 0
                for b in part:
                    n = starts[b + 1] - starts[b]
                    out[starts[b] : starts[b + 1]] = column[at : at + n]
                    at += n
        return out


def place(lengths: Sequence[int], *, ranks: int, token_budget: int, sequence_limit: int | None = None) -> Placement:
    """Balance sequences over workers, and cut each worker's share into micro-batches within the token budget.

    A worker's micro-batches are of equal cost where that fits, since workers wait for each other in every one; else
    they are filled by ``best_fit``, which needs fewer. A sequence longer than the budget gets a micro-batch of its own.
    """
    shares = partition(lengths, ranks)
    limit = sequence_limit or len(lengths)
    packed = [best_fit([lengths[b] for b in share], token_budget, limit).bins for share in shares]
    bins = max(_fewest_bins([lengths[b] for b in share], token_budget, limit) for share in shares)
    while True:  # at the latest with as many as `best_fit` needs
        parts = [_cut([lengths[b] for b in share], bins, token_budget, limit) for share in shares]
        for rank, tight in enumerate(packed):
            if parts[rank] is None and len(tight) <= bins:
                parts[rank] = [*tight, *([] for _ in range(bins - len(tight)))]
        found = [part for part in parts if part is not None]
        if len(found) == ranks:
            return Placement(
                [[[share[i] for i in micro] for micro in part] for share, part in zip(shares, found, strict=True)]
            )
        bins += 1


def _fewest_bins(lengths: Sequence[int], token_budget: int, limit: int) -> int:
    """A lower bound on the micro-batches of one worker."""
    tokens = sum(min(n, token_budget) for n in lengths)
    return max(1, -(-tokens // token_budget), -(-len(lengths) // limit))


def _cut(lengths: Sequence[int], bins: int, token_budget: int, limit: int) -> list[list[int]] | None:
    """Sequences in ``bins`` micro-batches of nearly equal cost; None where one of them breaks a limit."""
    parts = partition(lengths, bins)
    fits = all(len(m) <= limit and sum(lengths[b] for b in m) <= token_budget for m in parts if len(m) > 1)
    return parts if fits else None


@dataclass(frozen=True)
class Packing:
    """Sequences in bins of a token budget."""

    bins: list[list[int]]
    """Indices of sequences, the fullest bin first."""
    tokens: int
    """Of all sequences."""
    capacity: int
    """The budget times the bins; a sequence above the budget counts as a budget of its own length."""

    @property
    def fill(self) -> float:
        """Share of the bins' capacity that holds tokens."""
        return self.tokens / max(1, self.capacity)


def best_fit(lengths: Sequence[int], token_budget: int, sequence_limit: int | None = None) -> Packing:
    """Fill bins of ``token_budget`` tokens by best-fit decreasing: the longest sequence first, each into the fullest
    bin that has room. It needs at most 11/9 of the fewest bins, plus 4 (Johnson et al., SIAM J. Comput. 3(4), 1974),
    and hardly more than the fewest where sequences are much shorter than the budget.

    Args:
        lengths: tokens of each sequence.
        token_budget: of a bin. A sequence above it gets a bin of its own.
        sequence_limit: most sequences of a bin; None: no limit.
    """
    limit = sequence_limit or len(lengths)
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    """(tokens left, bin) of the bins that are not full, in order."""
    for b in sorted(range(len(lengths)), key=lambda b: -lengths[b]):
        at = bisect_left(rooms, (lengths[b], -1))
        if at < len(rooms):
            room, bin_ = rooms.pop(at)
        else:
            room, bin_ = token_budget, len(bins)
            bins.append([])
        bins[bin_].append(b)
        if room >= lengths[b] and len(bins[bin_]) < limit:
            insort(rooms, (room - lengths[b], bin_))
    filled = [sum(lengths[b] for b in members) for members in bins]
    order = sorted(range(len(bins)), key=lambda i: -filled[i])
    return Packing([sorted(bins[i]) for i in order], sum(filled), sum(max(n, token_budget) for n in filled))


def partition(costs: Sequence[int], k: int) -> list[list[int]]:
    """Split items into ``k`` groups of nearly equal total cost: the largest differencing method of Karmarkar and Karp
    (1982). Every group has an item where there are at least ``k`` items.

    Returns:
        ``k`` sorted lists of indices into ``costs``.
    """
    if k == 1:
        return [list(range(len(costs)))]
    # A state is k (total, items) groups, heaviest first; the two states of largest spread are merged, heavy onto light.
    # Every item weighs a little extra, so that items of cost 0 spread out as well.
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    scale = len(costs) + 1
    for i, cost in enumerate(costs):
        weight = cost * scale + 1
        heapq.heappush(heap, (-weight, i, [(weight, [i])] + [(0, [])] * (k - 1)))
    while len(heap) > 1:
        _, order, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        merged = sorted(
            ((x[0] + y[0], x[1] + y[1]) for x, y in zip(a, reversed(b), strict=True)), key=lambda g: g[0], reverse=True
        )
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], order, merged))
    groups = [sorted(items) for _, items in heap[0][2]] if heap else [[] for _ in range(k)]
    return sorted(groups, key=lambda g: g[0] if g else len(costs))
