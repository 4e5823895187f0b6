"""Sequences to workers and micro-batches, by their lengths alone. Plain Python: a plan uses it as a run does."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass


def assign(
    lengths: Sequence[int], *, ranks: int, token_budget: int, sequence_limit: int | None = None
) -> list[list[list[int]]]:
    """Balance sequences over workers, and cut each worker's share into micro-batches within the token budget.

    A worker's micro-batches are of equal cost where that fits, since workers wait for each other in every one; else
    they are filled by ``best_fit``, which needs fewer. A sequence longer than the budget gets a micro-batch of its own.

    Returns:
        ``[rank][micro-batch]`` lists of indices; as many micro-batches for every rank, some of them perhaps empty.
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
            return [[[share[i] for i in micro] for micro in part] for share, part in zip(shares, found, strict=True)]
        bins += 1


def _fewest_bins(lengths: Sequence[int], token_budget: int, limit: int) -> int:
    """Return a lower bound on the micro-batches of one worker."""
    tokens = sum(min(n, token_budget) for n in lengths)
    return max(1, -(-tokens // token_budget), -(-len(lengths) // limit))


def _cut(lengths: Sequence[int], bins: int, token_budget: int, limit: int) -> list[list[int]] | None:
    """Return the sequences in ``bins`` micro-batches of nearly equal cost; None where one of them breaks a limit."""
    parts = partition(lengths, bins)
    fits = all(len(m) <= limit and sum(lengths[b] for b in m) <= token_budget for m in parts if len(m) > 1)
    return parts if fits else None


@dataclass(frozen=True)
class Packing:
    """Sequences in bins of a token budget."""

    bins: list[list[int]]
    """Indices of sequences, the fullest bin first."""
    tokens: int
    """Cost of all sequences."""
    capacity: int
    """The budget times the bins; a sequence above the budget counts as a budget of its own length."""

    @property
    def fill(self) -> float:
        """Return the share of the bins' capacity that holds tokens."""
        return self.tokens / max(1, self.capacity)


def best_fit(lengths: Sequence[int], token_budget: int, sequence_limit: int | None = None) -> Packing:
    """Fill bins of ``token_budget`` tokens by best-fit decreasing: the longest sequence first, each into the fullest
    bin that takes it. It needs at most 11/9 of the fewest bins, plus 4 (Johnson et al., SIAM J. Comput. 3(4), 1974),
    and hardly more than the fewest where sequences are much shorter than the budget.

    Args:
        lengths: tokens of each sequence.
        token_budget: of a bin. A sequence above it gets a bin of its own.
        sequence_limit: most sequences of a bin; None: no limit.
    """
    limit = sequence_limit or len(lengths)
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []
    """(tokens left, bin) of the bins that are not full, in order."""
    for b in sorted(range(len(lengths)), key=lambda b: -lengths[b]):
        at = bisect_left(free, (lengths[b], -1))
        if at < len(free):
            left, bin_ = free.pop(at)
        else:
            left, bin_ = token_budget, len(bins)
            bins.append([])
        bins[bin_].append(b)
        if left >= lengths[b] and len(bins[bin_]) < limit:
            insort(free, (left - lengths[b], bin_))
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
