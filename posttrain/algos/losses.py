"""Losses of tokens, and their weighted sums (see ``algos.reduce``).

A policy loss is a function of each token by itself: ``loss(logprobs, inputs, params) -> (losses, metrics)``, of [N]
tensors all. So weights are applied in one place, ``policy_loss``, and a loss may be computed chunk by chunk. What
depends on a whole sequence or on the whole batch comes in as a column without gradient, computed beforehand:
``sequence_log_ratio`` for ``gspo`` and ``gmpo``, the selections for ``clip_cov`` and ``kl_cov``. ``algos.catalog``
says which loss needs which.

What takes weights returns ``(loss, sums)``: a scalar to differentiate, and detached scalars whose sum over
micro-batches and workers is the step's metric.

Shape legend: N tokens that carry loss, T tokens of a packed batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.algos.kl import kl_penalty
from posttrain.algos.segments import sequence_mean

MAX_LOG_RATIO = 20.0
"""A ratio beyond e^20 is infinite for any purpose, and must not turn into inf * 0."""

Sums = dict[str, Tensor]
Columns = dict[str, Tensor]
"""Metrics [N] of tokens, without gradient, to be weighted as the loss is"""


@dataclass(frozen=True)
class TokenInputs:
    """What a policy loss reads besides the policy's log-probabilities. All [N], without gradient."""

    advantages: Tensor
    old_logprobs: Tensor | None = None
    """Under the policy that the ratio is taken to. None: the policy has not moved since it sampled, so that all ratios
    are exactly 1, with the right gradient."""
    sequence_log_ratio: Tensor | None = None
    """Of the token's sequence, from the function of that name (``gspo``, ``gmpo``)"""
    selected: Tensor | None = None
    """bool, from ``clip_cov_selection`` or ``kl_cov_selection``"""


@dataclass(frozen=True)
class LossParams:
    """Settings of policy losses; each reads what it needs."""

    clip_low: float
    """The ratio counts no lower than 1 - clip_low. In ``gmpo`` it is the log-ratio: no lower than -clip_low."""
    clip_high: float
    """The ratio counts no higher than 1 + clip_high. In ``gmpo`` it is the log-ratio: no higher than clip_high."""
    dual_clip: float | None = None
    """``clipped``: the loss of a token with negative advantage is at most this times its size; None: no bound."""
    tau_positive: float = 1.0
    """``sapo``: how sharp the gate is for advantages above 0"""
    tau_negative: float = 1.05
    """``sapo``: how sharp the gate is for others; a little sharper, as in the paper"""
    kl_cov_coef: float = 1.0
    """``kl_cov``: weight of the penalty of the selected tokens"""


# ---------------------------------------------------------------------- policy losses


def clipped(logprobs: Tensor, inputs: TokenInputs, params: LossParams) -> tuple[Tensor, Columns]:
    """Clipped surrogate (PPO, arXiv:1707.06347, equation 7), with separate bounds (DAPO, arXiv:2503.14476) and
    dual-clip (Ye et al. 2020, arXiv:1912.09729, equation 5).

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and for A < 0 with dual clip at most -c A.
    """
    log_ratio = _log_ratio(logprobs, inputs)
    surrogate, was_clipped = _clipped_surrogate(log_ratio, inputs.advantages, params)
    bounded = surrogate
    if params.dual_clip is not None:
        most = -inputs.advantages * params.dual_clip
        bounded = torch.where(inputs.advantages < 0, torch.minimum(surrogate, most), surrogate)
    return bounded, {
        "pg_clipfrac": was_clipped,
        "pg_clipfrac_lower": (bounded < surrogate).detach(),
        "ppo_kl": -log_ratio.detach(),
    }


def gspo(logprobs: Tensor, inputs: TokenInputs, params: LossParams) -> tuple[Tensor, Columns]:
    """Clipped surrogate of the sequence's ratio (GSPO-token, arXiv:2507.18071).

    The ratio is s = exp(mean log-ratio of the sequence); each token has its value, and the gradient s dlogp.
    """
    own = _sequence_column(logprobs, inputs) + (logprobs - logprobs.detach())
    surrogate, was_clipped = _clipped_surrogate(_bounded(own), inputs.advantages, params)
    return surrogate, {"pg_clipfrac": was_clipped, "ppo_kl": -_log_ratio(logprobs, inputs).detach()}


def gmpo(logprobs: Tensor, inputs: TokenInputs, params: LossParams) -> tuple[Tensor, Columns]:
    """Geometric-mean policy optimization (GMPO, arXiv:2507.20673): log-ratios are clipped token by token,
    -A exp(mean of the clipped ones).

    Each token has that value, and the gradient -A exp(mean) dx of its own clipped log-ratio x. With the weights of
    ``seq-mean-token-mean`` this sums to the loss of the sequence and to its derivative.
    """
    log_ratio = _log_ratio(logprobs, inputs)
    own = _clip_log_ratio(log_ratio, inputs.advantages, params)
    ratio = _bounded(_sequence_column(logprobs, inputs) + (own - own.detach())).exp()
    return -inputs.advantages * ratio, {"pg_clipfrac": (own != log_ratio).detach(), "ppo_kl": -log_ratio.detach()}


