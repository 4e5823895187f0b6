"""Experts of a layer by grouped matrix products, on rows that are sorted by expert.

A token's row goes to k experts, and what they make of it comes back and is added up. Both ways are gathers here, and so
is the gradient of each. The gradient of plain indexing is a scatter instead, which sorts all rows once more, or adds up
bfloat16 in an order of its own.

The router's weights go in before an expert's last product, which is linear: what comes out of it, the widest rows of
all, is then kept for no gradient.

Shape legend: S tokens, k experts a token, R = S k rows, D hidden size, E experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.models.rows import copy_rows, pick_rows

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


def weigh(x: Tensor, weights: Tensor, rows: Sorted) -> Tensor:
    """Return sorted rows ``x`` [R, ...] times the router's weights [S, k] of them."""
    return (x * pick_rows(weights.flatten(), rows.order)[:, None]).to(x.dtype)


def mix(y: Tensor, rows: Sorted, k: int) -> Tensor:
    """Return [S, D]: the sums of sorted rows ``y`` [R, D] over the k experts of a token."""
    # torch leaves ``Function.apply`` without types.
    result: Tensor = _Mix.apply(y, rows.order, rows.place, k)  # type: ignore[no-untyped-call]
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

    def weighed(x: Tensor) -> Tensor:
        return weigh(x, top_k_weights, rows)

    def bias_of_rows(name: str) -> Tensor | None:
        if not experts.has_bias:
            return None
        bias, count = getattr(experts, f"{name}_bias"), torch.arange(len(rows.order), device=ends.device)
        return copy_rows(bias, rows.experts, count, F.pad(ends[:-1].long(), (1, 0)))

    def linear(x: Tensor, name: str, bias: Tensor | None) -> Tensor:
        weight = getattr(experts, name)
        result: Tensor = _grouped_linear(x, weight, ends, bias=bias, is_transposed=experts.is_transposed)
        return result

    x = spread(hidden_states, rows)
    if experts.has_gate:
        x = experts._apply_gate(linear(x, "gate_up_proj", bias_of_rows("gate_up_proj")))
    else:
        x = experts.act_fn(linear(x, "up_proj", bias_of_rows("up_proj")))
    bias = bias_of_rows("down_proj")
    y = linear(weighed(x), "down_proj", None if bias is None else weighed(bias))
    return mix(y, rows, top_k_index.shape[1]).to(hidden_states.dtype)


class _Mix(torch.autograd.Function):
    """The gradient of a token goes to its k rows by one gather. That of picking and adding up rows would write it for
    each of them first, and then copy it to its place."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, place: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        return y[place].view(-1, k, y.shape[-1]).sum(1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        return upstream[0][order // ctx.k], None, None, None
