"""Vision-language models: their parts, and hidden states of packed tokens among which there are images.

Their vision tower turns patches into features, which take the places of image tokens among the embeddings. Images of a
micro-batch go through it side by side, as sequences do through the language model, and none sees another.

Shape legend: S tokens, n of them of images, P patches, F features of all images, D hidden size, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from posttrain.models import tower_attention

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from posttrain.models.attention import Ragged


@dataclass(frozen=True)
class Parts:
    """Where the base models of a family have their parts in transformers."""

    tower: tuple[str, ...]
    """What images go through, in this order"""
    language: str
    tiles: bool
    """The tower takes square pictures of one size, and not patches."""


_QWEN = Parts(("visual",), "language_model", tiles=False)
_IDEFICS = Parts(("vision_model", "connector"), "text_model", tiles=True)
FAMILIES: dict[str, Parts] = {
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "smolvlm": _IDEFICS,
    "idefics3": _IDEFICS,
}
"""Types of models whose images are read."""
TOWER = ("model.visual.", "model.vision_model.", "model.connector.")
"""Where the names of the tower's parameters begin, in any family."""


def sees(config: PreTrainedConfig) -> bool:
    """Return true for the config of a model whose images are read."""
    return config.model_type in FAMILIES


def in_tiles(config: PreTrainedConfig) -> bool:
    """Return true for the config of a model that sees, and reads images in square tiles."""
    return FAMILIES[str(config.model_type)].tiles


def tower(model: PreTrainedModel) -> tuple[nn.Module, ...]:
    """Return the vision tower, and what projects its features into the language model where that is a part of its own;
    none: the model has no tower that is known here."""
    names = FAMILIES[str(model.config.model_type)].tower if sees(model.config) else ()
    return tuple(model.base_model.get_submodule(name) for name in names)


def language_model(model: PreTrainedModel) -> nn.Module:
    """Return the part that embeddings go through: without a tower the whole base model."""
    if not sees(model.config):
        return model.base_model
    return model.base_model.get_submodule(FAMILIES[str(model.config.model_type)].language)


def attention_of(config: PreTrainedConfig, language: str, *, built: bool = True) -> str | dict[str, str]:
    """Return what transformers is to be told so that the language model computes attention with ``language``, and the
    tower with ``tower_attention``, or tile by tile as it does by itself.

    Args:
        built: there is a model. While it makes one, transformers would look for a package of FlashAttention.
    """
    if not sees(config):
        return language
    of_tower = tower_attention.NAME if built and not in_tiles(config) else "sdpa"
    return {"": language, "text_config": language, "vision_config": of_tower}


@dataclass(frozen=True)
class ImageInput:
    """The images of a micro-batch, on the model's device."""

    pixels: Tensor
    """[P, C * side * side] uint8"""
    grids: Tensor
    """[I, 3] int64 patches of each image: of how many pictures, and in height and width of each"""
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


@dataclass(frozen=True)
class Features:
    """What a tower makes of images."""

    last: Tensor
    """[F, D] what takes the places of image tokens"""
    deeper: tuple[Tensor, ...] = ()
    """[F, D] each: what Qwen3-VL adds to the hidden states after its first layers (DeepStack, arXiv:2406.04334)"""

    def select(self, rows: Tensor) -> Features:
        """Return some of them."""
        return Features(self.last[rows], tuple(each[rows] for each in self.deeper))


def patches(pixels: Tensor, table: Tensor, frames: int) -> Tensor:
    """Return [P, C * frames * side * side] float32, as the processor of transformers would.

    Args:
        pixels, table, frames: as in ``ImageInput``.
    """
    count, channels = len(pixels), len(table)
    values = pixels.view(count, channels, -1).int()
    read = torch.stack([table[c][values[:, c]] for c in range(channels)], dim=1)
    return read[:, :, None].expand(-1, -1, frames, -1).reshape(count, -1)


