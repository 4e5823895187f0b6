"""Losses of pairs against numbers worked out by hand, finite differences, and autograd of the plain formula."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import logsigmoid

from posttrain.algos.preference import (
    bradley_terry,
    dpo,
    ipo_loss,
    pair_metrics,
    sigmoid_loss,
    token_weights,
)
from posttrain.algos.segments import segment_ids, segment_sum

MARGINS = torch.tensor([-40.0, -2.0, -0.3, 0.0, 0.5, 3.0, 40.0], dtype=torch.float64)
LOSSES = {
    "sigmoid": lambda m: sigmoid_loss(m),
    "smoothed": lambda m: sigmoid_loss(m, 0.2),
    "ipo": lambda m: ipo_loss(m, 0.1),
}
SETTINGS = {"loss": "sigmoid", "beta": 0.1, "label_smoothing": 0.0, "nll_coef": 0.0, "length_normalized": False}
PARAMS = [
    SETTINGS,
    SETTINGS | {"beta": 0.5, "label_smoothing": 0.1},
    SETTINGS | {"loss": "ipo", "beta": 0.2},
    SETTINGS | {"nll_coef": 0.7},
    SETTINGS | {"beta": 2.0, "length_normalized": True, "nll_coef": 0.3},
    SETTINGS | {"loss": "ipo", "length_normalized": True},
]


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def test_numbers_by_hand():
    loss, slope = sigmoid_loss(tensor([0.0, math.log(3.0)]))
    torch.testing.assert_close(loss, tensor([math.log(2.0), math.log(4.0 / 3.0)]))
    torch.testing.assert_close(slope, tensor([-0.5, -0.25]))
    loss, slope = sigmoid_loss(tensor([math.log(3.0)]), 0.25)  # the slope is 0 where sigmoid(m) = 1 - e
    torch.testing.assert_close(loss, tensor([0.75 * math.log(4.0 / 3.0) + 0.25 * math.log(4.0)]))
    torch.testing.assert_close(slope, tensor([0.0]), atol=1e-15, rtol=0)
    loss, slope = ipo_loss(tensor([0.5, 0.7]), 0.1)  # log-ratios 5 and 7, pulled to 1 / (2 beta) = 5
    torch.testing.assert_close(loss, tensor([0.0, 4.0]))
    torch.testing.assert_close(slope, tensor([0.0, 40.0]))


@pytest.mark.parametrize("name", LOSSES)
def test_slopes_are_finite_differences(name):
    margins = MARGINS[1:-1] if name == "ipo" else MARGINS
    h = 1e-5
    above, below = (LOSSES[name](margins + d)[0] for d in (h, -h))
    torch.testing.assert_close(LOSSES[name](margins)[1], (above - below) / (2 * h), rtol=1e-6, atol=1e-8)
    assert torch.isfinite(LOSSES[name](MARGINS * 1e3)[0]).all()


def test_dpo_by_hand():
    """Two pairs at beta = 0.5: log-ratios of 2 and -1, and of 0 and 0."""
    logps, ref = tensor([-3.0, -4.0, -6.0, -2.0]), tensor([-5.0, -4.0, -5.0, -2.0])
    result = dpo(logps, ref, tensor([4.0, 2.0, 3.0, 2.0]), **SETTINGS | {"beta": 0.5})
    torch.testing.assert_close(result.chosen, tensor([1.0, 0.0]))
    torch.testing.assert_close(result.rejected, tensor([-0.5, 0.0]))
    assert result.loss == pytest.approx((math.log(1 + math.exp(-1.5)) + math.log(2)) / 2)
    s = 0.5 / (1 + math.exp(1.5)) / 2
    torch.testing.assert_close(result.slopes, tensor([-s, -0.125, s, 0.125]))
    assert pair_metrics(result.chosen, result.rejected) == {
        "rewards/chosen": 0.5, "rewards/rejected": -0.25, "rewards/margins": 0.75, "rewards/accuracies": 0.5,
    }  # fmt: skip
    # The mean log-likelihood of chosen tokens is -3/4 and -4/2.
    with_nll = dpo(logps, ref, tensor([4.0, 2.0, 3.0, 2.0]), **SETTINGS | {"beta": 0.5, "nll_coef": 0.1})
    assert with_nll.loss == pytest.approx(result.loss + 0.1 * (0.75 + 2.0) / 2)
    torch.testing.assert_close(with_nll.slopes - result.slopes, tensor([-0.1 / 4 / 2, -0.1 / 2 / 2, 0.0, 0.0]))


def plain_dpo(logps, ref, tokens, params):
    """As the papers write it."""
    pairs = len(logps) // 2
    ratios = logps - ref
    if params["length_normalized"]:
        ratios = ratios / tokens
    h = ratios[:pairs] - ratios[pairs:]
    if params["loss"] == "ipo":
        loss = (h - 1 / (2 * params["beta"])) ** 2
    else:
        e = params["label_smoothing"]
        loss = -(1 - e) * logsigmoid(params["beta"] * h) - e * logsigmoid(-params["beta"] * h)
    return (loss - params["nll_coef"] * logps[:pairs] / tokens[:pairs]).mean()


OFFSETS = torch.tensor([0, 3, 7, 12, 14])
MASK = torch.tensor([0, 0, 1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1], dtype=torch.bool)


@pytest.mark.parametrize("params", PARAMS)
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**31))
def test_the_weighted_sum_has_the_gradient_of_the_plain_formula(params, seed):
    """By every token's log-probability, of two pairs in one packed batch."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -3 * torch.rand(14, generator=generator, dtype=torch.float64)
    ref = logprobs + torch.randn(14, generator=generator, dtype=torch.float64)
    sequence = segment_ids(OFFSETS)
    tokens = segment_sum(MASK, sequence, 4)

    def sums(column):
        return torch.zeros(4, dtype=torch.float64).index_add(0, sequence, torch.where(MASK, column, 0.0))

    logprobs.requires_grad_()
    loss = plain_dpo(sums(logprobs), sums(ref), tokens, params)
    (expected,) = torch.autograd.grad(loss, logprobs)
    result = dpo(sums(logprobs.detach()), sums(ref), tokens, **params)
    assert result.loss == pytest.approx(loss.item(), rel=1e-12)
    weights = token_weights(result.slopes, sequence, MASK)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(-weights.double(), expected, rtol=1e-6, atol=1e-9)
    assert (weights[~MASK] == 0).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("center", [0.0, 0.01])
def test_bradley_terry_has_the_gradient_of_the_plain_formula(smoothing, center):
    scores = tensor([1.0, -0.5, 2.0, 0.5, 0.25, 2.0]).requires_grad_()
    chosen, rejected = scores[:3], scores[3:]
    plain = -(1 - smoothing) * logsigmoid(chosen - rejected) - smoothing * logsigmoid(rejected - chosen)
    loss = (plain + center * (chosen + rejected) ** 2).mean()
    (expected,) = torch.autograd.grad(loss, scores)
    result = bradley_terry(scores.detach(), label_smoothing=smoothing, center_coef=center)
    assert result.loss == pytest.approx(loss.item())
    torch.testing.assert_close(result.slopes, expected)
    assert pair_metrics(result.chosen, result.rejected)["rewards/accuracies"] == pytest.approx(1 / 3)
