"""Rows of a tensor picked, or copied to several places. The gradient of indexing would sort the rows, or add them up
with atomics, in the type of the gradient; that of these copies rows, or sums them in one order.

Shape legend: N rows of the tensor, M rows of the result, ... what a row has.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def pick_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return ``x[rows]`` [M, ...] for distinct rows [M] of x [N, ...]."""
    # torch leaves ``Function.apply`` without types.
    picked: Tensor = _PickRows.apply(x, rows)  # type: ignore[no-untyped-call]
    return picked


def copy_rows(x: Tensor, source: Tensor, copies: Tensor, first: Tensor) -> Tensor:
    """Return ``x[source]`` [M, ...] for x [N, ...].

    Args:
        source: [M] the row that each row of the result is.
        copies: [M] the places of all rows of the result, by the row of ``x`` that they are.
        first: [N] where the places of each row of ``x`` begin in ``copies``; a row may have none.
    """
    # torch leaves ``Function.apply`` without types.
    copied: Tensor = _CopyRows.apply(x, source, copies, first)  # type: ignore[no-untyped-call]
    return copied


class _PickRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        grad = upstream[0]
        return grad.new_zeros((ctx.count, *grad.shape[1:])).index_copy_(0, rows, grad), None


class _CopyRows(torch.autograd.Function):
    """The gradient of a row is the sum over its copies, always in the same order, and on a GPU in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, copies: Tensor, first: Tensor) -> Tensor:
        ctx.save_for_backward(copies, first)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        copies, first = ctx.saved_tensors
        grad = upstream[0]
        summed = F.embedding_bag(copies, grad.flatten(1), first, mode="sum")
        return summed.view(-1, *grad.shape[1:]), None, None, None
