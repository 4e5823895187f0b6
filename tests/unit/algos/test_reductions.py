"""The clipped loss, KL, gap and aggregation against numbers worked out by hand."""

import math
import re
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.algos import ADVANTAGES, POLICY_LOSSES, losses
from posttrain.algos.gap import gap_sums
from posttrain.algos.kl import AdaptiveKl, FixedKl, kl_penalty
from posttrain.algos.reduce import token_weights
from posttrain.algos.tokens import TokenInputs
from posttrain.config.algo import Aggregation
from posttrain.core.errors import ConfigError

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def clipped(logprobs, old, advantages, weights, dual_clip=None):
    tokens, options = TokenInputs(advantages, old), CLIP | {"dual_clip": dual_clip}
    return losses.weighted_policy_loss(POLICY_LOSSES.get("clipped"), logprobs, tokens, options, weights)


def tensor(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def close(actual, expected, **kwargs):
    torch.testing.assert_close(torch.as_tensor(actual).double(), tensor(expected), rtol=1e-6, atol=1e-7, **kwargs)


# ---------------------------------------------------------------------- aggregation

# Sequences of 4, 2 and 3 tokens; 3, 0 and 1 of them carry loss.
MASK = torch.tensor([0, 1, 1, 1, 0, 0, 0, 0, 1], dtype=torch.bool)
OFFSETS = torch.tensor([0, 4, 6, 9], dtype=torch.int32)


@pytest.mark.parametrize(
    ("aggregation", "first", "last"),
    [
        ("token-mean", 1 / 4, 1 / 4),  # 4 tokens
        ("seq-mean-token-mean", 1 / (2 * 3), 1 / (2 * 1)),  # 2 sequences with loss
        ("seq-mean-token-sum", 1 / 2, 1 / 2),
        ("seq-mean-token-sum-norm", 1 / (2 * 8), 1 / (2 * 8)),
    ],
)
def test_token_weights_by_hand(aggregation, first, last):
    weights = token_weights(MASK, OFFSETS, aggregation, norm_length=8)
    assert weights.dtype == torch.float32
    close(weights, [0, first, first, first, 0, 0, 0, 0, last])


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_a_batch_without_loss_weighs_nothing(aggregation):
    weights = token_weights(torch.zeros(9, dtype=torch.bool), OFFSETS, aggregation, norm_length=8)
    assert weights.tolist() == [0.0] * 9


def test_unknown_names_are_errors():
    with pytest.raises(ValueError, match="mean-of-means"):
        token_weights(MASK, OFFSETS, "mean-of-means")
    for name in ("k9", "k9+", "abs+", ""):
        with pytest.raises(ValueError, match=re.escape(repr(name))):
            kl_penalty(torch.zeros(1), torch.zeros(1), name)
    for registry, name in ((POLICY_LOSSES, "clippd"), (ADVANTAGES, "rlo")):
        with pytest.raises(ConfigError, match=f"unknown {registry.kind} '{name}'") as caught:
            registry.get(name)
        assert caught.value.hint in ("did you mean 'clipped'?", "did you mean 'rloo'?")


def test_a_norm_without_a_length_is_an_error():
    with pytest.raises(ValueError, match="norm_length"):
        token_weights(MASK, OFFSETS, "seq-mean-token-sum-norm")


# ---------------------------------------------------------------------- losses


def test_nll_by_hand():
    loss, sums = losses.nll(tensor([-1.0, -2.0, -4.0]), tensor([0.5, 0.25, 0.0]))
    close(loss, 1.0)
    close(sums["loss"], 1.0)


# ratio, advantage -> loss, loss with dual clip 10
CASES = [
    (1.0, 2.0, -2.0, -2.0),
    (1.5, 1.0, -1.28, -1.28),  # clipped above: it may not gain more
    (0.5, 1.0, -0.5, -0.5),  # below, but the minimum keeps the smaller gain
    (0.5, -1.0, 0.8, 0.8),  # clipped below
    (1.5, -1.0, 1.5, 1.5),
    (12.0, -1.0, 12.0, 10.0),  # dual clip
    (12.0, 1.0, -1.28, -1.28),  # dual clip is for negative advantages only
]


def policy_inputs():
    ratio, advantages = tensor([c[0] for c in CASES]), tensor([c[1] for c in CASES])
    old = tensor([-1.0, -0.5, -3.0, -2.0, -0.1, -6.0, -5.0])
    return (old + ratio.log()).requires_grad_(), old, advantages, tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])


