"""Each policy loss against numbers worked out by hand, its paper's formula, and finite differences."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from posttrain.algos import POLICY_LOSSES, losses
from posttrain.algos.reduce import token_weights
from posttrain.algos.segments import segment_ids
from posttrain.algos.tokens import TokenInputs, UpdateTokens
from posttrain.models import logprobs as logprobs_module

OPTIONS = {
    "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "tau_positive": 1.0, "tau_negative": 2.0, "kl_cov_coef": 0.5,
}  # fmt: skip
NAMES = POLICY_LOSSES.names()
BY_SEQUENCE = [name for name in NAMES if POLICY_LOSSES.get(name).by_sequence]
SELECTING = [name for name in NAMES if POLICY_LOSSES.get(name).reads_current]

# Three sequences: of three policy tokens, of one, and of none. Their log-ratios:
OFFSETS = torch.tensor([0, 4, 6, 8])
MASK = torch.tensor([0, 1, 1, 1, 0, 1, 0, 0], dtype=torch.bool)
LOG_RATIO = [0.1, 0.5, -0.3, -0.4]
ADVANTAGES = [1.0, 1.0, 1.0, -2.0]
SELECTED = [True, False, False, True]
WEIGHTS = [1 / 6, 1 / 6, 1 / 6, 1 / 2]  # seq-mean-token-mean
NUMBERS = range(4)


def tensor(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def close(actual, expected):
    torch.testing.assert_close(actual.detach().double(), tensor(expected), rtol=1e-6, atol=1e-9)


def packed(of_policy, elsewhere=99.0):
    """[T] from the values of policy tokens; what stands elsewhere must not matter."""
    column = torch.full((len(MASK),), elsewhere, dtype=torch.float64)
    column[MASK] = tensor(of_policy)
    return column


def prepared(name, logprobs, old, advantages, sequence, mask, seed=0, **changes):
    """The column [T] that the loss reads, if it does."""
    loss = POLICY_LOSSES.get(name)
    if loss.prepare is None:
        return None
    generator = torch.Generator().manual_seed(seed)
    return loss.column(UpdateTokens(logprobs, old, advantages, sequence, mask, generator), OPTIONS | changes)


def weighted(name, logprobs, tokens, weights):
    return losses.weighted_policy_loss(POLICY_LOSSES.get(name), logprobs, tokens, OPTIONS, weights)


def token_inputs(name, logprobs, old, advantages, selected):
    """As a worker has them: [N] columns of the tokens that carry loss."""
    column = selected if name in SELECTING else None
    if name in BY_SEQUENCE:
        columns = (packed(x.tolist()) for x in (logprobs, old, advantages))
        column = prepared(name, *columns, segment_ids(OFFSETS), MASK)[MASK]
    return TokenInputs(advantages, old, column)


def case(name, log_ratio=LOG_RATIO):
    old = tensor([-1.0, -2.0, -0.5, -3.0])
    logprobs = (old + tensor(log_ratio)).requires_grad_()
    return logprobs, token_inputs(name, logprobs.detach(), old, tensor(ADVANTAGES), torch.tensor(SELECTED))


def sigmoid(x):
    return 1.0 / (1.0 + math.exp(-x))


R = [math.exp(x) for x in LOG_RATIO]  # 1.105, 1.649, 0.741, 0.670
S = math.exp(0.1)  # (0.1 + 0.5 - 0.3) / 3: the ratio of the first sequence; that of the second is e^-0.4
CLIPPED_MEAN = math.exp((0.1 + 0.28 - 0.3) / 3)  # of gmpo, A > 0: only what lies above is clipped

# name -> losses, gradients by logprob, tokens that count in pg_clipfrac
BY_HAND = {
    # A < 0: a ratio below 0.8 counts as 0.8.
    "clipped": ([-R[0], -1.28, -R[2], 1.6], [-R[0], 0, -R[2], 0], [1, 3]),
    "gspo": ([-S, -S, -S, 1.6], [-S, -S, -S, 0], [3]),
    "gmpo": ([-CLIPPED_MEAN] * 3 + [2 * math.exp(-0.2)], [-CLIPPED_MEAN, 0, -CLIPPED_MEAN, 0], [1, 3]),
    # logp = -0.9, -1.5, -0.8, -3.4
    "cispo": ([0.9 * R[0], 1.5 * 1.28, 0.8 * 0.8, -2 * 0.8 * 3.4], [-R[0], -1.28, -0.8, 2 * 0.8], [1, 2, 3]),
    "sapo": (
        [-4 * sigmoid(r - 1) for r in R[:3]] + [2 * 2 * sigmoid(2 * (R[3] - 1))],
        [-4 * r * sigmoid(r - 1) * (1 - sigmoid(r - 1)) for r in R[:3]]
        + [2 * 4 * R[3] * sigmoid(2 * (R[3] - 1)) * (1 - sigmoid(2 * (R[3] - 1)))],
        None,
    ),
    "gpg": ([0.9, 1.5, 0.8, -6.8], [-1, -1, -1, 2], None),
    "clip_cov": ([0, -1.28, -R[2], 0], [0, 0, -R[2], 0], [0, 3]),
    "kl_cov": ([-R[0] + 0.05, -R[1], -R[2], 2 * R[3] + 0.2], [-R[0] + 0.5, -R[1], -R[2], 2 * R[3] - 0.5], None),
}


@pytest.mark.parametrize("name", NAMES)
def test_by_hand(name):
    values, gradients, clipped = BY_HAND[name]
    logprobs, inputs = case(name)
    per_token, metrics = POLICY_LOSSES.get(name)(logprobs, inputs, OPTIONS)
    close(per_token, values)
    close(torch.autograd.grad(per_token.sum(), logprobs)[0], gradients)
    assert not any(column.requires_grad or len(column) != 4 for column in metrics.values())

    loss, sums = weighted(name, logprobs, inputs, tensor(WEIGHTS))
    close(loss, sum(w * x for w, x in zip(WEIGHTS, values, strict=True)))
    close(sums["pg_loss"], loss.item())
    close(sums["ppo_kl"], -(0.3 / 6 - 0.4 / 2))
    assert ("pg_clipfrac" in sums) == (clipped is not None)
    if clipped is not None:
        close(sums["pg_clipfrac"], sum(WEIGHTS[i] for i in clipped))


def test_every_loss_is_listed():
    assert set(BY_HAND) == set(NAMES)


def of_sequences(name, logprobs, old):
    """The loss as its paper writes it, over whole sequences."""
    total = 0.0
    for part, advantage in ((slice(0, 3), 1.0), (slice(3, 4), -2.0)):
        x = logprobs[part] - old[part]
        if name == "gspo":
            s = x.mean().exp()
            total = total - torch.minimum(s * advantage, s.clamp(0.8, 1.28) * advantage) / 2
        else:
            sign = math.copysign(1.0, advantage)
            kept = sign * torch.minimum(sign * x, sign * x.clamp(-0.2, 0.28))
            total = total - advantage * kept.mean().exp() / 2
    return total


def of_tokens(name, logprobs, old, fixed):
    """The other losses, with what has no gradient taken from ``fixed``."""
    inputs = TokenInputs(tensor(ADVANTAGES), old, torch.tensor(SELECTED) if name in SELECTING else None)
    if name == "cispo":
        ratio = (fixed - old).exp().clamp(0.8, 1.28)
        return -(tensor(WEIGHTS) * ratio * tensor(ADVANTAGES) * logprobs).sum()
    return weighted(name, logprobs, inputs, tensor(WEIGHTS))[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(5))
def test_gradients_are_those_of_finite_differences(name, seed):
    """Of the paper's loss of whole sequences, for those that have one: a loss of tokens has the same gradient."""
    generator = torch.Generator().manual_seed(seed)
    log_ratio = torch.randn(4, generator=generator, dtype=torch.float64) * 0.4
    logprobs, inputs = case(name, log_ratio.tolist())
    loss, _ = weighted(name, logprobs, inputs, tensor(WEIGHTS))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    base, old = logprobs.detach(), inputs.old_logprobs

    def exact(at):
        return of_sequences(name, at, old) if name in BY_SEQUENCE else of_tokens(name, at, old, base)

    close(loss, float(exact(base)))
    for i in NUMBERS:
        step = torch.zeros(4, dtype=torch.float64)
        step[i] = 1e-6
        assert float(exact(base + step) - exact(base - step)) / 2e-6 == pytest.approx(float(gradient[i]), abs=1e-7)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_log_ratios_stay_finite(name, dtype):
    logprobs = tensor([-50.0, -0.0] * 3, dtype).requires_grad_()
    old = tensor([-0.0, -50.0] * 3, dtype)
    advantages = tensor([1.0, 1.0, -1.0, -1.0, 0.0, 0.0], dtype)
    column = (logprobs - old).detach() if name in BY_SEQUENCE else None
    selected = torch.tensor([True, True, True, True, False, False])
    inputs = TokenInputs(advantages, old, selected if name in SELECTING else column)
    loss, sums = weighted(name, logprobs, inputs, torch.full((6,), 1 / 6, dtype=dtype))
    loss.backward()
    assert loss.dtype == logprobs.grad.dtype == dtype
    assert torch.isfinite(logprobs.grad).all()
    assert all(math.isfinite(float(x)) for x in sums.values())
    close(logprobs.grad[4:], [0.0, 0.0])  # an advantage of 0 moves nothing


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_that_has_not_moved_has_the_plain_policy_gradient(name):
    logprobs = tensor([-1.0, -2.0, -3.0]).requires_grad_()
    on_policy = POLICY_LOSSES.get(name).prepared_on_policy
    column = torch.zeros(3, dtype=torch.bool) if on_policy is None else torch.full((3,), on_policy)
    inputs = TokenInputs(tensor([1.5, -0.5, 0.0]), logprobs.detach(), column)
    loss, sums = weighted(name, logprobs, inputs, tensor([0.2, 0.4, 0.4]))
    loss.backward()
    close(logprobs.grad, [-0.3, 0.2, 0.0])
    assert all(float(sums.get(key, 0.0)) == 0.0 for key in ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"))


@pytest.mark.parametrize("name", [name for name in NAMES if POLICY_LOSSES.get(name).nothing_without_advantage])
@pytest.mark.parametrize("seed", range(3))
def test_an_episode_without_advantages_can_be_left_out_where_the_loss_says_so(name, seed):
    """Far from ratio 1: its gradient is exactly 0, and the columns of the others do not depend on it."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, 5, 9, 16, 20])
    sequence, mask = segment_ids(offsets), torch.rand(20, generator=generator) < 0.7
    per_sequence = torch.tensor([0.0, 1.5, 0.0, -0.7], dtype=torch.float64)
    advantages, zero = per_sequence[sequence], (per_sequence == 0)[sequence]
    old = -3.0 * torch.rand(20, generator=generator, dtype=torch.float64)
    logprobs = (old + torch.randn(20, generator=generator, dtype=torch.float64)).requires_grad_()
    column = prepared(name, logprobs.detach(), old, advantages, sequence, mask)
    inputs = TokenInputs(advantages, old, column)
    weighted(name, logprobs, inputs, mask / mask.sum())[0].backward()
    assert not logprobs.grad[zero].any()
    assert logprobs.grad[~zero].any()
    if column is not None:
        without = prepared(name, logprobs.detach(), old, advantages, sequence, mask & ~zero)
        torch.testing.assert_close(without[mask & ~zero], column[mask & ~zero], rtol=0, atol=0)


def test_an_episode_without_advantages_has_a_gradient_where_the_loss_does_not_say_so():
    logprobs = tensor([-1.0, -2.0]).requires_grad_()
    inputs = TokenInputs(tensor([0.0, 1.0]), tensor([-1.5, -2.0]), torch.tensor([True, False]))
    weighted("kl_cov", logprobs, inputs, tensor([0.5, 0.5]))[0].backward()
    assert logprobs.grad[0] != 0
    assert not POLICY_LOSSES.get("kl_cov").nothing_without_advantage


def test_what_is_missing_is_an_error():
    zeros = torch.zeros(2)
    for name in BY_SEQUENCE + SELECTING:
        with pytest.raises(ValueError, match="none was prepared"):
            POLICY_LOSSES.get(name)(zeros, TokenInputs(zeros, zeros), OPTIONS)


# ---------------------------------------------------------------------- cuts and orders

LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=6)


@settings(deadline=None, max_examples=40)
@given(LENGTHS, st.sampled_from(NAMES), st.integers(0, 9), st.randoms())
def test_chunks_micro_batches_and_packing_do_not_matter(lengths, name, seed, random):
    """The columns are computed for the whole batch; then any order and any cut of the tokens sums to the same."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    old, step = torch.randn(2, total, generator=generator, dtype=torch.float64)
    mask = torch.rand(total, generator=generator) < 0.7
    # Of two tokens both have the same covariance, and the one that comes first is selected.
    assume(not (name in SELECTING and mask.sum() == 2))
    sequence = segment_ids(torch.tensor([0, *lengths]).cumsum(0))
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)[sequence]
    logprobs = old + 0.3 * step

    def columns(order):
        """[N] columns, where the sequences are packed in this order, brought back to the first one."""
        place = torch.cat([(sequence == i).nonzero().flatten() for i in order])
        back = place.argsort()
        offsets = torch.tensor([0, *(lengths[i] for i in order)]).cumsum(0)
        weights = token_weights(mask[place], offsets, "seq-mean-token-mean").double()[back]
        packed = [x[place] for x in (logprobs, old, advantages)]
        column = torch.zeros_like(old)
        if name in (*BY_SEQUENCE, *SELECTING):
            preparing = "kl_cov" if name in SELECTING else name  # clip_cov draws at random
            column = prepared(preparing, *packed, segment_ids(offsets), mask[place], kl_cov_share=0.3)[back]
        return [x[mask] for x in (logprobs, advantages, old, column, weights)]

    def sums_of(tokens):
        lp, adv, before, column, weights = tokens
        return weighted(name, lp, TokenInputs(adv, before, column), weights)[1]

    whole = sums_of(columns(range(len(lengths))))
    order = list(range(len(lengths)))
    random.shuffle(order)
    shuffled = columns(order)
    chosen = torch.tensor([random.random() < 0.5 for _ in range(int(mask.sum()))], dtype=torch.bool)
    parts = [sums_of([x[pick] for x in shuffled]) for pick in (chosen, ~chosen)]
    for key, value in whole.items():
        assert float(parts[0][key] + parts[1][key]) == pytest.approx(float(value), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_chunks_of_a_vocabulary_give_the_gradient_of_the_whole(name, monkeypatch):
    """Through ``tokenwise_loss``, as a worker computes it: the columns come from a first pass without gradient."""
    generator = torch.Generator().manual_seed(3)
    hidden, head = (torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in (4, 7))
    hidden.requires_grad_()
    targets = torch.tensor([3, 0, 6, 2])
    whole = (hidden @ head.t()).log_softmax(-1)[range(4), targets]
    old = whole.detach() - tensor([0.1, 0.5, -0.3, -0.1])
    inputs = token_inputs(name, whole.detach(), old, tensor(ADVANTAGES), torch.tensor(SELECTED))
    weights = tensor(WEIGHTS)
    exact = of_sequences if name in BY_SEQUENCE else of_tokens
    fixed = () if name in BY_SEQUENCE else (whole.detach(),)
    (expected,) = torch.autograd.grad(exact(name, whole, old, *fixed), hidden)

    def of_chunk(logprobs, entropies, part):
        columns = [None if x is None else x[part] for x in vars(inputs).values()]
        return weighted(name, logprobs, TokenInputs(*columns), weights[part])[0]

    monkeypatch.setattr(logprobs_module, "BUFFER_BYTES", 7 * 4 * 3)  # three tokens a chunk
    loss, *_ = logprobs_module.tokenwise_loss(hidden, head, targets, 1.0, of_chunk)
    torch.testing.assert_close(torch.autograd.grad(loss, hidden)[0], expected, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------- selections

COV_MASK = torch.tensor([0, 1, 1, 1, 1, 1], dtype=torch.bool)
COV_LOGPROBS = tensor([50.0, -1.0, -2.0, -3.0, -4.0, -5.0])  # around -3: 2, 1, 0, -1, -2
COV_ADVANTAGES = tensor([50.0, 2.0, -1.0, 0.0, -2.0, 1.0])  # around 0: covariances 4, -1, 0, 2, -2


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0001, [1]), (0.2, [1]), (0.4, [1, 4]), (0.6, [1, 3, 4]), (1.0, [1, 2, 3, 4, 5])]
)
def test_kl_cov_selects_the_largest_covariances(share, expected):
    selected = prepared("kl_cov", COV_LOGPROBS, COV_LOGPROBS, COV_ADVANTAGES, None, COV_MASK, kl_cov_share=share)
    assert selected.nonzero().flatten().tolist() == expected


