"""Vision-language models: their parts, and hidden states of packed tokens among which there are images.

Their vision tower turns patches into features, which take the places of image tokens among the embeddings. Images of a
micro-batch go through it side by side, as sequences do through the language model, and none sees another.

Shape legend: S packed tokens, n of them of images, P patches, F features of all images, D hidden size, C channels.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from posttrain.models.attention import Ragged

FAMILIES = frozenset({"qwen2_5_vl", "qwen3_vl"})
"""Types of models whose images are read. They have the same parts under the same names in transformers."""
TOWER = "model.visual."
"""Where the names of the tower's parameters begin."""
_TOWER_ATTENTION = "sdpa"
"""What transformers computes the tower's attention with, window by window."""


def sees(config: PreTrainedConfig) -> bool:
    """Return true for the config of a model whose images are read."""
    return config.model_type in FAMILIES


def tower(model: PreTrainedModel) -> nn.Module | None:
    """Return the vision tower, with what projects its features into the language model; None: the model has none that
    is known here."""
    return cast(nn.Module, cast(Any, model.base_model).visual) if sees(model.config) else None


def language_model(model: PreTrainedModel) -> nn.Module:
    """Return the part that embeddings go through: without a tower the whole base model."""
    return cast(nn.Module, cast(Any, model.base_model).language_model) if sees(model.config) else model.base_model


def attention_of(config: PreTrainedConfig, language: str) -> str | dict[str, str]:
    """Return what transformers is to be told so that the language model computes attention with ``language``, and the
    tower as it does by itself."""
    if not sees(config):
        return language
    return {"": language, "text_config": language, "vision_config": _TOWER_ATTENTION}


@dataclass(frozen=True)
class ImageInput:
    """The images of a micro-batch, on the model's device."""

    pixels: Tensor
    """[P, C * side * side] uint8"""
    grids: Tensor
    """[I, 3] int64"""
    places: Tensor
    """[n] which of the S tokens are of images"""
    features: Tensor
    """[n] which features take their places; some may be left over, of a blank image or where other workers have the
    rest of a sequence"""
    left_over: bool
    """Some features take no place."""
    table: Tensor
    """[C, 256] float32 what the model reads for each value of each channel"""
    frames: int
    """Times that an image is repeated in a patch."""

    def patches(self) -> Tensor:
        """Return [P, C * frames * side * side] float32, as the processor of transformers would."""
        count, channels = len(self.pixels), len(self.table)
        values = self.pixels.view(count, channels, -1).int()
        read = torch.stack([self.table[c][values[:, c]] for c in range(channels)], dim=1)
        return read[:, :, None].expand(-1, -1, self.frames, -1).reshape(count, -1)


def last_hidden(
    model: PreTrainedModel, input_ids: Tensor, positions: Tensor, ragged: Ragged, images: ImageInput | None
) -> Tensor:
    """Return [S, D] hidden states after the last layer.

    Args:
        input_ids: [S].
        positions: [S], or [S, 3] in time, height and width.
    """
    base = cast(Any, model.base_model)
    position_ids = positions[None] if positions.ndim == 1 else positions.T[:, None]
    if images is None:
        found = base(input_ids=input_ids[None], position_ids=position_ids, use_cache=False, ragged=ragged)
    else:
        embeddings, more = _with_features(model, input_ids, images)
        found = base.language_model(
            inputs_embeds=embeddings[None], position_ids=position_ids, use_cache=False, ragged=ragged, **more
        )
    hidden: Tensor = found.last_hidden_state[0]
    return hidden


def _with_features(model: PreTrainedModel, input_ids: Tensor, images: ImageInput) -> tuple[Tensor, dict[str, Any]]:
    """Return the embeddings [S, D], and what else the language model is told of the images: features that Qwen3-VL
    adds to the hidden states of its first layers (DeepStack, arXiv:2406.04334)."""
    seeing = tower(model)
    assert seeing is not None
    trained = any(parameter.requires_grad for parameter in seeing.parameters())
    with nullcontext() if trained else torch.no_grad():
        seen = seeing(images.patches(), grid_thw=images.grids)
        features, deeper = seen.pooler_output, list(getattr(seen, "deepstack_features", None) or ())
    embeddings: Tensor = model.get_input_embeddings()(input_ids)
    embeddings = embeddings.index_copy(0, images.places, features[images.features].to(embeddings.dtype))
    if trained and images.left_over:
        # So that the tower has gradients on every worker, be they zeros: they are summed over all of them.
        for each in (features, *deeper):
            embeddings = embeddings + (each[:1] * 0).sum().to(embeddings.dtype)
    if not deeper or len(images.places) == 0:
        return embeddings, {}
    where = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
    where[images.places] = True
    chosen = [each[images.features] for each in deeper]
    return embeddings, {"visual_pos_masks": where[None], "deepstack_visual_embeds": chosen}