@pytest.mark.parametrize(("dual_clip", "column"), [(None, 2), (10.0, 3)])
def test_clipped_policy_by_hand(dual_clip, column):
    logprobs, old, advantages, weights = policy_inputs()
    loss, sums = clipped(logprobs, old, advantages, weights, dual_clip=dual_clip)
    expected = sum(w * case[column] for w, case in zip(weights.tolist(), CASES, strict=True))
    close(loss.detach(), expected)
    close(sums["pg_loss"], expected)
    close(sums["pg_clipfrac"], 0.2 + 0.4 + 0.7)
    close(sums["pg_clipfrac_lower"], 0.6 if dual_clip else 0.0)
    log_ratios = [math.log(c[0]) for c in CASES]
    close(sums["ppo_kl"], -sum(w * x for w, x in zip(weights.tolist(), log_ratios, strict=True)))
    assert not any(value.requires_grad for value in sums.values())
    loss.backward()
    # d/dlogp of -A r is -A r; a clipped token does not move.
    moving = {0, 2, 4} | (set() if dual_clip else {5})
    close(
        logprobs.grad,
        [-w * a * r * (i in moving) for i, (w, (r, a, *_)) in enumerate(zip(weights, CASES, strict=True))],
    )


def test_a_policy_that_has_not_moved_has_the_plain_policy_gradient():
    logprobs = tensor([-1.0, -2.0, -3.0]).requires_grad_()
    advantages, weights = tensor([1.5, -0.5, 0.0]), tensor([0.2, 0.4, 0.4])
    loss, sums = clipped(logprobs, logprobs.detach(), advantages, weights, dual_clip=3.0)
    loss.backward()
    close(loss.detach(), -(0.2 * 1.5 - 0.4 * 0.5))
    close(logprobs.grad, [-0.3, 0.2, 0.0])
    assert float(sums["pg_clipfrac"]) == float(sums["pg_clipfrac_lower"]) == float(sums["ppo_kl"]) == 0.0


KL_CASES = {
    # log q - log p = 0, ln 2, -ln 2
    "k1": [0.0, -math.log(2), math.log(2)],
    "k2": [0.0, math.log(2) ** 2 / 2, math.log(2) ** 2 / 2],
    "low_var_kl": [0.0, 1 - math.log(2), math.log(2) - 0.5],
    "abs": [0.0, math.log(2), math.log(2)],
}
KL_CASES["k3"] = KL_CASES["low_var_kl"]


@pytest.mark.parametrize("estimator", sorted(KL_CASES))
def test_kl_by_hand(estimator):
    logprobs = tensor([-1.0, -1.5, -0.5])
    ref = logprobs + tensor([0.0, math.log(2), -math.log(2)])
    close(kl_penalty(logprobs, ref, estimator), KL_CASES[estimator])
    loss, sums = losses.kl(logprobs, ref, tensor([0.5, 0.25, 0.125]), estimator=estimator)
    expected = 0.25 * KL_CASES[estimator][1] + 0.125 * KL_CASES[estimator][2]
    close(loss, expected)
    close(sums["kl_loss"], expected)


def test_a_token_that_is_far_off_is_bounded_in_k3_and_has_a_finite_gradient():
    logprobs = tensor([-1000.0, -8.0, -2.0]).requires_grad_()
    found = kl_penalty(logprobs, tensor([0.0, -1.0, -1.0]), "k3")
    close(found, [10.0, 10.0, math.e - 2])
    found.sum().backward()
    close(logprobs.grad, [0.0, 0.0, 1 - math.e])


