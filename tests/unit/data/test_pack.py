import importlib.util
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.bins import best_fit, partition
from posttrain.data.pack import PackedBatch, Placement, place

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def example():
    batch = PackedBatch.from_sequences(
        [[5, 6, 7], [8, 9], [1, 2, 3, 4]],
        [[True, False, True], [False, True], [False, True, True, False]],
    )
    batch.loss_weights = torch.arange(9, dtype=torch.float32)
    batch.advantages = torch.arange(9, dtype=torch.float32) * 10
    return batch


def test_from_sequences():
    batch = example()
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 9, 1, 2, 3, 4]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 9]
    # The first token of a sequence never carries loss, whatever its mask says.
    assert batch.loss_mask.tolist() == [False, False, True, False, True, False, True, True, False]
    assert (batch.num_tokens, batch.num_sequences, batch.lengths) == (9, 3, [3, 2, 4])
    types = (batch.input_ids.dtype, batch.position_ids.dtype, batch.cu_seqlens.dtype, batch.loss_mask.dtype)
    assert types == (torch.int64, torch.int64, torch.int32, torch.bool)


def test_from_sequences_takes_numpy_columns():
    import numpy as np

    ids, masks = [np.array([1, 2], dtype=np.int32)], [np.array([True, True])]
    batch = PackedBatch.from_sequences(ids, masks)
    assert batch.input_ids.tolist() == [1, 2]
    assert masks[0].tolist() == [True, True]  # the caller's own array is not written to


def test_select_reorders_every_column():
    part = example().select([2, 0])
    assert part.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert part.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert part.cu_seqlens.tolist() == [0, 4, 7]
    assert part.cu_seqlens.dtype == torch.int32
    assert part.loss_weights.tolist() == [5, 6, 7, 8, 0, 1, 2]
    assert part.advantages.tolist() == [50, 60, 70, 80, 0, 10, 20]
    assert part.old_logprobs is None


def test_empty_like_has_the_same_columns_and_no_loss():
    blank = example().empty_like()
    assert blank.num_tokens == 2
    assert blank.num_sequences == 1
    assert not blank.loss_mask.any()
    assert blank.loss_weights.tolist() == [0.0, 0.0]
    assert blank.advantages.tolist() == [0.0, 0.0]
    assert blank.rollout_logprobs is None
    assert blank.position_ids.tolist() == [0, 1]


@settings(deadline=None, max_examples=200)
@given(
    LENGTHS,
    st.integers(1, 5),
    st.integers(1, 150),
    st.one_of(st.none(), st.integers(1, 6)),
)
def test_placement(lengths, ranks, budget, limit):
    parts = place(lengths, ranks=ranks, token_budget=budget, sequence_limit=limit).parts
    assert len(parts) == ranks
    assert len({len(rank) for rank in parts}) == 1
    assert sorted(b for rank in parts for micro in rank for b in micro) == list(range(len(lengths)))
    for micro in (micro for rank in parts for micro in rank):
        assert sum(lengths[b] for b in micro) <= budget or len(micro) == 1
        assert limit is None or len(micro) <= limit
    # No worker idles while another has two sequences more than it could share.
    assert all(any(rank) for rank in parts) or len(lengths) < ranks


def test_a_large_budget_is_one_micro_batch():
    assert place([5, 5, 5], ranks=1, token_budget=15).parts == [[[0, 1, 2]]]
    assert [len(rank) for rank in place([9] * 8, ranks=2, token_budget=36).parts] == [1, 1]


def test_a_sequence_above_the_budget_is_alone():
    assert place([100, 3, 3], ranks=1, token_budget=10).parts == [[[0], [1, 2]]]


def test_the_budget_holds_where_more_bins_pack_worse():
    # The share of one worker needs few bins; cut into as many as the other needs, it overflows at first.
    for lengths, budget, limit in (
        ([37, 19, 155, 96, 10, 35, 54, 102, 2, 6, 33, 14, 40], 251, 3),
        ([6, 149, 9, 35, 73, 5, 27, 27, 4, 8, 187, 174, 10, 17, 27], 336, 4),
    ):
        parts = place(lengths, ranks=2, token_budget=budget, sequence_limit=limit).parts
        assert max(len(micro) for rank in parts for micro in rank) <= limit


def test_fewer_sequences_than_ranks():
    batch = example()
    placement = place([3, 2, 4], ranks=5, token_budget=100)
    shards = placement.shards(batch)
    assert [len(rank) for rank in shards] == [1] * 5
    assert sum(bool(shard[0].loss_mask.any()) for shard in shards) == 3
    assert sum(shard[0].loss_weights.sum().item() for shard in shards) == batch.loss_weights.sum().item()


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 4), st.integers(1, 100))
def test_gather_inverts_shards(lengths, ranks, budget):
    total = sum(lengths)
    tokens = torch.arange(total).split(lengths)
    batch = PackedBatch.from_sequences([t.tolist() for t in tokens], [[True] * n for n in lengths])
    placement = place(lengths, ranks=ranks, token_budget=budget)
    shards = placement.shards(batch)
    columns = [[micro.input_ids.float() for micro in rank] for rank in shards]
    assert placement.gather(columns, batch).tolist() == list(range(total))


