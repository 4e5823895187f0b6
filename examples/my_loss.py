"""A policy loss of your own in one file. docs/algorithms.md says how to run it."""

from torch import Tensor

from posttrain.algos import bundle, policy_loss
from posttrain.algos.tokens import Columns, TokenInputs


@policy_loss("dro", formula="-A logp + beta / 2 (log r)^2", source="arXiv:2405.19107")
def dro(logprobs: Tensor, tokens: TokenInputs, *, beta: float = 0.1) -> tuple[Tensor, Columns]:
    """Return the policy gradient with a quadratic penalty on the log-ratio, which takes the place of a clip.

    Args:
        logprobs: [N] log-probabilities of the tokens under the policy, with gradient.
        tokens: advantages and old log-probabilities, [N] too.
        beta: weight of the penalty (algo.loss_kwargs.beta).
    """
    squared = tokens.log_ratio(logprobs).square()
    loss = -tokens.advantages * logprobs + 0.5 * beta * squared
    return loss, {"squared_log_ratio": squared.detach()}


bundle("dro", advantage="rloo", policy_loss="dro", loss_agg="token-mean")
