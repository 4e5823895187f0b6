"""The two passes over logits that ``posttrain.models.logprobs`` makes on a GPU: one reads them, one turns them into
gradients. Each row is read once a pass, so both run at the speed of the memory.

Shape legend: n tokens, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_WARPS = 8


def statistics(logits: Tensor, targets: Tensor, normaliser: Tensor, logprobs: Tensor, entropies: Tensor) -> None:
    """Fill ``normaliser`` (log of the sum of exponentials), ``logprobs`` of the targets and ``entropies``.

    Args:
        logits: [n, V] float32, contiguous. targets: [n] int64. The others: [n] float32.
    """
    rows, vocabulary = logits.shape
    _statistics[(rows,)](logits, targets, normaliser, logprobs, entropies, vocabulary, BLOCK=_BLOCK, num_warps=_WARPS)


def gradient(
    logits: Tensor,
    targets: Tensor,
    normaliser: Tensor,
    entropies: Tensor,
    by_logprob: Tensor | None,
    by_entropy: Tensor | None,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of the logits, times ``scale``; see ``_Gradients.add``. It overwrites them.

    Returns:
        [n, V] of ``dtype``, in the memory of the logits: where an element is half as wide, in the first half of a row.
    """
    rows, vocabulary = logits.shape
    out = logits.view(dtype)[:, :vocabulary]
    zero = torch.zeros_like(normaliser) if by_logprob is None or by_entropy is None else None
    _gradient[(rows,)](
        logits,
        targets,
        normaliser,
        entropies,
        (zero if by_logprob is None else by_logprob.contiguous()),
        (zero if by_entropy is None else by_entropy.contiguous()),
        out,
        out.stride(0),
        scale,
        vocabulary,
        WITH_ENTROPY=by_entropy is not None,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return out


@triton.jit
def _statistics(logits, targets, normaliser, logprobs, entropies, V, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * V
    # Online over blocks (Milakov and Gimelshein, arXiv:1805.02867). Each lane keeps its own largest logit m so far and
    # its own sums of e^(z - m) and of (z - m) e^(z - m): lanes meet once, at the end.
    lanes = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), -1e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        z = tl.load(base + start + lanes, mask=start + lanes < V, other=-1e38)
        larger = tl.maximum(largest, z)
        shift = largest - larger
        e = tl.exp(z - larger)
        weighted = (weighted + shift * total) * tl.exp(shift) + (z - larger) * e
        total = total * tl.exp(shift) + e
        largest = larger
    m = tl.max(largest, 0)
    shift = largest - m
    sum_e = tl.sum(total * tl.exp(shift), 0)
    sum_w = tl.sum(tl.where(shift > -1e30, (weighted + shift * total) * tl.exp(shift), 0.0), 0)
    log_sum = tl.log(sum_e)
    chosen = tl.load(base + tl.load(targets + row))
    tl.store(normaliser + row, m + log_sum)
    tl.store(logprobs + row, chosen - m - log_sum)
    # H = log Z - E[z], both relative to the largest logit.
    tl.store(entropies + row, log_sum - sum_w / sum_e)


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    logits, targets, normaliser, entropies, by_logprob, by_entropy, out, out_stride, scale, V,
    WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * V
    out_base = out + row.to(tl.int64) * out_stride
    target = tl.load(targets + row)
    log_z = tl.load(normaliser + row)
    g = tl.load(by_logprob + row) * scale
    if WITH_ENTROPY:
        h = tl.load(by_entropy + row) * scale
        entropy = tl.load(entropies + row)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        logprob = tl.load(base + columns, mask=columns < V, other=float("-inf")) - log_z
        # The first block is written where its second half was read; later ones where earlier blocks were.
        tl.debug_barrier()
        p = tl.exp(logprob)
        d = tl.where(columns == target, g, 0.0) - g * p
        if WITH_ENTROPY:
            d -= h * p * (tl.where(columns < V, logprob, 0.0) + entropy)
        tl.store(out_base + columns, d.to(out.dtype.element_ty), mask=columns < V)
