"""How much arithmetic a step takes, and how much a device can do: what MFU is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from posttrain.core.flops import Flops, TowerFlops
from posttrain.core.machines import gpu_of_name
from posttrain.models import vision

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of the device by its datasheet; None where it is not known."""
    if device.type != "cuda":
        return None
    gpu = gpu_of_name(torch.cuda.get_device_name(device))
    return None if gpu is None else gpu.flops


def model_flops(model: PreTrainedModel) -> Flops:
    """What a model with its weights, or on the meta device, takes, without its vision tower. ``plan.shape`` tells it
    without a model."""
    config: Any = model.config.get_text_config()
    routed = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    active = (config.num_experts_per_tok / routed) if routed else 1.0
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    forward = trained = 0.0
    for name, parameter in model.named_parameters():
        if (parameter is embedding and parameter is not head) or name.startswith(vision.TOWER):
            continue  # looked up, not multiplied; or a patch goes through it, and no token
        flops = 2.0 * parameter.numel() * (active if ".experts." in name else 1.0)
        forward += flops
        trained += flops * parameter.requires_grad
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 2.0 * config.num_hidden_layers * config.num_attention_heads * head_dim
    return Flops(forward, trained, attention)


def tower_flops(model: PreTrainedModel) -> Callable[[Sequence[int]], float]:
    """What images of so many patches each take in the vision tower: forward, and backward where it is trained."""
    seeing = vision.tower(model)
    if not seeing:
        return lambda patches: 0.0
    passes = 3 if vision.is_trained(seeing) else 1
    config: Any = model.config
    merge = config.scale_factor if vision.in_tiles(config) else config.vision_config.spatial_merge_size
    one = tower_forward(seeing, config.vision_config, int(merge))
    return lambda patches: passes * one.forward(patches)


def tower_forward(seeing: Sequence[nn.Module], config: Any, merge: int) -> TowerFlops:
    """What a vision tower takes. ``plan.tower`` tells it without a model.

    Args:
        seeing: its parts, as ``models.vision.tower`` gives them.
        config: the model's ``vision_config``.
        merge: patches along each side of what becomes one token.
    """
    weights = 2.0 * sum(
        p.numel() / (merge**2 if "merger" in name or part is not seeing[0] else 1)
        for part in seeing
        for name, p in part.named_parameters()
        if p.ndim > 1 and "pos_embed" not in name and "position_embedding" not in name  # looked up, not multiplied
    )
    if len(seeing) > 1:  # pictures of one size, each by itself
        patches = (config.image_size // config.patch_size) ** 2
        return TowerFlops(weights, 0.0, 4.0 * config.hidden_size * config.num_hidden_layers, patches)
    whole = getattr(config, "fullatt_block_indexes", None)
    window = (getattr(config, "window_size", None) or 0) // config.patch_size
    layers = config.depth if whole is None else len(whole)
    each = 4.0 * config.hidden_size
    return TowerFlops(weights, each * layers, each * (config.depth - layers), window**2)


def sharing_cost(model: PreTrainedModel) -> float:
    """Return the share of a batch's tokens that must be saved before a prompt that sequences share pays.

    Sharing writes the keys and values of all tokens again, and adds their gradients up: 8 kv elements read or written a
    token and layer. A token that is saved saves the layer's elementwise work, which ``plan.speed`` counts: 9 i + 22 h +
    8 q + 4 kv elements. Its matrix products, which it saves too, are left out: what they are worth depends on the
    device, and so the estimate errs to the side of not sharing.
    """
    config: Any = model.config.get_text_config()
    h, heads = int(config.hidden_size), int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or h // heads)
    kv = head_dim * int(getattr(config, "num_key_value_heads", None) or heads)
    i = int(getattr(config, "intermediate_size", None) or 4 * h)
    if routed := getattr(config, "num_experts_per_tok", None):
        i = int(routed) * int(getattr(config, "moe_intermediate_size", None) or i)
    return 8.0 * kv / (9 * i + 22 * h + 8 * head_dim * heads + 4 * kv)
