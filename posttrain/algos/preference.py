"""Losses of pairs of answers, one preferred to the other, and their slopes by what a model says of each answer.

A loss of pairs depends on a model through one number a sequence: the log-probability of an answer (DPO), or its score
(a reward model). The driver has these numbers, takes the loss and its derivative by each of them here, and gives the
derivatives to the workers as weights of a sum (``token_weights``). So the two answers of a pair need not meet in one
micro-batch, nor on one worker.

Shape legend: P pairs, their 2P sequences (all chosen ones, then the rejected ones in the same order), T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

PairLoss = Literal["sigmoid", "ipo"]


@dataclass(frozen=True)
class PairResult:
    """The loss of some pairs."""

    loss: float
    """Mean over the pairs."""
    slopes: Tensor
    """[2P] derivative of ``loss`` by the number of each sequence"""
    chosen: Tensor
    """[P] rewards of the chosen answers"""
    rejected: Tensor
    """[P]"""


def sigmoid_loss(margins: Tensor, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the loss [P] and its derivative by the margin [P]: -(1 - e) log sigmoid(m) - e log sigmoid(-m).

    With e = 0 that of Bradley and Terry, and of DPO (arXiv:2305.18290, equation 7). Else a share e of the pairs is
    taken to have its answers swapped (conservative DPO, https://ericmitchell.ai/cdpo.pdf).
    """
    loss = -(1.0 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins)
    slope = label_smoothing * torch.sigmoid(margins) - (1.0 - label_smoothing) * torch.sigmoid(-margins)
    return loss, slope


def ipo_loss(margins: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the loss [P] and its derivative by the margin [P]: (m / beta - 1 / (2 beta))^2 (IPO, arXiv:2310.12036,
    equation 17). The margin is pulled to 1/2, and not as far as it goes."""
    distance = (margins - 0.5) / beta
    return distance.square(), 2.0 * distance / beta


def dpo(
    logps: Tensor,
    ref_logps: Tensor,
    tokens: Tensor,
    *,
    loss: PairLoss,
    beta: float,
    label_smoothing: float,
    nll_coef: float,
    length_normalized: bool,
) -> PairResult:
    """Return the loss of direct preference optimisation: the reward of an answer is beta times its log-ratio to the
    reference, and the loss is of the rewards' difference.

    Args:
        logps: [2P] log-probability of each answer, summed over its tokens.
        ref_logps: [2P] the same under the reference.
        tokens: [2P] tokens of each answer.
        loss: ``sigmoid`` (``sigmoid_loss`` with ``label_smoothing``) or ``ipo``.
        nll_coef: factor of the mean negative log-likelihood of a chosen answer's tokens, which is added to the loss
            (arXiv:2404.19733).
        length_normalized: a log-ratio is the mean over an answer's tokens instead of their sum.
    """
    pairs = len(logps) // 2
    logps, ref_logps, tokens = logps.double(), ref_logps.double(), tokens.double()
    scale = beta / tokens if length_normalized else torch.full_like(logps, beta)
    chosen, rejected = (scale * (logps - ref_logps)).split(pairs)
    if loss == "ipo":
        losses, slope = ipo_loss(chosen - rejected, beta)
    else:
        losses, slope = sigmoid_loss(chosen - rejected, label_smoothing)
    slopes = scale * torch.cat([slope, -slope])
    if nll_coef:
        losses = losses - nll_coef * logps[:pairs] / tokens[:pairs]
        slopes[:pairs] -= nll_coef / tokens[:pairs]
    return PairResult(float(losses.mean()), slopes / pairs, chosen, rejected)


def bradley_terry(scores: Tensor, *, label_smoothing: float = 0.0, center_coef: float = 0.0) -> PairResult:
    """Return the loss of a reward model: -log sigmoid(chosen - rejected) (arXiv:2203.02155, equation 1).

    Args:
        scores: [2P].
        label_smoothing: as in ``sigmoid_loss``.
        center_coef: factor of (chosen + rejected)^2, which keeps scores around 0 (arXiv:2312.09244).
    """
    pairs = len(scores) // 2
    chosen, rejected = scores.double().split(pairs)
    loss, slope = sigmoid_loss(chosen - rejected, label_smoothing)
    loss = loss + center_coef * (chosen + rejected).square()
    centering = 2.0 * center_coef * (chosen + rejected)
    return PairResult(float(loss.mean()), torch.cat([slope + centering, centering - slope]) / pairs, chosen, rejected)


def token_weights(slopes: Tensor, sequence: Tensor, mask: Tensor) -> Tensor:
    """Return loss weights, [T] float32, under which the loss -sum(weight x number of the token) has the gradient of the
    loss of pairs. They have both signs, and that sum's value means nothing.

    Args:
        slopes: [2P], of a ``PairResult``.
        sequence, mask: [T], see ``algos.segments``.
    """
    return torch.where(mask, -slopes[sequence], 0.0).float()


def pair_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, float]:
    """Return means over pairs of rewards [P], and the share of pairs whose chosen answer has the higher one."""
    return {
        "rewards/chosen": float(chosen.mean()),
        "rewards/rejected": float(rejected.mean()),
        "rewards/margins": float((chosen - rejected).mean()),
        "rewards/accuracies": float((chosen > rejected).double().mean()),
    }
