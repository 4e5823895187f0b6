"""What all processes of verl import in ``bench_peers.py``: of packed rows transformers 5.12 hands on the length of the
longest as a tensor, which FlashAttention-2 takes and FlashAttention-4 refuses. Here it is a number."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import modeling_flash_attention_utils as flash

_prepare = flash.prepare_fa_kwargs_from_position_ids


def prepare_with_numbers(position_ids: Tensor) -> tuple[Any, tuple[int, int]]:
    """As the function of transformers that it replaces, which has waited for the GPU already."""
    offsets, (longest, longest_key) = _prepare(position_ids)
    return offsets, (int(longest), int(longest_key))


flash.prepare_fa_kwargs_from_position_ids = prepare_with_numbers
