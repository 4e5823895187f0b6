"""A checkpoint's sharded weights as a plain Hugging Face folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from posttrain.errors import DataError
from posttrain.models.load import ModelSource, load_config, load_model, load_tokenizer


def save_text_side(source: ModelSource, folder: Path) -> None:
    """Write the config and the tokenizer with its chat template: all of a model but the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    load_config(source).save_pretrained(folder)
    load_tokenizer(source).save_pretrained(folder)


def save_whole(source: ModelSource, folder: Path, dtype: str) -> None:
    """Write a folder that ``AutoModelForCausalLM.from_pretrained`` loads: safetensors, config, tokenizer."""
    import torch

    model = load_model(source, dtype=getattr(torch, dtype))
    model.set_attn_implementation("sdpa")  # ours is registered in our own processes only
    model.save_pretrained(folder)
    load_tokenizer(source).save_pretrained(folder)


def export(source: ModelSource, out: Path, dtype: str, *, overwrite: bool) -> None:
    """``save_whole`` under a temporary name, then renamed.

    Raises:
        DataError: ``out`` exists and ``overwrite`` is false.
    """
    if out.exists() and not overwrite:
        raise DataError(f"output folder exists: {out}", hint="give another --out, or --overwrite")
    temporary = out.with_name(f".{out.name}.tmp{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        save_whole(source, temporary, dtype)
        if out.exists():
            shutil.rmtree(out)
        os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
