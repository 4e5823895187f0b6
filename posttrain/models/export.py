"""A checkpoint's sharded weights as a plain Hugging Face folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from posttrain.errors import DataError
from posttrain.models.classifier import classifier_config, is_classifier, load_classifier
from posttrain.models.load import ModelSource, load_config, load_model, load_tokenizer


def save_text_side(source: ModelSource, folder: Path, *, reward_model: bool = False) -> None:
    """Write the config and the tokenizer with its chat template: all of a model but the weights.

    Args:
        source: what the weights were trained from.
        reward_model: they are now those of a model that scores.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (classifier_config(source) if reward_model else load_config(source)).save_pretrained(folder)
    load_tokenizer(source).save_pretrained(folder)


def save_whole(source: ModelSource, folder: Path) -> None:
    """Write a folder that ``AutoModelForCausalLM.from_pretrained`` loads, or of a reward model
    ``AutoModelForSequenceClassification``: float32 safetensors, config, tokenizer."""
    import torch

    load = load_classifier if is_classifier(load_config(source)) else load_model
    model = load(source, dtype=torch.float32)
    model.set_attn_implementation("sdpa")  # ours is registered in our own processes only
    model.save_pretrained(folder)
    load_tokenizer(source).save_pretrained(folder)


def export(source: ModelSource, out: Path, *, overwrite: bool) -> None:
    """``save_whole`` under a temporary name, then renamed.

    Raises:
        DataError: ``out`` exists and ``overwrite`` is false, or ``out`` is neither empty nor a model's folder.
    """
    check_replaceable(out, overwrite, "a model", _holds_model)
    _replace(out, lambda folder: save_whole(source, folder))


def export_adapter(source: ModelSource, out: Path, *, overwrite: bool) -> None:
    """Write the last adapter of ``source`` and the tokenizer into a folder that ``PeftModel.from_pretrained`` loads.

    Raises:
        DataError: ``out`` exists and ``overwrite`` is false, or ``out`` is neither empty nor an adapter's folder.
    """
    check_replaceable(out, overwrite, "an adapter", lambda folder: (folder / "adapter_config.json").is_file())

    def write(folder: Path) -> None:
        shutil.copytree(source.adapters[-1], folder, dirs_exist_ok=True)
        load_tokenizer(source).save_pretrained(folder)

    _replace(out, write)


def _replace(out: Path, write: Callable[[Path], None]) -> None:
    """Write a folder under a temporary name, then put it in the place of ``out``."""
    temporary = out.with_name(f".{out.name}.tmp{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        if out.exists():
            shutil.rmtree(out)
        os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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
    """Whether there is a model's ``config.json``; other programs have files of that name too."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "model_type" in config
