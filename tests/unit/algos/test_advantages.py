"""Advantage estimators against numbers worked out by hand, and what must not change them."""

import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.algos import ADVANTAGES, segments
from posttrain.algos.episodes import Episodes

NAMES = ADVANTAGES.names()

# Six episodes. Group 0: two of different lengths, one of them with a tool's reply between its tokens, and one without
# policy tokens. Group 1: equal rewards. Group 2: alone.
MASKS = [[0, 1, 1], [0, 1, 0, 1, 1], [0, 1], [0, 1], [0, 1], [0, 0]]
REWARDS = [1.0, 0.0, 2.0, 2.0, 5.0, 0.5]
GROUPS = [0, 0, 1, 1, 2, 0]
UP = 0.5 / (0.5 + 1e-6)  # group 0: scores 1, 0, 0.5 have mean 0.5 and unbiased variance 0.25


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def column(of_policy, masks=None, elsewhere=0.0):
    """[T] from the values of policy tokens."""
    values = iter(of_policy)
    return tensor([next(values) if x else elsewhere for m in masks or MASKS for x in m])


def episodes(masks=None, rewards=None, groups=None, **columns):
    masks = masks or MASKS
    return Episodes(
        tensor(rewards or REWARDS),
        torch.tensor(groups or GROUPS),
        torch.tensor([x for m in masks for x in m], dtype=torch.bool),
        torch.tensor([i for i, m in enumerate(masks) for _ in m], dtype=torch.int64),
        **columns,
    )


def estimate(name, batch, **options):
    neutral = {"gamma": 1.0, "lam": 1.0, "normalize_by_std": True}
    return ADVANTAGES.get(name)(batch, neutral | options)


def whitened(values):
    mean, variance = statistics.mean(values), statistics.variance(values)
    return [(x - mean) / math.sqrt(variance + 1e-8) for x in values]


def check(actual, of_policy):
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), column(of_policy), rtol=1e-6, atol=1e-6)


PENALTIES = [0.1, 0.2, 0.0, 0.4, 0.0, 0.0, 0.0, 0.0]
PARTS = {"right": tensor(REWARDS), "short": tensor([0.0, 10.0, 0.0, 10.0, 3.0, 5.0])}