def cispo(logprobs: Tensor, inputs: TokenInputs, params: LossParams) -> tuple[Tensor, Columns]:
    """Clipped importance weights (CISPO, MiniMax-M1, arXiv:2506.13585): -clip(r) A logp, with no gradient
    through the weight, so that no token loses its gradient."""
    log_ratio = _log_ratio(logprobs, inputs).detach()
    ratio = log_ratio.exp()
    weight = ratio.clamp(1.0 - params.clip_low, 1.0 + params.clip_high)
    return -weight * inputs.advantages * logprobs, {"pg_clipfrac": ratio != weight, "ppo_kl": -log_ratio}


def sapo(logprobs: Tensor, inputs: TokenInputs, params: LossParams) -> tuple[Tensor, Columns]:
    """Soft gate in place of the clip (SAPO, arXiv:2511.20347): -A (4 / tau) sigmoid(tau (r - 1)), whose slope is that
    of r where r = 1."""
    log_ratio = _log_ratio(logprobs, inputs)
    tau = torch.full_like(log_ratio, params.tau_negative).masked_fill(inputs.advantages > 0, params.tau_positive)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1.0)) * (4.0 / tau)
    return -gate * inputs.advantages, {"ppo_kl": -log_ratio.detach()}


def gpg(logprobs: Tensor, inputs: TokenInputs, params: LossParams) -> tuple[Tensor, Columns]:
    """Plain policy gradient (GPG, arXiv:2504.02546): -A logp."""
    return -inputs.advantages * logprobs, {"ppo_kl": -_log_ratio(logprobs, inputs).detach()}


def clip_cov(logprobs: Tensor, inputs: TokenInputs, params: LossParams) -> tuple[Tensor, Columns]:
    """Clipped surrogate in which selected tokens have no loss (Clip-Cov, arXiv:2505.22617)."""
    log_ratio = _log_ratio(logprobs, inputs)
    surrogate, _ = _clipped_surrogate(log_ratio, inputs.advantages, params)
    selected = _selection(inputs)
    return surrogate.masked_fill(selected, 0.0), {"pg_clipfrac": selected, "ppo_kl": -log_ratio.detach()}


def kl_cov(logprobs: Tensor, inputs: TokenInputs, params: LossParams) -> tuple[Tensor, Columns]:
    """Policy gradient in which selected tokens are held back (KL-Cov, arXiv:2505.22617): -r A, and for
    these + coef abs(log r)."""
    log_ratio = _log_ratio(logprobs, inputs)
    penalty = torch.where(_selection(inputs), params.kl_cov_coef * log_ratio.abs(), 0.0)
    return -inputs.advantages * log_ratio.exp() + penalty, {"ppo_kl": -log_ratio.detach()}


PolicyLoss = Callable[[Tensor, TokenInputs, LossParams], tuple[Tensor, Columns]]

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "clipped": clipped,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "gpg": gpg,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
"""``algos.catalog`` has what each needs."""


def policy_loss(
    name: str, logprobs: Tensor, inputs: TokenInputs, params: LossParams, weights: Tensor
) -> tuple[Tensor, Sums]:
    """The weighted sum of a policy loss. ``logprobs``, with gradient, and ``weights`` are [N]."""
    if name not in POLICY_LOSSES:
        raise ValueError(f"unknown policy loss {name!r}")
    per_token, metrics = POLICY_LOSSES[name](logprobs, inputs, params)
    loss = (weights * per_token).sum()
    return loss, {"pg_loss": loss.detach()} | {key: (weights * column).sum() for key, column in metrics.items()}


# ---------------------------------------------------------------------- columns computed beforehand


def sequence_log_ratio(
    name: str, log_ratio: Tensor, advantages: Tensor, sequence: Tensor, mask: Tensor, params: LossParams
) -> Tensor:
    """[T] the column of that name for the loss ``name``: the mean log-ratio over the policy's tokens of a sequence. For
    ``gmpo`` each is clipped first.

    Args:
        log_ratio: [T] log-probability under the current policy less that under the old one.
        advantages: [T], the same on all tokens of a sequence.
        sequence, mask: [T], see ``algos.segments``.
    """
    log_ratio = log_ratio.detach()
    if name == "gmpo":
        log_ratio = _clip_log_ratio(log_ratio, advantages, params)
    elif name != "gspo":
        raise ValueError(f"{name!r} has no ratio of sequences")
    return sequence_mean(log_ratio, sequence, mask)


