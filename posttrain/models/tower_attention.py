"""Attention of vision towers whose images, or windows of them, lie side by side in one row of patches.

transformers calls attention once for each window, which are hundreds in each layer for a micro-batch: a GPU waits for
the launches. Only what has "flash" in its name is given all windows in one call, so this is registered under such a
name. A kernel over ragged rows computes it where there is one; elsewhere windows of one length are computed together.

Shape legend: P patches of all windows, W windows of one length L, H heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posttrain.models.attention_kernels import HALF, torch_varlen

NAME = "posttrain_flash"


@dataclass(frozen=True)
class Windows:
    """How patches divide into windows. It is worked out once for each tensor of offsets, which all layers get."""

    offsets: Tensor
    """[windows + 1] int32, on the model's device"""

    @cached_property
    def longest(self) -> int:
        """Patches of the largest window. Waits for a GPU once."""
        return int(self.offsets.diff().max())

    @cached_property
    def of_each_length(self) -> tuple[Tensor, ...]:
        """[W, L] each: the patches of the windows of one length."""
        lengths, starts = self.offsets.diff(), self.offsets[:-1].long()
        return tuple(
            starts[lengths == length, None] + torch.arange(length, device=starts.device)
            for length in torch.unique(lengths).tolist()
        )

    @staticmethod
    def of(offsets: Tensor) -> Windows:
        found = getattr(offsets, "posttrain_windows", None)
        if found is None:
            # A copy: what refers to the tensor and is an attribute of it would be kept until garbage is searched for.
            found = Windows(offsets.int().clone())
            # All layers of a micro-batch get this tensor, and nothing else of ours. Its stubs know no such attribute.
            offsets.posttrain_windows = found  # type: ignore[attr-defined]
        return found


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    cu_seq_lens_q: Tensor,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function registered with transformers: patches attend to all others of their window.

    Args:
        query, key, value: [1, H, P, D].
        cu_seq_lens_q: [windows + 1] offsets of the windows.

    Returns:
        [1, P, H, D], and None for the attention weights.
    """
    if attention_mask is not None or dropout:
        raise ValueError("attention of a vision tower takes neither a mask nor dropout")
    windows = Windows.of(cu_seq_lens_q)
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if q.is_cuda and q.dtype in HALF:
        longest, offsets = windows.longest, windows.offsets
        out = torch_varlen(q, k, v, offsets, offsets, (longest, longest), scaling, causal=False)
    else:
        out = _by_length(q, k, v, windows, scaling)
    return out.unsqueeze(0), None


def _by_length(q: Tensor, k: Tensor, v: Tensor, windows: Windows, scaling: float | None) -> Tensor:
    """[P, H, D] -> [P, H, D], without a kernel over ragged rows."""
    out = torch.empty_like(q)
    for patches in windows.of_each_length:
        part_q, part_k, part_v = (x[patches].transpose(1, 2) for x in (q, k, v))
        part = F.scaled_dot_product_attention(part_q, part_k, part_v, scale=scaling)
        out = out.index_copy(0, patches.flatten(), part.transpose(1, 2).flatten(0, 1))
    return out


def register() -> None:
    """Make it known to transformers in this process."""
    from transformers import AttentionInterface

    # How many windows there are, and how long the largest is, are numbers of Python: outside of compiled graphs.
    AttentionInterface.register(NAME, torch.compiler.disable(attend))
