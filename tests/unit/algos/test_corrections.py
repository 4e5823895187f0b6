"""Importance corrections against numbers worked out by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.algos.corrections import correct, effective_sample_size

# Three sequences: of three policy tokens (one of a tool between them), of two, and of none.
SEQUENCE = torch.tensor([0, 0, 0, 0, 1, 1, 2])
MASK = torch.tensor([1, 1, 0, 1, 1, 1, 0], dtype=torch.bool)
RATIO = [0.5, 4.0, 3.0, 1.0, 1.0]  # of the policy's tokens: products 6 and 1, geometric means 6^(1/3) and 1


def corrected(gap, sequence=SEQUENCE, mask=MASK, **settings):
    neutral = {"weight": "none", "upper": math.inf, "lower": None, "reject": "none", "reject_above": math.inf}
    return correct(gap, sequence, mask, **neutral | settings)


def log_ratio(ratios, elsewhere=50.0):
    column = torch.full((7,), elsewhere, dtype=torch.float64)
    column[MASK] = torch.tensor(ratios, dtype=torch.float64).log()
    return column


# settings -> weights, truncated, masked, rejected
BY_HAND = [
    ({}, [1, 1, 1, 1, 1], 0, 0, 0),
    ({"weight": "token"}, RATIO, 0, 0, 0),
    ({"weight": "token", "upper": 2.0}, [0.5, 2, 2, 1, 1], 2 / 5, 0, 0),
    ({"weight": "token", "upper": 3.5, "lower": 0.6}, [0, 0, 3, 1, 1], 0, 2 / 5, 0),
    # A ratio at a bound is within it.
    ({"weight": "token", "upper": 1.0}, [0.5, 1, 1, 1, 1], 2 / 5, 0, 0),
    ({"weight": "token", "upper": 1.0, "lower": 1.0}, [0, 0, 0, 1, 1], 0, 3 / 5, 0),
    ({"reject": "max_token", "reject_above": 1.0}, [0, 0, 0, 1, 1], 0, 0, 1 / 2),
    ({"reject": "geometric_mean", "reject_above": 1.0}, [0, 0, 0, 1, 1], 0, 0, 1 / 2),
    ({"weight": "sequence", "upper": 8.0}, [6, 6, 6, 1, 1], 0, 0, 0),
    ({"weight": "sequence", "upper": 5.0}, [5, 5, 5, 1, 1], 3 / 5, 0, 0),
    ({"weight": "sequence", "upper": 5.0, "lower": 0.5}, [0, 0, 0, 1, 1], 0, 3 / 5, 0),
    ({"reject": "geometric_mean", "reject_above": 1.8}, [0, 0, 0, 1, 1], 0, 0, 1 / 2),
    ({"reject": "geometric_mean", "reject_above": 1.9}, [1, 1, 1, 1, 1], 0, 0, 0),
    ({"reject": "max_token", "reject_above": 3.9}, [0, 0, 0, 1, 1], 0, 0, 1 / 2),
    ({"reject": "max_token", "reject_above": 4.1}, [1, 1, 1, 1, 1], 0, 0, 0),
    ({"weight": "token", "upper": 2.0, "reject": "max_token", "reject_above": 3.9}, [0, 0, 0, 1, 1], 2 / 5, 0, 1 / 2),
]


@pytest.mark.parametrize(("settings", "weights", "truncated", "masked", "rejected"), BY_HAND)
def test_by_hand(settings, weights, truncated, masked, rejected):
    gap = log_ratio(RATIO).requires_grad_()
    result, metrics = corrected(gap, **settings)
    assert not result.requires_grad
    assert result.dtype == torch.float64
    assert not result[~MASK].any()
    torch.testing.assert_close(result[MASK], torch.tensor(weights, dtype=torch.float64))
    assert metrics == pytest.approx(
        {
            "correction/truncated": truncated,
            "correction/masked": masked,
            "correction/rejected": rejected,
            "correction/weight/mean": sum(weights) / 5,
            "correction/effective_sample_size": sum(weights) ** 2 / (5 * sum(w * w for w in weights)),
        }
    )


def test_a_ratio_far_below_is_rejected_like_one_far_above():
    for ratio in (0.2, 5.0):
        gap = log_ratio([ratio, ratio, ratio, 1.0, 1.0])
        for reject in ("max_token", "geometric_mean"):
            _, metrics = corrected(gap, reject=reject, reject_above=4.0)
            assert metrics["correction/rejected"] == 0.5


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("weight", ["token", "sequence"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_gaps_stay_finite(sign, weight, dtype):
    gap = torch.full((7,), sign * 50.0, dtype=dtype)
    for bounds in ({}, {"upper": 2.0}, {"upper": 2.0, "lower": 0.5}):
        weights, metrics = corrected(gap, weight=weight, **bounds)
        assert weights.dtype == dtype
        assert torch.isfinite(weights).all()
        assert all(math.isfinite(x) for x in metrics.values())


def test_nothing_to_correct():
    weights, metrics = corrected(torch.zeros(7), mask=torch.zeros(7, dtype=torch.bool), weight="token")
    assert not weights.any()
    assert set(metrics.values()) == {0.0}


@pytest.mark.parametrize(
    "settings",
    [
        {"weight": "tokens"},
        {"reject": "mean"},
        {"weight": "token", "upper": 0.0},
        {"weight": "token", "upper": 1.0, "lower": 2.0},
        {"weight": "token", "lower": -1.0},
        {"reject": "max_token", "reject_above": 0.5},
    ],
)
def test_settings_that_mean_nothing_are_errors(settings):
    with pytest.raises(ValueError, match="correction"):
        corrected(log_ratio(RATIO), **settings)


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=20))
def test_the_effective_sample_size_is_between_one_episode_and_all(weights):
    share = effective_sample_size(torch.tensor(weights))
    assert share == 0.0 or 1 / len(weights) - 1e-6 <= share <= 1 + 1e-6
    assert effective_sample_size(torch.full((7,), 3.0)) == pytest.approx(1.0)
    assert effective_sample_size(torch.tensor([0.0, 0.0, 5.0, 0.0])) == pytest.approx(0.25)


@given(st.permutations(range(3)), st.sampled_from([s for s, *_ in BY_HAND]))
def test_the_order_of_sequences_does_not_matter(order, settings):
    place = torch.cat([(i == SEQUENCE).nonzero().flatten() for i in order])
    renamed = torch.tensor([order.index(int(i)) for i in SEQUENCE[place]])
    straight, metrics = corrected(log_ratio(RATIO), **settings)
    shuffled, same = corrected(log_ratio(RATIO)[place], renamed, MASK[place], **settings)
    torch.testing.assert_close(shuffled, straight[place])
    assert same == pytest.approx(metrics)
