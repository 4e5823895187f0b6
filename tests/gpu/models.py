"""Small random models on disk, under a real tokenizer."""

import shutil
import socket
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

HALF_B = {
    "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 4096,
}  # fmt: skip
"""Qwen2.5-0.5B's shape, for short sequences."""


def write_model(folder, shape, *, dtype=torch.bfloat16, tokenizer=""):
    """Random weights of seed 0."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**shape))
    model.to(dtype).save_pretrained(folder)
    for file in Path(tokenizer).iterdir() if tokenizer else ():
        if file.is_file():
            shutil.copy(file, folder)
    return folder


def free_port():
    """Of 127.0.0.1, for a process group: the store of the one before may still be there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