def test_gather_needs_every_rank():
    with pytest.raises(ValueError, match="zip"):
        Placement([[[0]], [[1]]]).gather(
            [[torch.zeros(2)]], PackedBatch.from_sequences([[1, 2], [3, 4]], [[True] * 2] * 2)
        )


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 8))
def test_partition_is_a_partition(costs, k):
    groups = partition(costs, k)
    assert len(groups) == k
    assert sorted(i for g in groups for i in g) == list(range(len(costs)))
    assert all(g == sorted(g) for g in groups)
    if len(costs) >= k:
        assert all(groups)
        # The differencing method never leaves a spread above the largest item.
        loads = [sum(costs[i] for i in g) for g in groups]
        assert max(loads) - min(loads) <= max(costs)


def test_partition_balances():
    assert sorted(map(tuple, partition([8, 7, 6, 5, 4], 2))) in ([(0, 1), (2, 3, 4)], [(0, 2), (1, 3, 4)])
    rng = random.Random(0)
    for k in (2, 4, 8):
        lengths = [int(rng.lognormvariate(6, 0.8)) + 20 for _ in range(256)]
        loads = [sum(lengths[i] for i in g) for g in partition(lengths, k)]
        assert max(loads) / (sum(lengths) / k) < 1.001
    # Round robin, the plain way, is far off on the same data.
    assert max(sum(lengths[i::8]) for i in range(8)) / (sum(lengths) / 8) > 1.05


def test_partition_is_the_same_every_time():
    lengths = [random.Random(1).randint(1, 9) for _ in range(50)]
    assert partition(lengths, 4) == partition(list(lengths), 4)


# ---------------------------------------------------------------------- best fit


@settings(deadline=None, max_examples=200)
@given(LENGTHS, st.integers(1, 150), st.one_of(st.none(), st.integers(1, 6)))
def test_best_fit_is_within_the_budget(lengths, budget, limit):
    packing = best_fit(lengths, budget, limit)
    assert sorted(b for members in packing.bins for b in members) == list(range(len(lengths)))
    filled = [sum(lengths[b] for b in members) for members in packing.bins]
    assert filled == sorted(filled, reverse=True)
    assert all(n <= budget or len(members) == 1 for n, members in zip(filled, packing.bins, strict=True))
    assert limit is None or max(map(len, packing.bins)) <= limit
    assert packing.fill == pytest.approx(sum(lengths) / sum(max(n, budget) for n in filled))
    if limit is None and max(lengths) <= budget:
        # At most one bin is half empty: two such would have become one.
        assert sum(2 * n <= budget for n in filled) <= 1


def test_best_fit_takes_the_fullest_bin_with_space():
    # 6 leaves 4, 7 leaves 3: the 3 goes to the 7 and the 4 to the 6. First fit in the order given needs three bins.
    assert best_fit([3, 6, 4, 7], 10).bins == [[0, 3], [1, 2]]
    assert best_fit([3, 6, 4, 7], 10).fill == 1.0
    assert best_fit([30, 5], 10).bins == [[0], [1]]
    assert best_fit([30, 5], 10).fill == 35 / 40
    assert best_fit([1] * 5, 10, 2).bins == [[0, 1], [2, 3], [4]]
    assert best_fit([], 10).bins == []


def test_micro_batches_are_filled_where_equal_ones_do_not_fit():
    # In two parts of equal cost one would hold 11; three micro-batches were the answer before.
    lengths, budget = [5, 5, 4, 3, 3], 10
    assert any(sum(lengths[b] for b in part) > budget for part in partition(lengths, 2))
    parts = place(lengths, ranks=1, token_budget=budget).parts
    assert len(parts[0]) == 2
    assert sorted(sum(lengths[b] for b in micro) for micro in parts[0]) == [10, 10]


def test_no_more_micro_batches_than_best_fit_needs():
    rng = random.Random(3)
    for _ in range(50):
        lengths = [int(rng.lognormvariate(6, 0.9)) + 20 for _ in range(96)]
        ranks = rng.choice([1, 2, 4])
        parts = place(lengths, ranks=ranks, token_budget=4096).parts
        loads = [sum(lengths[b] for micro in rank for b in micro) for rank in parts]
        assert max(loads) - min(loads) <= max(lengths)
        shares = [[b for micro in rank for b in micro] for rank in parts]
        needed = max(len(best_fit([lengths[b] for b in share], 4096).bins) for share in shares)
        assert len(parts[0]) <= needed


def test_real_lengths_fill_the_budget():
    """Lengths as of instruction data, in tokens: half of them below 600, some of 8,000."""
    rng = random.Random(0)
    lengths = [min(8192, int(rng.lognormvariate(6.4, 0.9)) + 20) for _ in range(20_000)]
    assert best_fit(lengths, 8192).fill > 0.995


@pytest.mark.slow
def test_tool_conversations_fill_the_budget(test_data):
    """Real conversations and the real tokenizer: at least 98 %, and more than first fit and than padding."""
    script = Path(__file__).resolve().parents[3] / "scripts" / "bench_packing.py"
    spec = importlib.util.spec_from_file_location("bench_packing", script)
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    real = bench.real_lengths(test_data)
    assert len(real) == 350
    for row in bench.fills(real, [2048, 4096, 8192]):
        assert row["best fit"] >= 0.98, row
        assert row["best fit"] >= row["first fit"] > row["padding"], row
    assert bench.micro_batches(real, 2048, steps=20)["place"] < bench.micro_batches(real, 2048, steps=20)["equal"]