@pytest.mark.parametrize("estimator", ["k1", "low_var_kl"])
def test_kl_estimators_are_unbiased(estimator):
    # The expectation over p is exact: p = (0.7, 0.2, 0.1), q = (0.5, 0.3, 0.2).
    p, q = tensor([0.7, 0.2, 0.1]), tensor([0.5, 0.3, 0.2])
    close((p * kl_penalty(p.log(), q.log(), estimator)).sum(), float((p * (p / q).log()).sum()))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_straight_through_has_its_value_and_the_gradient_of_k2(estimator):
    ref = tensor([-1.0, -1.5, -0.5, -30.0])
    logprobs = (ref + tensor([0.3, -0.7, 0.0, 29.0])).requires_grad_()
    through = kl_penalty(logprobs, ref, estimator + "+")
    torch.testing.assert_close(through, kl_penalty(logprobs, ref, estimator))
    through.sum().backward()
    close(logprobs.grad, [0.3, -0.7, 0.0, 29.0])  # d k2 = log p - log q


def test_the_gradient_of_k2_is_that_of_the_kl_and_of_k1_and_k3_is_not():
    """p = softmax(z): the expectation of d estimate / dz under p, against d KL(p || q) / dz."""
    logits, q = tensor([0.5, -0.3, 0.1]).requires_grad_(), tensor([0.5, 0.3, 0.2])
    logp = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - q.log())).sum(), logits, retain_graph=True)

    def expected(estimator):
        loss = (logp.detach().exp() * kl_penalty(logp, q.log(), estimator)).sum()
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    for estimator in ("k2", "k1+", "k2+", "k3+"):
        torch.testing.assert_close(expected(estimator), exact)
    for estimator in ("k1", "k3"):
        assert (expected(estimator) - exact).abs().max() > 0.01


def test_adaptive_kl_by_hand():
    fixed, adaptive = FixedKl(0.1), AdaptiveKl(0.1, target=6.0, horizon=1000)
    for kl, factor in [(6.0, 1.0), (6.6, 1.01), (60.0, 1.02), (0.0, 0.98)]:  # 100 episodes of 1000
        before = adaptive.value
        adaptive.update(kl, 100)
        fixed.update(kl, 100)
        assert adaptive.value == pytest.approx(before * factor)
    assert fixed.value == 0.1
    for _ in range(3):  # many episodes: it falls by half at most, and stays positive
        before = adaptive.value
        adaptive.update(0.0, 100_000)
        assert adaptive.value == pytest.approx(before / 2)
    with pytest.raises(ValueError, match="target"):
        AdaptiveKl(0.1, target=0.0, horizon=1000)


