"""The loss of a micro-batch, of values or of log-probabilities, with the algorithm's parts."""

from __future__ import annotations

from torch import Tensor

from posttrain.algos import losses
from posttrain.algos.catalog import POLICY_LOSSES
from posttrain.algos.corrections import token_factors
from posttrain.algos.gap import gap_sums
from posttrain.algos.tokens import TokenInputs
from posttrain.core.errors import RunError
from posttrain.train.microbatch import MicroBatch
from posttrain.train.spec import LossSpec


def value_loss(micro: MicroBatch, values: Tensor, spec: LossSpec) -> tuple[Tensor, losses.Sums]:
    """Return the loss of values [N], a critic's or without returns a reward model's, and sums for the metrics. Raises
    ``RunError``."""
    if micro.returns is None:
        return losses.nll(values, micro.weights)
    if micro.values is None:
        raise RunError("an update of a critic needs the values before it")
    return losses.value(values, micro.values, micro.returns, micro.weights, clip=spec.value_clip)


def token_loss(
    micro: MicroBatch, logprobs: Tensor, entropies: Tensor, part: slice, spec: LossSpec
) -> tuple[Tensor, losses.Sums]:
    """Return the loss of some of the micro-batch's tokens, and sums for the metrics. Raises ``RunError``."""
    algo, weights = spec.algo, micro.weights[part]

    def column(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[part]

    rollout = column(micro.rollout_logprobs)
    if spec.correction is not None:
        if rollout is None:
            raise RunError("a correction needs the engine's log-probabilities")
        weights = weights * token_factors(logprobs - rollout, spec.correction.upper, spec.correction.lower)
    bonus, entropy = losses.entropy(entropies, weights)
    if algo is None:
        loss, sums = losses.nll(logprobs, weights)
        return loss, sums | entropy
    advantages, ref, old = column(micro.advantages), column(micro.ref_logprobs), column(micro.old_logprobs)
    if advantages is None:
        raise RunError("a policy update needs advantages")
    # A policy that has not moved since it sampled is its own old policy.
    tokens = TokenInputs(advantages, logprobs.detach() if old is None else old, column(micro.prepared))
    policy_loss = POLICY_LOSSES.get(algo.policy_loss)
    total, sums = losses.weighted_policy_loss(policy_loss, logprobs, tokens, algo.loss_values, weights)
    if ref is not None and algo.kl_in == "loss":
        kl, kl_sums = losses.kl(logprobs, ref, weights, estimator=algo.kl_estimator)
        total = total + algo.kl_coef * kl
        sums |= kl_sums
    if algo.entropy_coef:
        total = total - algo.entropy_coef * bonus
    if spec.gap and rollout is not None and micro.has_loss:
        sums |= gap_sums(logprobs, rollout)
    return total, sums | entropy | {"weight": weights.sum()}
