"""Safetensors files written tensor by tensor: the format's own library wants all of a file's tensors in memory.

Format: https://github.com/huggingface/safetensors (eight bytes: length of the header; the header, JSON; the tensors).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
Shape = tuple[int, ...]


def write(
    folder: Path,
    shapes: Mapping[str, Shape],
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    max_shard_size: str,
) -> None:
    """Write ``model.safetensors``, or files of at most ``max_shard_size`` ("5GB") and their index.

    Args:
        shapes: of all tensors, in the order in which ``tensors`` brings them.
        dtype: what they are written as.

    Raises:
        ValueError: other tensors come than ``shapes`` says.
    """
    plan = split_state_dict_into_shards_factory(
        dict(shapes),
        get_storage_size=lambda shape: math.prod(shape) * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    arriving = iter(tensors)
    files: dict[str, IO[bytes]] = {}
    with ExitStack() as opened:
        for member, shape in shapes.items():
            arrived, tensor = next(arriving, ("nothing", torch.empty(0)))
            if (arrived, tuple(tensor.shape)) != (member, shape):
                raise ValueError(f"{arrived} {tuple(tensor.shape)} came instead of {member} {shape}")
            name = plan.tensor_to_filename[member]
            members = plan.filename_to_tensors[name]
            # A tensor above the size has a file of its own, amid those of the file that is being written.
            if name not in files:
                files[name] = opened.enter_context((folder / name).open("wb"))
                files[name].write(_header({member: shapes[member] for member in members}, dtype))
            flat = tensor.detach().to("cpu", dtype).contiguous().view(-1)
            files[name].write(flat.view(torch.uint8).numpy().data)  # `tofile` would not say why it failed
            if member == members[-1]:
                files[name].close()
    if (left := next(arriving, None)) is not None:
        raise ValueError(f"{left[0]} came instead of the end")
    if len(plan.filename_to_tensors) > 1:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _header(shapes: Mapping[str, Shape], dtype: torch.dtype) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
