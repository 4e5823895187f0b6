"""How a model reads images, from the files that came with it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.errors import ModelError
from posttrain.models.load import ModelSource, load_config, load_tokenizer, loading

if TYPE_CHECKING:
    from posttrain.data.vision import VisionProcessor

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Where a model says how it reads images: in newer releases in the second, beside other things."""


def load_vision(source: ModelSource) -> VisionProcessor | None:
    """What the model makes of images; None: it reads text alone.

    Raises:
        ModelError: it sees, and has no file that says how, or one that cannot be read.
    """
    from posttrain.models import vision

    config: Any = load_config(source)
    if not vision.sees(config):
        return None
    return _tiles(source, config) if vision.in_tiles(config) else _grids(source, config)


def _grids(source: ModelSource, config: Any) -> VisionProcessor:
    """Return what reads images as Qwen2.5-VL does."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from posttrain.data.vision_grids import GridProcessor

    with loading(source, "the image processor"):
        settings = processor_settings(source)
        # Given as pixels, the class would write them into the sizes that all of its objects share.
        size = {**Qwen2VLImageProcessorPil.size, **(settings.get("size") or {})}
        for edge, name in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
            size[edge] = settings.pop(name, None) or size.pop(name, None) or size[edge]
        processor: Any = Qwen2VLImageProcessorPil.from_dict({**settings, "size": size})
    tower = config.vision_config
    for name, ours, theirs in (
        ("patch_size", processor.patch_size, tower.patch_size),
        ("merge_size", processor.merge_size, tower.spatial_merge_size),
        ("temporal_patch_size", processor.temporal_patch_size, tower.temporal_patch_size),
    ):
        if ours != theirs:
            raise ModelError(
                f"{source.path}: images are cut with {name} = {ours}, and the config makes it {theirs}",
                hint=f"take the {PROCESSOR_FILES[0]} that came with the weights",
            )
    return GridProcessor(processor, image_id=int(config.image_token_id), video_id=config.video_token_id)


def _tiles(source: ModelSource, config: Any) -> VisionProcessor:
    """Return what reads images as SmolVLM does."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    from posttrain.data.vision_tiles import TileProcessor

    kind = SmolVLMImageProcessorPil if config.model_type == "smolvlm" else Idefics3ImageProcessorPil
    with loading(source, "the image processor"):
        processor: Any = kind.from_dict(processor_settings(source))
    tower, tokenizer = config.vision_config, load_tokenizer(source)
    image_id = int(config.image_token_id)
    for what, ours, theirs in (
        ("images are cut into tiles with max_image_size", processor.max_image_size["longest_edge"], tower.image_size),
        ("the tokenizer's <image> has the id", tokenizer.convert_tokens_to_ids("<image>"), image_id),
    ):
        if ours != theirs:
            raise ModelError(
                f"{source.path}: {what} = {ours}, and the config makes it {theirs}",
                hint=f"take the {PROCESSOR_FILES[0]} and the tokenizer that came with the weights",
            )
    video_id = tokenizer.get_vocab().get("<video>")
    sizes = {"patch_size": int(tower.patch_size), "merge": int(config.scale_factor)}
    return TileProcessor(processor, tokenizer, image_id=image_id, video_id=video_id, **sizes)


def processor_settings(source: ModelSource) -> dict[str, Any]:
    """What the model's files say of its image processor. Raises ``ModelError``."""
    if source.builtin:
        from posttrain.models.builtin import builtin_processor

        return builtin_processor(source.builtin)
    for file in processor_files(source):
        settings = json.loads(file.read_text(encoding="utf-8"))
        found = settings.get("image_processor") if file.name == PROCESSOR_FILES[1] else settings
        if isinstance(found, dict):
            return found
    raise ModelError(
        f"{source.path} has no {PROCESSOR_FILES[0]}, which says how the model reads images",
        hint="copy it there from where the weights come from",
    )


def processor_files(source: ModelSource) -> list[Path]:
    """The files in which a model says how it reads images and videos, those of them that it has."""
    names = (*PROCESSOR_FILES, "video_preprocessor_config.json")
    if Path(source.path).is_dir():
        return [file for name in names if (file := Path(source.path) / name).is_file()]
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    found = []
    for name in names:
        with suppress(EntryNotFoundError, LocalEntryNotFoundError):
            found.append(Path(hf_hub_download(source.path, name)))
    return found
