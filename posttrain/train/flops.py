"""How much arithmetic a step takes, and how much a device can do: what MFU is made of.

Shape legend: T tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PEAK = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "B200": 2250e12,
    "B300": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "A10": 125e12,
}
"""Dense bf16 FLOP/s by NVIDIA's datasheets, by a part of the device's name; the first that fits counts."""


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of the device by its datasheet; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK.items() if part in name), None)


class ModelFlops:
    """Model FLOPs of a causal LM as PaLM counts them (arXiv:2204.02311, appendix B), attention as causal: half.

    A weight costs 2 FLOPs a token forward, 2 for the gradient of its input and 2 for its own, where it is trained.
    Recomputed activations do not count, and of experts those do that a token goes through.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        routed = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
        active = (config.num_experts_per_tok / routed) if routed else 1.0
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        self._forward = self._trained = 0.0
        for name, parameter in model.named_parameters():
            if parameter is embedding and parameter is not head:
                continue  # looked up, not multiplied
            flops = 2.0 * parameter.numel() * (active if ".experts." in name else 1.0)
            self._forward += flops
            self._trained += flops * parameter.requires_grad
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._attention: float = 2.0 * config.num_hidden_layers * config.num_attention_heads * head_dim

    def training(self, lengths: Sequence[int]) -> float:
        """FLOPs of a forward and a backward pass over sequences of these lengths."""
        return (2 * self._forward + self._trained) * sum(lengths) + 3 * self._attention * _squares(lengths)

    def inference(self, lengths: Sequence[int]) -> float:
        """FLOPs of a forward pass."""
        return self._forward * sum(lengths) + self._attention * _squares(lengths)


def _squares(lengths: Sequence[int]) -> int:
    return sum(n * n for n in lengths)