def features_of(model: PreTrainedModel, patches: Tensor, grids: Tensor) -> Features:
    """Return the features of images, with gradient where the tower is trained."""
    with nullcontext() if is_trained(tower(model)) else torch.no_grad():
        if in_tiles(model.config):
            return Features(_features_of_tiles(model, patches))
        [seeing] = tower(model)
        seen = seeing(patches, grid_thw=grids)
    return Features(seen.pooler_output, tuple(getattr(seen, "deepstack_features", None) or ()))


def _features_of_tiles(model: PreTrainedModel, patches: Tensor) -> Tensor:
    """Return [F, D] the features of tiles, of each its patches row by row."""
    seeing, connector = tower(model)
    config = cast(Any, model.config).vision_config
    side, patch = config.image_size // config.patch_size, config.patch_size
    cut = patches.view(-1, side, side, config.num_channels, patch, patch)
    pictures = cut.permute(0, 3, 1, 4, 2, 5).flatten(2, 3).flatten(3, 4)
    seen = seeing(pixel_values=pictures.to(next(seeing.parameters()).dtype)).last_hidden_state
    projected: Tensor = connector(seen)
    return projected.flatten(0, 1)


def is_trained(parts: Sequence[nn.Module]) -> bool:
    """Return true if any of their parameters is."""
    return any(parameter.requires_grad for part in parts for parameter in part.parameters())


def last_hidden(
    model: PreTrainedModel, input_ids: Tensor, positions: Tensor, ragged: Ragged, images: ImageInput | None
) -> Tensor:
    """Return [S, D] hidden states after the last layer.

    Args:
        input_ids: [S].
        positions: [S], or [S, 3] in time, height and width.
    """
    if images is None:
        base = cast(Any, model.base_model)
        hidden: Tensor = base(
            input_ids=input_ids[None], position_ids=_in_a_row(positions), use_cache=False, ragged=ragged
        ).last_hidden_state[0]
        return hidden
    found = features_of(model, patches(images.pixels, images.table, images.frames), images.grids)
    more = {"use_cache": False, "ragged": ragged}
    chosen = found.select(images.features)
    # So that a trained tower has gradients on every worker, be they zeros: they are summed over all of them.
    left_over = (found.last, *found.deeper) if images.left_over and found.last.requires_grad else ()
    return hidden_with_features(model, input_ids, positions, [images.places], [chosen], more, left_over)


def _in_a_row(positions: Tensor) -> Tensor:
    """Return positions, [S] or [S, 3], as models of transformers take them: [1, S] or [3, 1, S]."""
    return positions[None] if positions.ndim == 1 else positions.T[:, None]


def hidden_with_features(
    model: PreTrainedModel,
    input_ids: Tensor,
    positions: Tensor,
    places: Sequence[Tensor],
    features: Sequence[Features],
    more: dict[str, Any],
    left_over: Sequence[Tensor] = (),
) -> Tensor:
    """Return [S, D] hidden states after the last layer of the language model.

    Args:
        input_ids: [S].
        positions: [S], or [S, 3] in time, height and width.
        places: which of the S tokens are of images, for each of ``features``.
        more: further arguments of the language model.
        left_over: features to which gradients of zero go.
    """
    embeddings: Tensor = model.get_input_embeddings()(input_ids)
    where = torch.cat([*places, torch.empty(0, dtype=torch.int64, device=input_ids.device)])
    if len(where):
        embeddings = embeddings.index_copy(0, where, torch.cat([f.last for f in features]).to(embeddings.dtype))
    for each in left_over:
        embeddings = embeddings + (each[:1] * 0).sum().to(embeddings.dtype)
    if len(where) and features[0].deeper:
        order = where.argsort()
        marked = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        marked[where] = True
        deeper = [torch.cat(level)[order] for level in zip(*(f.deeper for f in features), strict=True)]
        more = {**more, "visual_pos_masks": marked[None], "deepstack_visual_embeds": deeper}
    found = cast(Any, language_model(model))(inputs_embeds=embeddings[None], position_ids=_in_a_row(positions), **more)
    hidden: Tensor = found.last_hidden_state[0]
    return hidden
