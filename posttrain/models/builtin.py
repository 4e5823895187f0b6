"""Built-in models, made on demand, with a tokenizer that ships here: ``builtin:tiny``, a Qwen2 model of under a million
parameters; ``builtin:tiny-vision``, a Qwen2.5-VL model whose language model is as large, with tokens for images; and
``builtin:tiny-moe``, a Qwen3-MoE of a million parameters, of which a token uses less than half.

Their tokenizer is made by ``scripts/make_tiny_tokenizer.py``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from posttrain.core.errors import ModelError
from posttrain.core.registry import unknown

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

PREFIX = "builtin:"


@dataclass(frozen=True)
class BuiltinTower:
    """Sizes of a vision tower, and of the images that it reads."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    patch: int
    """Pixels along each side of a patch; two by two patches become a token."""
    window: int
    """Pixels along each side of what all layers but the last see at once."""
    rotary_sections: tuple[int, int, int]
    """Pairs of a head's dimensions that turn with time, height and width."""
    pixels: tuple[int, int]
    """Fewest and most pixels of an image; others are brought to them."""


@dataclass(frozen=True)
class BuiltinModel:
    """Sizes of one built-in model, and the folder of its tokenizer."""

    tokenizer: Path
    hidden: int
    intermediate: int
    """Width of the MLP, or of one expert"""
    layers: int
    heads: int
    kv_heads: int
    max_length: int
    experts: int = 0
    """Experts of a layer; 0: one MLP"""
    experts_per_token: int = 0
    tower: BuiltinTower | None = None
    """None: it reads text alone."""


_TINY = Path(__file__).parent / "tiny"
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Tokens that a model that sees has beside those of its tokenizer's file: around an image, for it, and for a video."""
BUILTIN: dict[str, BuiltinModel] = {
    "tiny": BuiltinModel(
        tokenizer=_TINY,
        hidden=128,
        intermediate=384,
        layers=2,
        heads=4,
        kv_heads=2,
        max_length=4096,
    ),
    "tiny-moe": BuiltinModel(
        tokenizer=_TINY,
        hidden=128,
        intermediate=128,
        layers=2,
        heads=4,
        kv_heads=2,
        max_length=4096,
        experts=8,
        experts_per_token=2,
    ),
    "tiny-vision": BuiltinModel(
        tokenizer=_TINY,
        hidden=128,
        intermediate=384,
        layers=2,
        heads=4,
        kv_heads=2,
        max_length=4096,
        tower=BuiltinTower(
            hidden=96,
            intermediate=192,
            layers=2,
            heads=4,
            patch=8,
            window=32,
            rotary_sections=(4, 6, 6),
            pixels=(32 * 32, 64 * 64),
        ),
    ),
}


def builtin_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer, with its chat template. ``name`` with or without ``builtin:``. Raises ``ModelError``."""
    from transformers import AddedToken, AutoTokenizer

    model = _model(name)
    tokenizer = cast("PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(str(model.tokenizer)))
    if model.tower is not None:
        added = [AddedToken(token, special=True, normalized=False) for token in VISION_TOKENS]
        tokenizer.add_tokens(added, special_tokens=True)
        tokenizer.chat_template = (model.tokenizer / "vision_chat_template.jinja").read_text(encoding="utf-8")
    return tokenizer


def builtin_sizes(name: str) -> dict[str, Any]:
    """The sizes in its config. The vocabulary is the tokenizer's, padded to a multiple of 64. Raises ``ModelError``."""
    model = _model(name)
    known = _vocabulary(model.tokenizer)
    tokens = known + (0 if model.tower is None else len(VISION_TOKENS))
    sizes: dict[str, Any] = {
        "vocab_size": -(-tokens // 64) * 64,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "max_position_embeddings": model.max_length,
        "tie_word_embeddings": True,
    }
    if model.experts:
        sizes |= {
            "head_dim": model.hidden // model.heads,
            "moe_intermediate_size": model.intermediate,
            "num_local_experts": model.experts,
            "num_experts_per_tok": model.experts_per_token,
            "norm_topk_prob": True,
        }
    if model.tower is None:
        return {"model_type": "qwen3_moe" if model.experts else "qwen2", **sizes}
    rotary = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(model.tower.rotary_sections)}
    start, end, image, video = (known + n for n in range(len(VISION_TOKENS)))
    return {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": {"model_type": "qwen2_5_vl_text", **sizes, "rope_parameters": rotary},
        "vision_config": _tower_sizes(model.tower, model.hidden),
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "image_token_id": image,
        "video_token_id": video,
        "tie_word_embeddings": True,
    }


def _tower_sizes(tower: BuiltinTower, out: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2_5_vl_vision",
        "depth": tower.layers,
        "hidden_size": tower.hidden,
        "intermediate_size": tower.intermediate,
        "num_heads": tower.heads,
        "patch_size": tower.patch,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": tower.window,
        "fullatt_block_indexes": [tower.layers - 1],
        "out_hidden_size": out,
    }


def builtin_processor(name: str) -> dict[str, Any]:
    """How it reads images, as a ``preprocessor_config.json`` says it. Raises ``ModelError``."""
    tower = _model(name).tower
    if tower is None:
        raise ModelError(f"{name} reads no images", hint="builtin:tiny-vision does")
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": tower.pixels[0], "longest_edge": tower.pixels[1]},
        "patch_size": tower.patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def _vocabulary(folder: Path) -> int:
    """Tokens of a tokenizer, from its file."""
    stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    return len({*stored["model"]["vocab"], *(token["content"] for token in stored["added_tokens"])})


def builtin_config(name: str) -> PreTrainedConfig:
    """The configuration. Raises ``ModelError``."""
    from transformers import AutoConfig

    tokenizer, sizes = builtin_tokenizer(name), builtin_sizes(name)
    own = {
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    language = sizes.get("text_config", sizes)
    language |= own
    return AutoConfig.for_model(**sizes)


def create_builtin(name: str, seed: int) -> PreTrainedModel:
    """A freshly initialised model in float32 on CPU, the same for the same seed. The global RNG is left untouched."""
    import torch

    from posttrain.models.load import auto_class

    config = builtin_config(name)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model: PreTrainedModel = auto_class(config).from_config(config)
        return cast("PreTrainedModel", model.float())


def check_builtin(name: str) -> None:
    """Raise ``ModelError`` where there is no such model. ``name`` with or without ``builtin:``."""
    _model(name)


def _model(name: str) -> BuiltinModel:
    short = name.removeprefix(PREFIX)
    if short not in BUILTIN:
        raise ModelError(
            f"unknown built-in model {name!r}", hint=unknown(PREFIX + short, [PREFIX + known for known in BUILTIN])
        )
    return BUILTIN[short]
