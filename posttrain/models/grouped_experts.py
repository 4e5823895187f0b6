"""Experts of a layer by grouped matrix products, on rows that are sorted by expert.

A token's row goes to k experts, and what they make of it comes back and is added up. Both ways are gathers here, and so
is the gradient of each. The gradient of plain indexing is a scatter instead, which sorts all rows once more, or adds up
bfloat16 in an order of its own.

Shape legend: S tokens, k experts a token, R = S k rows, D hidden size, E experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.models.rows import copy_rows

NAME = "posttrain"
"""As ``config._experts_implementation`` has it."""


def register() -> None:
    """Make ``experts_implementation="posttrain"`` known to transformers in this process."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


class Sorted(NamedTuple):
    """The order of rows by expert."""

    order: Tensor
    """[R]: which of the choices of all tokens, token by token, a sorted row is of; its token is ``order // k``."""
    place: Tensor
    """[R]: where the sorted rows have a choice; the inverse of ``order``."""
    experts: Tensor
    """[R]: the expert of a sorted row."""


def sort(top_k_index: Tensor) -> Sorted:
    """Sort the choices of tokens, [S, k], by expert."""
    experts, order = torch.sort(top_k_index.flatten(), stable=True)
    count = torch.arange(len(order), device=order.device)
    return Sorted(order, torch.empty_like(order).index_copy(0, order, count), experts)


def spread(x: Tensor, rows: Sorted) -> Tensor:
    """Return the rows [R, D] of tokens [S, D], sorted by expert."""
    k = len(rows.order) // len(x)
    return copy_rows(x, rows.order // k, rows.place, torch.arange(0, len(rows.order), k, device=x.device))


def mix(y: Tensor, weights: Tensor, rows: Sorted) -> Tensor:
    """Return [S, D]: the sums of sorted rows ``y`` [R, D] over the experts of a token, with the router's weights
    [S, k]."""
    # torch leaves ``Function.apply`` without types.
    result: Tensor = _Mix.apply(y, weights, rows.order, rows.place)  # type: ignore[no-untyped-call]
    return result


def experts_forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """``forward`` of a module of experts of transformers, whatever its gate, its biases and the layout of its weights.

    Args:
        hidden_states: [S, D]
        top_k_index: [S, k] experts of each token
        top_k_weights: [S, k] of the router

    Returns:
        [S, D] in the type of ``hidden_states``.
    """
    from transformers.integrations.moe import _grouped_linear

    rows = sort(top_k_index)
    last = torch.arange(experts.num_experts, device=top_k_index.device, dtype=top_k_index.dtype)
    ends = torch.searchsorted(rows.experts, last, right=True, out_int32=True)

    def bias_of_rows(bias: Tensor) -> Tensor:
        count = torch.arange(len(rows.order), device=ends.device)
        return copy_rows(bias, rows.experts, count, F.pad(ends[:-1].long(), (1, 0)))

    def linear(x: Tensor, name: str) -> Tensor:
        bias = bias_of_rows(getattr(experts, f"{name}_bias")) if experts.has_bias else None
        weight = getattr(experts, name)
        result: Tensor = _grouped_linear(x, weight, ends, bias=bias, is_transposed=experts.is_transposed)
        return result

    x = spread(hidden_states, rows)
    if experts.has_gate:
        x = experts._apply_gate(linear(x, "gate_up_proj"))
    else:
        x = experts.act_fn(linear(x, "up_proj"))
    return mix(linear(x, "down_proj"), top_k_weights, rows).to(hidden_states.dtype)


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights, order, place)
        return (y[place].view(*weights.shape, -1) * weights[:, :, None]).sum(1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y, weights, order, place = ctx.saved_tensors
        of_rows = upstream[0][order // weights.shape[1]] * weights.flatten()[order, None]
        of_weights = (y[place].view(*weights.shape, -1) * upstream[0][:, None]).sum(-1)
        return of_rows.to(y.dtype), of_weights.to(weights.dtype), None, None
