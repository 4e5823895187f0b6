"""Built-in models, made on demand, with a tokenizer that ships here: ``builtin:tiny``, a Qwen2 model of under a million
parameters, and ``builtin:tiny-moe``, a Qwen3-MoE of about a million, of which a token uses 0.4.

Their tokenizer is made by ``scripts/make_tiny_tokenizer.py``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from posttrain.core.errors import ModelError
from posttrain.core.registry import unknown

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

PREFIX = "builtin:"


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
    kind: Literal["qwen2", "qwen3_moe"] = "qwen2"
    experts: int = 0
    experts_per_token: int = 0


_TOKENIZER = Path(__file__).parent / "tiny"
BUILTIN: dict[str, BuiltinModel] = {
    "tiny": BuiltinModel(
        tokenizer=_TOKENIZER, hidden=128, intermediate=384, layers=2, heads=4, kv_heads=2, max_length=4096
    ),
    "tiny-moe": BuiltinModel(
        tokenizer=_TOKENIZER,
        hidden=128,
        intermediate=128,
        layers=2,
        heads=4,
        kv_heads=2,
        max_length=4096,
        kind="qwen3_moe",
        experts=8,
        experts_per_token=2,
    ),
}


def builtin_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer, with its chat template. ``name`` with or without ``builtin:``. Raises ``ModelError``."""
    from transformers import AutoTokenizer

    return cast("PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(str(_model(name).tokenizer)))


def builtin_sizes(name: str) -> dict[str, Any]:
    """The sizes in its config. The vocabulary is the tokenizer's, padded to a multiple of 64. Raises ``ModelError``."""
    model = _model(name)
    sizes: dict[str, Any] = {
        "model_type": model.kind,
        "vocab_size": -(-_vocabulary(model.tokenizer) // 64) * 64,
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
            "num_experts": model.experts,
            "num_experts_per_tok": model.experts_per_token,
            "norm_topk_prob": True,
        }
    return sizes


def _vocabulary(folder: Path) -> int:
    """Tokens of a tokenizer, from its file."""
    stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    return len({*stored["model"]["vocab"], *(token["content"] for token in stored["added_tokens"])})


def builtin_config(name: str) -> PreTrainedConfig:
    """The configuration. Raises ``ModelError``."""
    from transformers import AutoConfig

    tokenizer, sizes = builtin_tokenizer(name), builtin_sizes(name)
    return AutoConfig.for_model(
        **sizes,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def create_builtin(name: str, seed: int) -> PreTrainedModel:
    """A freshly initialised model in float32 on CPU, the same for the same seed. The global RNG is left untouched."""
    import torch
    from transformers import AutoModelForCausalLM

    config = builtin_config(name)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        return model.float()


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