def test_gap_by_hand():
    trainer = tensor([-1.0, -1.0, -1.0, -1.0])
    engine = trainer - tensor([0.0, 0.05, 0.2, -0.2])
    sums = gap_sums(trainer, engine)
    close(sums["gap/diff"], 0.05)
    close(sums["gap/squares"], 0.0825)
    close(sums["gap/abs"], 0.45)
    close(sums["gap/k3"], (math.exp(0.05) - 1.05) + (math.exp(0.2) - 1.2) + (math.exp(-0.2) - 0.8))
    close(sums["gap/outside"], 2.0)  # e^0.05 is inside [0.9, 1.1], e^0.2 and e^-0.2 are not
    close(sums["gap/tokens"], 4.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dual_clip", [None, 10.0])
def test_extreme_log_ratios_stay_finite(dtype, dual_clip):
    logprobs = tensor([-50.0, -0.0, -50.0, -0.0], dtype).requires_grad_()
    old = tensor([-0.0, -50.0, -0.0, -50.0], dtype)
    advantages = tensor([1.0, 1.0, -1.0, -1.0], dtype)
    weights = torch.full((4,), 0.25, dtype=dtype)
    loss, sums = clipped(logprobs, old, advantages, weights, dual_clip=dual_clip)
    for estimator in KL_CASES:
        term, kl_sums = losses.kl(logprobs, old, weights, estimator=estimator)
        loss = loss + term
        sums = sums | {estimator: kl_sums["kl_loss"]}
    loss.backward()
    assert torch.isfinite(logprobs.grad).all()
    assert all(math.isfinite(float(x)) for x in [*sums.values(), *gap_sums(logprobs, old).values()])
    if dual_clip:
        close(sums["pg_loss"], 0.25 * (0.0 - 1.28 + 0.8 + 10.0))


def test_a_token_of_no_weight_has_no_say():
    logprobs = tensor([-1.0, -50.0]).requires_grad_()
    old, weights = tensor([-1.0, 0.0]), tensor([1.0, 0.0])
    loss, _ = clipped(logprobs, old, tensor([1.0, -1.0]), weights)
    (loss + losses.kl(logprobs, old, weights, estimator="k2")[0] + losses.nll(logprobs, weights)[0]).backward()
    close(logprobs.grad, [-2.0, 0.0])


def total_loss(logprobs, old, ref, advantages, weights, estimator):
    policy, _ = clipped(logprobs, old, advantages, weights, dual_clip=3.0)
    kl, _ = losses.kl(logprobs, ref, weights, estimator=estimator)
    return policy + 0.1 * kl + 0.05 * losses.nll(logprobs, weights)[0]


@pytest.mark.parametrize("estimator", sorted(KL_CASES))
def test_gradients_are_those_of_finite_differences(estimator):
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(200, generator=generator, dtype=torch.float64) * 3
    log_ratio = torch.randn(200, generator=generator, dtype=torch.float64) * 0.8
    # Away from the corners of the clip, where the loss has no derivative.
    corners = tensor([0.8, 1.28, 3.0]).log()
    log_ratio = log_ratio[((log_ratio[:, None] - corners).abs() > 1e-3).all(1)]
    old = old[: len(log_ratio)]
    logprobs = (old + log_ratio).requires_grad_()
    ref = old + torch.randn(len(old), generator=generator, dtype=torch.float64)
    advantages = torch.randn(len(old), generator=generator, dtype=torch.float64)
    weights = torch.rand(len(old), generator=generator, dtype=torch.float64)
    total_loss(logprobs, old, ref, advantages, weights, estimator).backward()
    base = logprobs.detach()
    for i in range(len(base)):
        step = torch.zeros_like(base)
        step[i] = 1e-5
        up = total_loss(base + step, old, ref, advantages, weights, estimator)
        down = total_loss(base - step, old, ref, advantages, weights, estimator)
        assert float((up - down) / 2e-5) == pytest.approx(float(logprobs.grad[i]), rel=1e-5, abs=1e-8)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=6),
    st.sampled_from(get_args(Aggregation)),
    st.randoms(),
)
def test_the_loss_does_not_depend_on_the_order_or_the_cut(masks, aggregation, random):
    """Any order of the sequences, and any cut into micro-batches, sums to the same loss."""
    generator = torch.Generator().manual_seed(1)
    columns = [
        [torch.randn(len(m), generator=generator, dtype=torch.float64) for m in masks] for _ in range(3)
    ]  # logprobs, old, advantages of each sequence
    offsets = torch.tensor([0, *[len(m) for m in masks]]).cumsum(0)
    weights = token_weights(torch.tensor([x for m in masks for x in m]), offsets, aggregation, norm_length=5).double()
    per_sequence = list(zip(*columns, weights.split([len(m) for m in masks]), strict=True))

    def loss(part):
        return clipped(*(torch.cat(x) for x in zip(*part, strict=True)))[0]

    whole = loss(per_sequence)
    random.shuffle(per_sequence)
    cut = random.randint(0, len(per_sequence))
    parts = [p for p in (per_sequence[:cut], per_sequence[cut:]) if p]
    close(sum(loss(p) for p in parts), float(whole))
