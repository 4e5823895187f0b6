"""Causal LMs that map packed tokens to log-probabilities, to values, or to a loss of these.

Shape legend: S packed tokens, N of them predict a token that is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from posttrain.core.errors import ModelError
from posttrain.models.attention import Ragged
from posttrain.models.classifier import VALUE_HEAD
from posttrain.models.logprobs import TokenLoss, token_logprobs, tokenwise_loss
from posttrain.models.output_head import LogitRule
from posttrain.models.rows import pick_rows
from posttrain.models.vision import ImageInput, last_hidden

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PackedLM(nn.Module):
    """Wraps a Hugging Face causal LM. As the root FSDP module it holds embeddings and head unsharded for the whole
    forward pass, which the chunked head needs."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.rule = LogitRule.of(model)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        rows: Tensor,
        targets: Tensor,
        ragged: Ragged,
        temperature: float,
        loss: TokenLoss | None = None,
        images: ImageInput | None = None,
    ) -> tuple[Tensor, ...]:
        """Log-probabilities of chosen tokens, or a loss made of them.

        Args:
            input_ids, position_ids: [S]; of models that see position_ids may be [S, 3].
            rows: [N] which hidden states predict.
            targets: [N] the tokens whose log-probabilities are wanted.
            ragged: the sequences' boundaries.
            temperature: see ``token_logprobs``.
            loss: of tokens; see ``tokenwise_loss``.
            images: that some of the tokens stand for.

        Returns:
            logprobs [N] float32, entropies [N] float32; with ``loss`` its sum before them, and only it has a gradient.
        """
        hidden = last_hidden(self.model, input_ids, position_ids, ragged, images)
        return self._of_hidden(pick_rows(hidden, rows), targets, temperature, loss)

    def _of_hidden(
        self, hidden: Tensor, targets: Tensor, temperature: float, loss: TokenLoss | None
    ) -> tuple[Tensor, ...]:
        """What ``forward`` returns, of the hidden states [N, D] that predict."""
        weight = self.model.get_output_embeddings().weight
        hidden, temperature, cap = self.rule.scaled(hidden), self.rule.temperature(temperature), self.rule.softcap
        if loss is None:
            return token_logprobs(hidden, weight, targets, temperature, cap)
        return tokenwise_loss(hidden, weight, targets, temperature, loss, cap)


class PackedValues(PackedLM):
    """A causal LM whose output head gives one value instead of logits: a critic or a reward model.

    The head begins at 0, and so do all values: a step then moves a value by what it learned, not by what a random head
    happened to say.
    """

    HEAD = VALUE_HEAD
    """The name of the head's weight in ``model``. No weight of the model is read into it."""

    def __init__(self, model: PreTrainedModel) -> None:
        head = model.get_output_embeddings()
        weight = cast("nn.Embedding", model.get_input_embeddings()).weight
        name = next(name for name, module in model.named_modules() if module is head)
        if f"{name}.weight" != self.HEAD:
            raise ModelError(
                f"the output head of {type(model).__name__} is {name}, and that of a model of values must be lm_head",
                hint="take a model of another type; docs/models.md lists those that work",
            )
        model.config.tie_word_embeddings = False
        model.set_output_embeddings(nn.Linear(weight.shape[1], 1, bias=False, device=weight.device, dtype=weight.dtype))
        super().__init__(model)

    def zero_head(self) -> None:
        """Give the head its first weights."""
        with torch.no_grad():
            self.model.get_output_embeddings().weight.zero_()

    def _of_hidden(
        self, hidden: Tensor, targets: Tensor, temperature: float, loss: TokenLoss | None
    ) -> tuple[Tensor, ...]:
        """Values [N] float32, with gradient: what is expected of going on from each hidden state. Nothing but
        ``hidden`` is used."""
        return (self.model.get_output_embeddings()(hidden).squeeze(-1).float(),)
