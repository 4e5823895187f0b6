"""What a causal LM does to the logits that its output head gives: nothing, or a factor, or a cap (softcap).

Log-probabilities are computed from hidden states (``logprobs``), past the model's own ``forward``, so what that does
is read off its config here, and compared with what it really does before a model is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from posttrain.core.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROWS = 8
"""Tokens of the vocabulary in the comparison."""


@dataclass(frozen=True)
class LogitRule:
    """A logit x becomes ``softcap * tanh(scale * x / softcap)``, or without a cap ``scale * x``."""

    scale: float = 1.0
    softcap: float | None = None

    @staticmethod
    def of(model: PreTrainedModel) -> LogitRule:
        """Return the rule that the model's config states."""
        config: Any = model.config.get_text_config()
        scale = 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        for factor in ("logit_scale", "lm_head_multiplier"):
            scale *= getattr(config, factor, None) or 1.0
        return LogitRule(scale, getattr(config, "final_logit_softcapping", None))

    def applied(self, logits: Tensor) -> Tensor:
        """Return logits as the model would."""
        logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def temperature(self, sampling: float) -> float:
        """Return the temperature that makes of the head's own logits what ``sampling`` makes of the model's."""
        return sampling / self.scale if self.softcap is None else sampling

    def scaled(self, hidden: Tensor) -> Tensor:
        """Return hidden states that have the factor which ``temperature`` leaves out, before a cap."""
        return hidden if self.softcap is None or self.scale == 1.0 else hidden * self.scale


def check_head(model: PreTrainedModel) -> None:
    """Check that the model's ``forward`` makes logits of hidden states as ``LogitRule`` says: both get the same hidden
    states and a head of a few tokens. The model may be on the meta device, and is left as it was.

    Raises:
        ModelError: the head has a bias, or ``forward`` does something else.
    """
    head: Any = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"{type(model).__name__} has no output head", hint="take a causal language model")
    if getattr(head, "bias", None) is not None:
        raise ModelError(
            f"{type(model).__name__} has a bias in its output head, which is not supported",
            hint="docs/models.md lists the architectures that work",
        )
    generator = torch.Generator().manual_seed(0)
    width = head.weight.shape[1]
    hidden = torch.randn(1, 3, width, generator=generator)
    small = nn.Linear(width, _ROWS, bias=False)
    small.weight.data = torch.randn(_ROWS, width, generator=generator) / width**0.5
    try:
        found = _logits(model, small, hidden)
    except AttributeError:  # it reads of its layers' output what others do not have
        found = None
    if found is None or not torch.allclose(found, LogitRule.of(model).applied(small(hidden)), rtol=1e-4, atol=1e-5):
        raise ModelError(
            f"{type(model).__name__} makes logits of its hidden states in a way of its own, and log-probabilities here "
            "would be others",
            hint="docs/models.md lists the architectures that work",
        )


def _logits(model: PreTrainedModel, head: nn.Linear, hidden: Tensor) -> Tensor:
    """Return what ``forward`` makes of hidden states, with another head."""
    from transformers.modeling_outputs import MoeModelOutputWithPast

    own, base = model.get_output_embeddings(), cast(Any, model.base_model)
    forward = base.forward
    found: Any = MoeModelOutputWithPast(last_hidden_state=cast(Any, hidden))
    found.rope_deltas = found.image_hidden_states = None  # of models that see
    try:
        base.forward = lambda *args, **kwargs: found
        model.set_output_embeddings(head)
        with torch.no_grad():
            logits: Tensor = model(input_ids=torch.zeros(1, hidden.shape[1], dtype=torch.int64), use_cache=False).logits
        return logits.float()
    finally:
        model.set_output_embeddings(own)
        base.forward = forward
