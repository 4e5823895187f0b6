"""A checkpoint's sharded weights as a plain Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from posttrain.core.defaults import MERGED_DTYPE, MERGED_SHARD_SIZE
from posttrain.core.errors import DataError
from posttrain.core.files import replacing
from posttrain.data.chat import end_of_turn
from posttrain.models.classifier import (
    build_classifier,
    classifier_config,
    is_classifier,
    is_critic_of_verl,
    names_in_shards,
)
from posttrain.models.load import ModelSource, build, load_config, load_generation_config, load_tokenizer
from posttrain.models.processors import load_vision, processor_files

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase


def save_text_side(source: ModelSource, folder: Path, *, reward_model: bool = False) -> None:
    """Write the config, the tokenizer with its chat template, and how images are read: all of a model but the weights.

    Args:
        source: what the weights were trained from.
        reward_model: they are now those of a model that scores.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (classifier_config(source) if reward_model else load_config(source)).save_pretrained(folder)
    tokenizer = load_tokenizer(source)
    if not reward_model and (generation := load_generation_config(source)) is not None:
        _save_generation_config(generation, tokenizer, folder)
    tokenizer.save_pretrained(folder)
    _save_processor(source, folder)


def _save_processor(source: ModelSource, folder: Path) -> None:
    """Write how the model reads images, if it does: its files as they are, or those of a built-in model."""
    vision = load_vision(source)
    if vision is None:
        return
    if source.builtin:
        vision.processor.save_pretrained(folder)
    for file in [] if source.builtin else processor_files(source):
        if file.parent != folder:
            shutil.copyfile(file, folder / file.name)


def save_whole(
    source: ModelSource, folder: Path, *, dtype: str = MERGED_DTYPE, max_shard_size: str = MERGED_SHARD_SIZE
) -> None:
    """Write a folder that ``AutoModelForCausalLM.from_pretrained`` loads, of a model that sees
    ``AutoModelForImageTextToText``, of a reward model ``AutoModelForSequenceClassification``: safetensors, config,
    tokenizer, and how images are read.

    Weights are read and written one after another: they take memory for the largest of them, or 256 MiB. Only models
    that files hold joined, as query, key and value in one, are in memory whole.

    Args:
        dtype: of the weights: float32, bfloat16 or float16.
        max_shard_size: of a file, as "5GB".
    """
    import torch
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.dynamic_module_utils import custom_object_save

    from posttrain.models import safetensors_writer
    from posttrain.models.weights import as_stored, stream

    folder.mkdir(parents=True, exist_ok=True)
    kind: torch.dtype = getattr(torch, dtype)
    config = load_config(source)
    scores = is_classifier(config) or is_critic_of_verl(config)
    model = (build_classifier if scores else build)(source, dtype=kind)
    model.set_attn_implementation("eager")  # ours is registered in our own processes only
    weights = stream(model, source, dtype=kind, renamed=names_in_shards(source) if scores else None)
    stored = [(name, tuple(tensor.shape)) for name, tensor in as_stored(model, model.named_parameters())]
    whole = {
        name: tuple(t.shape) for name, t in revert_weight_conversion(model, dict(model.named_parameters())).items()
    }
    pieces = as_stored(model, weights)
    if sorted(stored) != sorted(whole.items()):  # a file's tensor is made of several of the model's
        stored, pieces = list(whole.items()), revert_weight_conversion(model, dict(weights)).items()
    safetensors_writer.write(folder, dict(stored), pieces, kind, max_shard_size)
    model.config.architectures, model.config.dtype = [type(model).__name__], dtype
    if model.is_remote_code():
        custom_object_save(model, folder, config=cast(Any, model.config))
    model.config.save_pretrained(folder)
    tokenizer = load_tokenizer(source)
    if model.can_generate():
        _save_generation_config(load_generation_config(source) or model.generation_config, tokenizer, folder)
    tokenizer.save_pretrained(folder)
    _save_processor(source, folder)


def _save_generation_config(config: GenerationConfig, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write it, by no ``save_pretrained``, which refuses what some releases say. A base model's lacks the token with
    which the chat template ends turns: whoever samples from the trained model would not stop there."""
    declared = config.eos_token_id
    ends = declared if isinstance(declared, list) else [i for i in (declared,) if i is not None]
    if tokenizer.chat_template and (end := end_of_turn(tokenizer)) not in ends:
        config.eos_token_id = [*ends, end]
    config.to_json_file(folder / "generation_config.json")


Check = Callable[[Path], None]
"""Raises where a folder that was written is not what it should be."""


def export(
    source: ModelSource,
    out: Path,
    *,
    overwrite: bool,
    dtype: str = MERGED_DTYPE,
    max_shard_size: str = MERGED_SHARD_SIZE,
    check: Check | None = None,
) -> None:
    """``save_whole`` under a temporary name, checked, then renamed.

    Raises:
        DataError: ``out`` exists and ``overwrite`` is false, or ``out`` is neither empty nor a model's folder.
    """
    check_replaceable(out, overwrite, "a model", _holds_model)
    _replace(out, lambda folder: save_whole(source, folder, dtype=dtype, max_shard_size=max_shard_size), check)


def export_adapter(source: ModelSource, out: Path, *, overwrite: bool, check: Check | None = None) -> None:
    """Write the last adapter of ``source`` and the tokenizer into a folder that ``PeftModel.from_pretrained`` loads.

    Raises:
        DataError: ``out`` exists and ``overwrite`` is false, or ``out`` is neither empty nor an adapter's folder.
    """
    check_replaceable(out, overwrite, "an adapter", lambda folder: (folder / "adapter_config.json").is_file())

    def write(folder: Path) -> None:
        shutil.copytree(source.adapters[-1], folder, dirs_exist_ok=True)
        load_tokenizer(source).save_pretrained(folder)

    _replace(out, write, check)


def _replace(out: Path, write: Callable[[Path], None], check: Check | None) -> None:
    """Write a folder under a temporary name, check it, then put it in the place of ``out``."""
    with replacing(out, hint="choose another --out") as temporary:
        temporary.mkdir()
        write(temporary)
        if check is not None:
            check(temporary)


def check_replaceable(out: Path, overwrite: bool, what: str, is_ours: Callable[[Path], bool]) -> None:
    """Whatever ``--out`` names, only an empty folder or one that we could have written is ever replaced.

    Raises:
        DataError: ``out`` exists and ``overwrite`` is false, or it is a file, a link, or a folder that is not ours.
    """
    if not (out.exists() or out.is_symlink()):
        return
    if not overwrite:
        raise DataError(f"output folder exists: {out}", hint="give another --out, or --overwrite")
    if out.is_symlink() or not out.is_dir() or (any(out.iterdir()) and not is_ours(out)):
        raise DataError(
            f"--overwrite replaces the folder of {what}, and {out} is not one",
            hint="give another --out, or remove it yourself",
        )


def _holds_model(folder: Path) -> bool:
    """Return whether there is a model's ``config.json``; other programs have files of that name too."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "model_type" in config
