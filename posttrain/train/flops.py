"""How much arithmetic a step takes, and how much a device can do: what MFU is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from posttrain.core.flops import Flops
from posttrain.core.machines import gpu_of_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of the device by its datasheet; None where it is not known."""
    if device.type != "cuda":
        return None
    gpu = gpu_of_name(torch.cuda.get_device_name(device))
    return None if gpu is None else gpu.flops


def model_flops(model: PreTrainedModel) -> Flops:
    """What a model with its weights, or on the meta device, takes. ``planning.shape`` tells it without a model."""
    config = model.config
    routed = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    active = (config.num_experts_per_tok / routed) if routed else 1.0
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    forward = trained = 0.0
    for name, parameter in model.named_parameters():
        if parameter is embedding and parameter is not head:
            continue  # looked up, not multiplied
        flops = 2.0 * parameter.numel() * (active if ".experts." in name else 1.0)
        forward += flops
        trained += flops * parameter.requires_grad
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 2.0 * config.num_hidden_layers * config.num_attention_heads * head_dim
    return Flops(forward, trained, attention)
