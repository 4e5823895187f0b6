"""SAPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.algos.catalog import bundle, policy_loss

if TYPE_CHECKING:
    from torch import Tensor

    from posttrain.algos.tokens import Columns, TokenInputs


@policy_loss(
    "sapo",
    formula="-A (4 / tau) sigmoid(tau (r - 1))",
    source="arXiv:2511.20347",
    aggregation="seq-mean-token-mean",
    nothing_without_advantage=True,
)
def sapo(logprobs: Tensor, tokens: TokenInputs, *, tau_positive: float, tau_negative: float) -> tuple[Tensor, Columns]:
    """Return the loss with a sigmoid of the ratio in place of the clip (SAPO, arXiv:2511.20347): -A (4 / tau)
    sigmoid(tau (r - 1)), whose slope is that of r where r = 1; ``tau_positive`` is the tau where A > 0."""
    log_ratio = tokens.log_ratio(logprobs)
    tau = log_ratio.new_full(log_ratio.shape, tau_negative).masked_fill(tokens.advantages > 0, tau_positive)
    soft = (tau * (log_ratio.exp() - 1.0)).sigmoid() * (4.0 / tau)
    return -soft * tokens.advantages, {"ppo_kl": -log_ratio.detach()}


bundle("sapo", advantage="grpo", policy_loss="sapo", loss_agg="seq-mean-token-mean")
