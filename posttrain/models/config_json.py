"""A model's config.json, read without transformers: what contradicts itself is found before a library fails over it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.core.errors import ModelError

_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")


def read_config_file(file: Path) -> dict[str, Any]:
    """The content of a config.json. Raises ``ModelError`` where it cannot be read or contradicts itself."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}", hint="is it a model's config.json?") from error
    if not isinstance(found, dict):
        raise ModelError(f"{file} is no JSON object", hint="is it a model's config.json?")
    text = found.get("text_config")
    for problem in _problems(text if isinstance(text, Mapping) else found):
        raise ModelError(f"{file}: {problem}", hint="take the config.json that came with the weights")
    return found


def _problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what no model can be made of. Missing keys, and values of another kind, are the library's to judge."""
    sizes = {key: config[key] for key in _SIZES if _is_int(config.get(key))}
    yield from (f"{key} is {size}" for key, size in sizes.items() if size < 1)
    types, layers = config.get("layer_types"), sizes.get("num_hidden_layers")
    if isinstance(types, list) and layers is not None and len(types) != layers:
        yield f"layer_types names {len(types)} layers, and num_hidden_layers is {layers}"
    hidden, heads = sizes.get("hidden_size"), sizes.get("num_attention_heads")
    groups = sizes.get("num_key_value_heads")
    if heads and groups and heads % groups:
        yield f"num_attention_heads = {heads} is no multiple of num_key_value_heads = {groups}"
    if heads and hidden and hidden % heads and not any("head_dim" in key for key in config):
        yield f"hidden_size = {hidden} is no multiple of num_attention_heads = {heads}"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