BY_HAND = {
    "grpo": ({}, {}, [UP, UP, -UP, -UP, -UP, 0, 0, 0]),
    "grpo without std": ({}, {"normalize_by_std": False}, [0.5, 0.5, -0.5, -0.5, -0.5, 0, 0, 0]),
    # Scores 0.7, -0.4, 0.5: mean 0.8/3.
    "grpo with KL, without std": (
        {"penalties": column(PENALTIES, elsewhere=99.0)},
        {"normalize_by_std": False},
        [0.7 - 0.8 / 3] * 2 + [-0.4 - 0.8 / 3] * 3 + [0, 0, 0],
    ),
    # 1 leads the second best, 0.5, by 0.5.
    "grpo_passk": ({}, {}, [UP, UP, 0, 0, 0, 0, 0, 0]),
    "grpo_passk without std": ({}, {"normalize_by_std": False}, [0.5, 0.5, 0, 0, 0, 0, 0, 0]),
    # 1 - (0 + 0.5)/2 and 0 - (1 + 0.5)/2.
    "rloo": ({}, {}, [0.75, 0.75, -0.75, -0.75, -0.75, 0, 0, 0]),
    # Lengths 2, 3 and 0: baseline (2 * 1 + 3 * 0) / 5.
    "opo": ({}, {}, [0.6, 0.6, -0.4, -0.4, -0.4, 0, 0, 0]),
    # Three of six episodes are of a group with unequal scores.
    "gpg": ({}, {}, [1.0, 1.0, -1.0, -1.0, -1.0, 0, 0, 0]),
    "reinforce_plus_plus_baseline": ({}, {}, whitened([0.5, 0.5, -0.5, -0.5, -0.5, 0, 0, 0])),
    "reinforce_plus_plus": ({}, {}, whitened([1, 1, 0, 0, 0, 2, 2, 5])),
    # 0.8 - 0; -0.1 + 0.5 * 0.8; and the tool's reply does not count as a step: -0.5 * 0.4.
    "reinforce_plus_plus with KL and discount": (
        {"penalties": column(PENALTIES, elsewhere=99.0)},
        {"gamma": 0.5},
        whitened([0.3, 0.8, -0.2, -0.4, 0, 2, 2, 5]),
    ),
    "remax": (
        {"penalties": column(PENALTIES, elsewhere=99.0), "baselines": tensor([0.5, 0.25, 1.0, 2.0, 3.0, 9.0])},
        {},
        [0.7 - 0.5, 0.8 - 0.5, -0.4 - 0.25, -0.4 - 0.25, -0.25, 1.0, 0.0, 2.0],
    ),
    # right: +1, -1, 0 in group 0; short: -1, +1, 0, and -+ 1/sqrt(2) in group 1, twice.
    "gdpo": (
        {"parts": PARTS, "part_weights": {"short": 2.0}},
        {},
        whitened([-1, -1, 1, 1, 1, -math.sqrt(2), math.sqrt(2), 0]),
    ),
    # delta of episode 0: 0.9 * 0.25 - 0.5 and 1 - 0.25; of episode 1: 0.08, 0.16 and -0.4; times 0.72 for each step.
    "gae": (
        {"values": column([0.5, 0.25, 0.1, 0.2, 0.4, 2.0, 1.0, 0.0], elsewhere=99.0)},
        {"gamma": 0.9, "lam": 0.8},
        whitened([0.265, 0.75, -0.01216, -0.128, -0.4, 0.0, 1.0, 5.0]),
    ),
    "distill": (
        {"teacher_log_ratio": column([0.5, -0.25, 0.0, 1.0, -2.0, 50.0, -50.0, 0.25], elsewhere=99.0)},
        {},
        [0.5, -0.25, 0.0, 1.0, -2.0, 50.0, -50.0, 0.25],
    ),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_by_hand(case):
    inputs, params, expected = BY_HAND[case]
    check(estimate(case.split()[0], episodes(**inputs), **params).advantages, expected)


def test_every_estimator_is_tested_by_hand_and_says_what_it_needs():
    assert {case.split()[0] for case in BY_HAND} == set(NAMES)


def test_returns_by_hand():
    def returns(case):
        inputs, params, _ = BY_HAND[case]
        return estimate(case.split()[0], episodes(**inputs), **params).returns

    check(returns("gae"), [0.765, 1.0, 0.08784, 0.072, 0.0, 2.0, 2.0, 5.0])
    check(returns("reinforce_plus_plus with KL and discount"), [0.3, 0.8, -0.2, -0.4, 0, 2, 2, 5])
    check(returns("remax"), [0.7, 0.8, -0.4, -0.4, 0.0, 2.0, 2.0, 5.0])
    assert returns("grpo") is None


def test_two_that_are_best_have_no_lead():
    batch = episodes([[1], [1], [1]], [1.0, 1.0, 0.0], [4, 4, 4])
    result = estimate("grpo_passk", batch, normalize_by_std=False)
    assert result.advantages.tolist() == [0.0, 0.0, 0.0]


def test_branches_of_the_best_episode_are_no_second_best():
    """An agent's episode of two branches, and two of one."""
    batch = episodes([[1]] * 4, [1.0, 1.0, 0.25, 0.0], [4] * 4, played=torch.tensor([1, 1, 2, 3]))
    assert estimate("grpo_passk", batch, normalize_by_std=False).advantages.tolist() == [0.75, 0.75, 0.0, 0.0]
    below = replace(batch, rewards=batch.rewards - 2.0)  # the best of negative scores, too
    assert estimate("grpo_passk", below, normalize_by_std=False).advantages.tolist() == [0.75, 0.75, 0.0, 0.0]
    # Of the three episodes: mean 5/12, squares 49/144 + 4/144 + 25/144 over two.
    expected = 0.75 / (math.sqrt(78 / 144 / 2) + 1e-6)
    check_all = estimate("grpo_passk", batch).advantages.tolist()
    assert check_all == pytest.approx([expected, expected, 0.0, 0.0])


@pytest.mark.parametrize("name", [name for name in NAMES if ADVANTAGES.get(name).group])
def test_groups_without_signal_get_exactly_zero(name):
    # 0.1 is no binary fraction, so that the mean of equal ones may differ from them in the last place.
    batch = episodes([[1]] * 6, [0.1, 0.1, 0.1, 0.7, 0.1, 0.1], [0, 0, 0, 1, 2, 2], parts={"a": tensor([0.1] * 6)})
    assert estimate(name, batch).advantages.tolist() == [0.0] * 6


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("masks", [[[0, 0], [0]], [[0, 1], [0]]], ids=["no token", "one token"])
def test_batches_with_next_to_nothing_stay_finite(name, masks):
    batch = episodes(
        masks,
        [1.0, 3.0],
        [0, 0],
        values=tensor([0.5] * 3),
        teacher_log_ratio=tensor([0.5] * 3),
        baselines=tensor([0.0, 0.0]),
        parts={"a": tensor([1.0, 3.0])},
    )
    result = estimate(name, batch).advantages
    assert torch.isfinite(result).all()
    assert not result[~batch.mask].any()


def test_tiny_differences_of_large_rewards_survive():
    result = estimate("grpo", episodes([[1], [1]], [1e6, 1e6 + 1e-3], [0, 0]))
    up = 0.5e-3 / (1e-3 / math.sqrt(2) + 1e-6)
    torch.testing.assert_close(result.advantages.double(), tensor([-up, up]), rtol=1e-4, atol=0.0)


def test_what_is_missing_is_an_error():
    for name, word in {"gae": "critic", "remax": "greedy", "gdpo": "part", "distill": "teacher"}.items():
        with pytest.raises(ValueError, match=word):
            estimate(name, episodes())
    with pytest.raises(ValueError, match="no KL"):
        estimate("gdpo", episodes(parts=PARTS, penalties=column(PENALTIES)))
    with pytest.raises(ValueError, match="shrt"):
        estimate("gdpo", episodes(parts=PARTS, part_weights={"shrt": 1.0}))


# ---------------------------------------------------------------------- properties

EPISODE = st.tuples(st.lists(st.booleans(), min_size=1, max_size=9), st.integers(0, 3), st.integers(0, 2))
"""Mask, reward, group."""


def random_batch(items, order):
    """The episodes in an order, with random columns that belong to them."""
    generator = torch.Generator().manual_seed(len(items))

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    own = [(draw(len(mask)), draw(len(mask)), draw(4)) for mask, *_ in items]
    scalars = torch.stack([own[i][2] for i in order])
    return {
        "masks": [items[i][0] for i in order],
        "rewards": [float(items[i][1]) for i in order],
        "groups": [items[i][2] for i in order],
        "values": torch.cat([own[i][0] for i in order]),
        "penalties": torch.cat([own[i][1] for i in order]),
        "baselines": scalars[:, 0],
        "parts": {"a": scalars[:, 1], "b": scalars[:, 2]},
        "teacher_log_ratio": torch.cat([own[i][1] for i in order]),
    }


def random_estimate(name, batch):
    if name == "gdpo":
        batch = {key: value for key, value in batch.items() if key != "penalties"}
    return estimate(name, episodes(**batch), gamma=0.9, lam=0.7).advantages


@settings(deadline=None, max_examples=40)
@given(st.lists(EPISODE, min_size=1, max_size=10), st.sampled_from(NAMES), st.randoms())
def test_the_order_of_episodes_does_not_matter(items, name, random):
    order = list(range(len(items)))
    straight = random_estimate(name, random_batch(items, order)).split([len(m) for m, *_ in items])
    random.shuffle(order)
    shuffled = random_estimate(name, random_batch(items, order)).split([len(items[i][0]) for i in order])
    for place, i in enumerate(order):
        torch.testing.assert_close(shuffled[place], straight[i], rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=40)
@given(st.lists(EPISODE, min_size=1, max_size=8), st.sampled_from(NAMES))
def test_tokens_that_are_not_the_policys_might_as_well_be_absent(items, name):
    batch = random_batch(items, range(len(items)))
    mask = torch.tensor([x for m in batch["masks"] for x in m], dtype=torch.bool)
    bare = batch | {
        "masks": [[x for x in m if x] for m in batch["masks"]],
        "values": batch["values"][mask],
        "penalties": batch["penalties"][mask],
        "teacher_log_ratio": batch["teacher_log_ratio"][mask],
    }
    whole = random_estimate(name, batch)
    assert not whole[~mask].any()
    torch.testing.assert_close(whole[mask], random_estimate(name, bare), rtol=1e-6, atol=1e-6)


@given(
    st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=20), max_size=5), st.sampled_from([0.0, 0.5, 0.99, 1.0])
)
def test_discounted_sums_are_those_of_a_loop(sequences, discount):
    expected = []
    for values in sequences:
        running, sums = 0.0, []
        for x in reversed(values):
            running = x + discount * running
            sums.append(running)
        expected += sums[::-1]
    owner = torch.tensor([i for i, values in enumerate(sequences) for _ in values], dtype=torch.int64)
    flat = tensor([x for values in sequences for x in values])
    torch.testing.assert_close(segments.discounted_sums(flat, owner, discount), tensor(expected), rtol=1e-9, atol=1e-9)
