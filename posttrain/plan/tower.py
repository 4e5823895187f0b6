"""The sizes of a vision tower, from a config.json alone, and what images take in it.

Shape legend: h hidden size, i width of the MLP, b bytes of an element of the compute type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.config import LoraConfig
from posttrain.core.flops import TowerFlops
from posttrain.plan.matrix import Matrix

_CHANNELS = 3


@dataclass(frozen=True)
class Family:
    """What towers of a family have in common: names are those of linear layers."""

    kinds: tuple[str, ...]
    """Values of `model_type`"""
    attention: tuple[str, ...]
    """What makes queries, keys and values, in one product or in three, and what their result goes through"""
    mlp: tuple[str, ...]
    """Three: with a gate, and norms are root mean squares; else nothing is without a bias"""
    merging: tuple[str, ...]
    """What a token of an image goes through, and no patch. One: it has no bias"""
    tiles: bool = False
    """Images are cut into squares of one size, each of which attention is over. Else they keep their proportions,
    and queries and keys are rotated."""
    keys: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Keys of its `vision_config` where they are not those of ``tower_of``"""
    left_out: Mapping[str, int | Sequence[int]] = field(default_factory=dict, hash=False)
    """What transformers takes, or there is, where a config says nothing"""


FAMILIES = (
    Family(
        ("qwen2_5_vl_vision", "qwen2_5_vl"),
        attention=("qkv", "proj"),
        mlp=("gate_proj", "up_proj", "down_proj"),
        merging=("0", "2"),
        left_out={
            "fullatt_block_indexes": (7, 15, 23, 31), "window_size": 112, "num_position_embeddings": 0,
            "deepstack_visual_indexes": (),
        },
    ),
    Family(
        ("qwen3_vl_vision", "qwen3_vl"),
        attention=("qkv", "proj"),
        mlp=("linear_fc1", "linear_fc2"),
        merging=("linear_fc1", "linear_fc2"),
        left_out={"window_size": 0},
    ),
    Family(
        ("smolvlm_vision", "smolvlm", "idefics3_vision", "idefics3"),
        attention=("q_proj", "k_proj", "v_proj", "out_proj"),
        mlp=("fc1", "fc2"),
        merging=("proj",),
        tiles=True,
        keys={"depth": "num_hidden_layers", "num_heads": "num_attention_heads"},
        left_out={
            "hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16,
            "image_size": 224, "patch_size": 32, "temporal_patch_size": 1, "fullatt_block_indexes": (),
            "deepstack_visual_indexes": (),
        },
    ),
)  # fmt: skip
"""Families whose towers are counted exactly, and tested to be."""
_SCALE_FACTOR = 2
"""Patches along each side of a token where a config with tiles says nothing."""


@dataclass(frozen=True)
class TowerShape:
    """Sizes of a vision tower, with what projects its features into the language model."""

    family: Family
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
    whole_layers: int
    """Layers whose attention is over a whole image; that of the others is within windows"""
    window: int
    """Patches along each side of a window, or of a tile"""
    mergers: int
    """How often features go into the language model: after the last layer, and for each of DeepStack's levels"""
    positions: int
    """Learned positions"""
    tile: int = 0
    """Pixels along each side of a tile; 0: images are not cut"""

    @property
    def gated(self) -> bool:
        """Return whether its MLP has a gate, and its norms no bias."""
        return len(self.family.mlp) == 3

    @property
    def values(self) -> int:
        """Return the numbers that a patch has as the model reads it."""
        return _CHANNELS * self.frames * self.patch**2

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Linear layers of a block."""
        h, i = self.hidden, self.intermediate
        *seen, result = self.family.attention
        *first, last = self.family.mlp
        return (
            *(Matrix(name, h, 3 * h // len(seen), True) for name in seen),
            Matrix(result, h, h, True),
            *(Matrix(name, h, i, True) for name in first),
            Matrix(last, i, h, True),
        )

    @property
    def merging(self) -> tuple[Matrix, ...]:
        """Linear layers that a token of an image goes through, and no patch."""
        wide = self.hidden * self.merge**2
        *first, last = self.family.merging
        return (
            *(Matrix(name, wide, wide, True, self.mergers) for name in first),
            Matrix(last, wide, self.out, bool(first), self.mergers),
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
        """Bytes of the most that a block holds without a backward pass: its input, the normalised, and either the sum
        between attention and MLP with what the MLP makes; or queries, keys and values with their result and its
        product; or, where queries and keys are rotated, in their place these in float32, rotated queries, and three
        terms of rotated keys."""
        h, i = self.hidden, self.intermediate
        attention = b * 5 * h if self.family.tiles else b * 3 * h + 4 * 6 * h
        return b * 2 * h + max(attention, b * (h + len(self.family.mlp) * i))

    def of_block(self, b: int, checkpointing: str, *, compiled: bool) -> float:
        """Bytes that one block saves for the backward pass. Blocks that are checkpointed are not compiled."""
        h, i = self.hidden, self.intermediate
        if checkpointing == "full":
            return b * h
        if checkpointing == "selective":  # the input, results of matrix products and of attention
            return b * (h + 3 * h + h + h + i * (2 if self.gated else 1) + h) + 4 * self.heads
        # Norms keep input and result, a root mean square also the normalised in float32. Attention keeps queries, keys,
        # values, its result, and a float32 for each head. A gated MLP that is compiled computes one of its four again.
        gated, fused = self.gated, self.gated and compiled
        norms = 2 * ((4 * h if gated and not fused else 0) + 2 * b * h + (4 if gated else 2 * b))
        return norms + b * 4 * h + 4 * self.heads + b * (2 + 2 * gated - fused) * i

    def in_flight(self, b: int, checkpointing: str) -> float:
        """Bytes of the most that the backward pass of one block holds beside what was saved."""
        gradients = b * ((3 if self.gated else 1) * self.intermediate + 2 * self.hidden)
        if checkpointing == "none":
            return gradients
        again = self.of_block(b, "none", compiled=False)
        return gradients + again - min(self.of_block(b, checkpointing, compiled=False), again)


def tower_of(config: Mapping[str, Any], out: int) -> TowerShape | None:
    """Return the tower that a config.json's ``vision_config`` describes; None: one of a kind that is not known here.

    Args:
        out: hidden size of the language model.

    Raises:
        KeyError, TypeError, ValueError: it lacks a size.
    """
    given: Mapping[str, Any] = config["vision_config"]
    kind = str(given.get("model_type") or config.get("model_type") or "")
    family = next((family for family in FAMILIES if kind in family.kinds), None)
    if family is None:
        return None
    c = {**family.left_out, **given}

    def size(key: str) -> int:
        return int(c[family.keys.get(key, key)])

    layers, patch = size("depth"), size("patch_size")
    tile = size("image_size") if family.tiles else 0
    return TowerShape(
        family=family,
        hidden=size("hidden_size"),
        layers=layers,
        heads=size("num_heads"),
        intermediate=size("intermediate_size"),
        patch=patch,
        merge=int(config.get("scale_factor", _SCALE_FACTOR)) if family.tiles else size("spatial_merge_size"),
        frames=size("temporal_patch_size"),
        out=out,
        whole_layers=len(c.get("fullatt_block_indexes", range(layers))),
        window=(tile or size("window_size")) // patch,
        mergers=1 + len(c["deepstack_visual_indexes"]),
        positions=(tile // patch) ** 2 if family.tiles else size("num_position_embeddings"),
        tile=tile,
    )
