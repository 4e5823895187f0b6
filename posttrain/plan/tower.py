"""The sizes of a vision tower, from a config.json alone, and what images take in it.

Shape legend: h hidden size, i width of the MLP, b bytes of an element of the compute type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.config import LoraConfig
from posttrain.core.flops import TowerFlops
from posttrain.plan.matrix import Matrix

_CHANNELS = 3
_QWEN2_5, _QWEN3 = ("qwen2_5_vl_vision", "qwen2_5_vl"), ("qwen3_vl_vision", "qwen3_vl")
TOWERS = (*_QWEN2_5, *_QWEN3)
"""Kinds of towers that are counted exactly, and tested to be."""
_QWEN2_5_WHOLE, _QWEN2_5_WINDOW = (7, 15, 23, 31), 112
"""What transformers takes where a config of Qwen2.5-VL says nothing of windows."""


@dataclass(frozen=True)
class TowerShape:
    """Sizes of a vision tower, with what projects its features into the language model."""

    kind: str
    hidden: int
    layers: int
    heads: int
    intermediate: int
    patch: int
    """Pixels along each side of a patch"""
    merge: int
    """Patches along each side of what becomes one token"""
    frames: int
    out: int
    gated: bool
    """Its MLP has a gate."""
    whole_layers: int
    """Layers whose attention is over a whole image; that of the others is within windows"""
    window: int
    """Patches along each side of a window"""
    mergers: int
    """How often features go into the language model: after the last layer, and for each of DeepStack's levels"""
    positions: int
    """Learned positions"""

    @property
    def values(self) -> int:
        """Return the numbers that a patch has as the model reads it."""
        return _CHANNELS * self.frames * self.patch**2

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Linear layers of a block."""
        h, i = self.hidden, self.intermediate
        mlp = (
            (Matrix("gate_proj", h, i, True), Matrix("up_proj", h, i, True), Matrix("down_proj", i, h, True))
            if self.gated
            else (Matrix("linear_fc1", h, i, True), Matrix("linear_fc2", i, h, True))
        )
        return (Matrix("qkv", h, 3 * h, True), Matrix("proj", h, h, True), *mlp)

    @property
    def merging(self) -> tuple[Matrix, ...]:
        """Linear layers that a token of an image goes through, and no patch."""
        wide = self.hidden * self.merge**2
        names = ("0", "2") if self.gated else ("linear_fc1", "linear_fc2")
        return (
            Matrix(names[0], wide, wide, True, self.mergers),
            Matrix(names[1], wide, self.out, True, self.mergers),
        )

    @property
    def block_parameters(self) -> int:
        norms = 2 * self.hidden * (1 if self.gated else 2)
        return norms + sum(m.parameters for m in self.matrices)

    @property
    def outside(self) -> int:
        """Return the parameters that belong to no block."""
        h, biased = self.hidden, not self.gated
        # DeepStack normalises what is merged already.
        norms = h if self.gated else 2 * h + (self.mergers - 1) * 2 * h * self.merge**2
        return self.values * h + h * biased + self.positions * h + norms + sum(m.parameters for m in self.merging)

    @property
    def parameters(self) -> int:
        return self.layers * self.block_parameters + self.outside

    def lora_parameters(self, lora: LoraConfig, names: set[str] | None) -> int:
        """Return the parameters of adapters beside the linear layers of these ``names``; None: all."""
        rank = lora.rank or 0
        every = [(m, self.layers) for m in self.matrices] + [(m, 1) for m in self.merging]
        return sum(
            times * m.count * rank * (m.inputs + m.outputs) for m, times in every if names is None or m.name in names
        )

    def flops(self) -> TowerFlops:
        """As ``train.flops.tower_forward`` counts them of the model itself."""
        blocks = self.layers * sum(m.inputs * m.outputs for m in self.matrices)
        merging = sum(m.count * m.inputs * m.outputs for m in self.merging) / self.merge**2
        each = 4.0 * self.hidden
        return TowerFlops(
            2.0 * (self.values * self.hidden + blocks + merging),
            each * self.whole_layers,
            each * (self.layers - self.whole_layers),
            self.window**2,
        )

    # ------------------------------------------------------------------ bytes a patch

    def pixels(self) -> float:
        """Bytes of a patch: as it comes, as numbers to look up, and as they are read, once for each frame."""
        once = self.values / self.frames
        return once * (1 + 4 + 4) + 4.0 * self.values

    def features(self, b: int) -> float:
        """Bytes of what the language model is given, by patch."""
        return b * self.mergers * self.out / self.merge**2

    def forward_only(self, b: int) -> float:
        """Bytes of the most that a block holds without a backward pass: queries, keys and values, and the first two
        also rotated in float32; or what the MLP makes."""
        h, i = self.hidden, self.intermediate
        return b * 2 * h + max(b * 4 * h + 4 * 4 * h, b * 3 * i)

    def of_block(self, b: int, checkpointing: str) -> float:
        """Bytes that one block saves for the backward pass. Blocks are not compiled."""
        h, i = self.hidden, self.intermediate
        if checkpointing == "full":
            return b * h
        if checkpointing == "selective":  # the input, results of matrix products and of attention
            return b * (h + 3 * h + h + h + i * (2 if self.gated else 1)) + 4 * self.heads
        # Norms keep input and result, a root mean square also the normalised in float32. Attention keeps queries and
        # keys that are rotated, the product that values are a part of, its result, and a float32 for each head.
        norms = 2 * ((4 + 2 * b) * h + 4) if self.gated else 2 * (2 * b * h + 2 * b)
        return norms + b * 7 * h + 4 * self.heads + b * (4 if self.gated else 2) * i

    def in_flight(self, b: int, checkpointing: str) -> float:
        """Bytes of the most that the backward pass of one block holds beside what was saved."""
        gradients = b * ((3 if self.gated else 1) * self.intermediate + 2 * self.hidden)
        return gradients + self.of_block(b, "none") - min(self.of_block(b, checkpointing), self.of_block(b, "none"))


def tower_of(config: Mapping[str, Any]) -> TowerShape | None:
    """Return the tower that a config.json's ``vision_config`` describes; None: one of a kind that is not known here.

    Raises:
        KeyError, TypeError, ValueError: it lacks a size.
    """
    c: Mapping[str, Any] = config["vision_config"]
    kind = str(c.get("model_type") or config.get("model_type") or "")
    if kind not in TOWERS:
        return None
    gated, depth, patch = kind in _QWEN2_5, int(c["depth"]), int(c["patch_size"])
    whole = c.get("fullatt_block_indexes", _QWEN2_5_WHOLE) if gated else range(depth)
    return TowerShape(
        kind=kind,
        hidden=int(c["hidden_size"]),
        layers=depth,
        heads=int(c["num_heads"]),
        intermediate=int(c["intermediate_size"]),
        patch=patch,
        merge=int(c["spatial_merge_size"]),
        frames=int(c["temporal_patch_size"]),
        out=int(c["out_hidden_size"]),
        gated=gated,
        whole_layers=len(whole),
        window=int(c.get("window_size", _QWEN2_5_WINDOW)) // patch if gated else 0,
        mergers=1 if gated else 1 + len(c["deepstack_visual_indexes"]),
        positions=0 if gated else int(c["num_position_embeddings"]),
    )