def clip_cov_selection(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    params: LossParams,
    *,
    share: float,
    low: float,
    high: float,
    generator: torch.Generator,
) -> Tensor:
    """[T] bool: the tokens that ``clip_cov`` leaves out.

    At random ``share`` of all tokens, and at least one, from those whose covariance of log-probability and advantage
    lies between ``low`` and ``high`` and which the clip does not hold anyway.

    Args:
        logprobs, old_logprobs, advantages, mask: [T] of the whole batch, so that micro-batches do not matter.
        generator: on the device of the tensors. The same state and the same order of tokens select the same.
    """
    log_ratio = _bounded(logprobs - old_logprobs).detach()
    _, was_clipped = _clipped_surrogate(log_ratio, advantages, params)
    covariance = _covariance(logprobs, advantages, mask)
    candidates = (mask & ~was_clipped & (covariance > low) & (covariance < high)).nonzero().flatten()
    drawn = torch.randperm(len(candidates), generator=generator, device=candidates.device)[: _share(mask, share)]
    return torch.zeros_like(mask).index_fill_(0, candidates[drawn], True)


def kl_cov_selection(logprobs: Tensor, advantages: Tensor, mask: Tensor, *, share: float) -> Tensor:
    """[T] bool: the tokens that ``kl_cov`` penalises.

    They are the ``share`` of all, and at least one, with the largest covariance of log-probability and advantage.
    Tensors are [T] of the whole batch.
    """
    covariance = _covariance(logprobs, advantages, mask).masked_fill(~mask, -torch.inf)
    largest = covariance.argsort(descending=True, stable=True)[: _share(mask, share)]
    return torch.zeros_like(mask).index_fill_(0, largest, True) & mask


# ---------------------------------------------------------------------- other losses


def nll(logprobs: Tensor, weights: Tensor) -> tuple[Tensor, Sums]:
    """Negative log-likelihood, the SFT loss. ``logprobs`` and ``weights`` are [N]."""
    loss = -(weights * logprobs).sum()
    return loss, {"loss": loss.detach()}


def kl(logprobs: Tensor, ref_logprobs: Tensor, weights: Tensor, *, estimator: str) -> tuple[Tensor, Sums]:
    """Weighted KL to the reference model (``algos.kl``), to be scaled by its coefficient. Tensors are [N]."""
    loss = (weights * kl_penalty(logprobs, ref_logprobs, estimator)).sum()
    return loss, {"kl_loss": loss.detach()}


def entropy(entropies: Tensor, weights: Tensor) -> tuple[Tensor, Sums]:
    """Weighted entropy of the policy. As a bonus it is to be scaled and *subtracted* from the loss. Tensors are [N]."""
    total = (weights * entropies).sum()
    return total, {"entropy": total.detach()}


def value(values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, *, clip: float) -> tuple[Tensor, Sums]:
    """Clipped loss of a critic (PPO): max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2. Tensors are [N],
    ``values`` with gradient."""
    unclipped = (values - returns).square()
    nearby = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    held = (nearby - returns).square()
    loss = 0.5 * (weights * torch.maximum(unclipped, held)).sum()
    clipfrac = (weights * (held > unclipped)).sum()
    return loss, {"vf_loss": loss.detach(), "vf_clipfrac": clipfrac}


# ---------------------------------------------------------------------- parts


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _log_ratio(logprobs: Tensor, inputs: TokenInputs) -> Tensor:
    old = logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
    return _bounded(logprobs - old)


def _clipped_surrogate(log_ratio: Tensor, advantages: Tensor, params: LossParams) -> tuple[Tensor, Tensor]:
    """The surrogate [N], and where the clip acts [N] bool."""
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    held = -advantages * ratio.clamp(1.0 - params.clip_low, 1.0 + params.clip_high)
    return torch.maximum(unclipped, held), (held > unclipped).detach()


def _clip_log_ratio(log_ratio: Tensor, advantages: Tensor, params: LossParams) -> Tensor:
    """Bounded only where going on would gain: above for A > 0, below for A < 0."""
    from_above = log_ratio.clamp(max=params.clip_high)
    from_below = log_ratio.clamp(min=-params.clip_low)
    return torch.where(advantages > 0, from_above, torch.where(advantages < 0, from_below, log_ratio))


def _sequence_column(logprobs: Tensor, inputs: TokenInputs) -> Tensor:
    if inputs.sequence_log_ratio is not None:
        return inputs.sequence_log_ratio
    if inputs.old_logprobs is not None:
        raise ValueError("the loss needs the log-ratio of each token's sequence")
    return torch.zeros_like(logprobs)


def _selection(inputs: TokenInputs) -> Tensor:
    if inputs.selected is None:
        raise ValueError("the loss needs a selection of tokens")
    return inputs.selected


def _covariance(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """[T] float64: (logp - mean) (A - mean), with means over the masked tokens."""
    logprobs, advantages = logprobs.detach().double(), advantages.double()
    count = mask.sum().clamp(min=1)
    means = [torch.where(mask, x, 0.0).sum() / count for x in (logprobs, advantages)]
    return (logprobs - means[0]) * (advantages - means[1])


def _share(mask: Tensor, share: float) -> int:
    return max(1, int(share * int(mask.sum())))
