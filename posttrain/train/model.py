"""A causal LM that maps packed tokens to log-probabilities, and the parallelism applied to it from outside.

Shape legend: T packed tokens, N of them carry loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from posttrain.errors import ModelError
from posttrain.models.attention import Ragged
from posttrain.models.logprobs import token_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PackedLM(nn.Module):
    """Wraps a Hugging Face causal LM. As the root FSDP module it holds embeddings and head unsharded for the whole
    forward pass, which the chunked head needs."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, predict: Tensor, ragged: Ragged, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities of chosen tokens.

        Args:
            input_ids, position_ids: [T].
            predict: [N] positions of the tokens wanted, none of them the first of its sequence.
            ragged: the sequences' boundaries.
            temperature: see ``token_logprobs``.

        Returns:
            logprobs [N] float32, entropies [N] float32.
        """
        hidden = self.model.base_model(
            input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, ragged=ragged
        ).last_hidden_state[0]
        head = self.model.get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            raise ModelError(f"{type(self.model).__name__} has a bias in its output head, which is not supported")
        return token_logprobs(hidden[predict - 1], head.weight, input_ids[predict], temperature)


def parallelize(model: PackedLM, mesh: DeviceMesh, *, dtype: torch.dtype, gradient_checkpointing: bool) -> PackedLM:
    """Activation checkpointing, then FSDP2 around every decoder layer and the root.

    Parameters and gradient reduction stay float32; compute runs in ``dtype``.
    """
    if gradient_checkpointing:
        model.model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in decoder_layers(model.model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of transformer blocks: the largest ``ModuleList`` of the base model."""
    lists = [m for m in model.base_model.modules() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise ModelError(f"no list of layers found in {type(model).__name__}")
    return max(lists, key=len)
