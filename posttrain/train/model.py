"""A causal LM that maps packed tokens to log-probabilities, or to a loss.

Shape legend: S packed tokens, N of them predict a token that is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from posttrain.errors import ModelError
from posttrain.models.attention import Ragged
from posttrain.models.logprobs import TokenLoss, pick_rows, token_logprobs, tokenwise_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PackedLM(nn.Module):
    """Wraps a Hugging Face causal LM. As the root FSDP module it holds embeddings and head unsharded for the whole
    forward pass, which the chunked head needs."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        if getattr(model.get_output_embeddings(), "bias", None) is not None:
            raise ModelError(f"{type(model).__name__} has a bias in its output head, which is not supported")
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        rows: Tensor,
        targets: Tensor,
        ragged: Ragged,
        temperature: float,
        loss: TokenLoss | None = None,
    ) -> tuple[Tensor, ...]:
        """Log-probabilities of chosen tokens, or a loss made of them.

        Args:
            input_ids, position_ids: [S].
            rows: [N] which hidden states predict.
            targets: [N] the tokens whose log-probabilities are wanted.
            ragged: the sequences' boundaries.
            temperature: see ``token_logprobs``.
            loss: of tokens; see ``tokenwise_loss``.

        Returns:
            logprobs [N] float32, entropies [N] float32; with ``loss`` its sum before them, and only it has a gradient.
        """
        hidden = self.model.base_model(
            input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, ragged=ragged
        ).last_hidden_state[0]
        hidden = pick_rows(hidden, rows)
        weight = self.model.get_output_embeddings().weight
        if loss is None:
            return token_logprobs(hidden, weight, targets, temperature)
        return tokenwise_loss(hidden, weight, targets, temperature, loss)