def clip_cov_selection(seed=0, **changes):
    settings = {"share": 1.0, "low": -10.0, "high": 10.0, "old": COV_LOGPROBS, "mask": COV_MASK} | changes
    old, mask = settings.pop("old"), settings.pop("mask")
    settings = {f"clip_cov_{name}": value for name, value in settings.items()}
    selected = prepared("clip_cov", COV_LOGPROBS, old, COV_ADVANTAGES, None, mask, seed, **settings)
    return selected.nonzero().flatten().tolist()


def test_clip_cov_selects_among_those_between_the_bounds():
    assert clip_cov_selection() == [1, 2, 3, 4, 5]
    assert clip_cov_selection(low=1.0, high=5.0) == [1, 4]
    assert clip_cov_selection(low=1.0, high=4.0) == [4]  # bounds are left out
    assert clip_cov_selection(low=5.0) == []
    # Token 4 has a ratio below 0.8 and a negative advantage: the clip holds it anyway.
    assert clip_cov_selection(low=1.0, old=COV_LOGPROBS + tensor([0, 0, 0, 0, 1.0, 0])) == [1]
    assert clip_cov_selection(mask=torch.zeros(6, dtype=torch.bool)) == []


def test_clip_cov_draws_a_share_of_all_tokens_and_a_seed_repeats_it():
    assert [len(clip_cov_selection(share=share)) for share in (0.0001, 0.39, 0.4, 0.8)] == [1, 1, 2, 4]
    draws = [clip_cov_selection(seed, share=0.4) for seed in range(20)]
    assert draws == [clip_cov_selection(seed, share=0.4) for seed in range(20)]
    assert {i for draw in draws for i in draw} == {1, 2, 3, 4, 5}


