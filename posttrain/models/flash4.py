"""FlashAttention-4 over ragged rows as one operator, which a compiled layer keeps in its graph.

Called as the package offers it, it would break the graph of every layer in two, and selective activation checkpointing
would compute it again.

Shape legend: T tokens of all sequences, C of them with queries (the last ones of each), B sequences, H query heads, K
key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from flash_attn.cute.interface import _flash_attn_bwd, flash_attn_varlen_func
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, longest: int, scale: float | None) -> Tensor:
    """Causal self-attention: q [C, H, D], k and v [T, K, D], their offsets [B + 1] int32 -> [C, H, D]."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    result: tuple[Tensor, Tensor] = _forward(q, k, v, cu_q, cu_k, longest, scale)
    return result[0]


@torch.library.custom_op("posttrain::flash4", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    out, log_sum = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=longest, max_seqlen_k=longest,
        softmax_scale=scale, causal=True, return_lse=True,
    )  # fmt: skip
    return out, log_sum


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.custom_op("posttrain::flash4_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, cu_q: Tensor, cu_k: Tensor,
    longest: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    of_q, of_k, of_v = _flash_attn_bwd(
        q, k, v, out, grad.contiguous(), log_sum, softmax_scale=scale, causal=True,
        cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=longest, max_seqlen_k=longest,
    )[:3]  # fmt: skip
    return of_q, of_k, of_v


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, cu_q: Tensor, cu_k: Tensor,
    longest: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_q, cu_k, ctx.longest, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_k)


def _chain(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(grad, *ctx.saved_tensors, ctx.longest, ctx.scale), None, None, None, None


_forward.register_autograd(_chain, setup_context=_remember)