# ---------------------------------------------------------------------- critic and entropy


def test_the_value_loss_by_hand():
    # Old value 1, clip 0.5: values 2, 0.2 and 1.2 count as 1.5, 0.5 and 1.2, where that is the worse one.
    values = tensor([2.0, 0.2, 1.2, 2.0]).requires_grad_()
    returns, weights = tensor([1.0, 0.9, 2.2, 3.0]), tensor([0.25, 0.25, 0.5, 1.0])
    loss, sums = losses.value(values, torch.ones(4, dtype=torch.float64), returns, weights, clip=0.5)
    close(loss, 0.5 * (0.25 * 1.0 + 0.25 * 0.49 + 0.5 * 1.0 + 1.0 * 2.25))
    close(sums["vf_loss"], loss.item())
    close(sums["vf_clipfrac"], 1.0)  # only the last: |1.5 - 3| > |2 - 3|
    loss.backward()
    close(values.grad, [0.25 * 1.0, 0.25 * -0.7, 0.5 * -1.0, 0.0])


def test_the_entropy_by_hand():
    entropies = tensor([1.0, 2.0, 4.0]).requires_grad_()
    total, sums = losses.entropy(entropies, tensor([0.5, 0.25, 0.0]))
    total.backward()
    close(total, 1.0)
    close(sums["entropy"], 1.0)
    close(entropies.grad, [0.5, 0.25, 0.0])
