"""How per-token losses become one number.

Every aggregation is a weighted sum over tokens, with weights that depend on the whole global batch. The driver computes
the weights once; workers only sum. So the loss cannot depend on micro-batching, packing or world size.

Shape legend: T tokens, B sequences.
"""

from __future__ import annotations

from torch import Tensor

from posttrain.algos.segments import segment_ids, segment_sum


def token_weights(loss_mask: Tensor, cu_seqlens: Tensor, aggregation: str, *, norm_length: int | None = None) -> Tensor:
    """Return the weight of each token in the loss, [T] float32; 0 where ``loss_mask`` is false.

    - ``token-mean``: 1 / (tokens with loss in the batch) (DAPO, arXiv:2503.14476, equation 8);
    - ``seq-mean-token-mean``: 1 / (sequences x the sequence's own tokens) (GRPO, arXiv:2402.03300, equation 3);
    - ``seq-mean-token-sum``: 1 / sequences (Dr. GRPO, arXiv:2503.20783, up to a constant);
    - ``seq-mean-token-sum-norm``: 1 / (sequences x ``norm_length``), a fixed number of tokens, as the longest response
      (Dr. GRPO with its constant).

    Sequences without a token that carries loss do not count as sequences. A batch without any gives zeros.
    """
    mask = loss_mask.double()
    sequence = segment_ids(cu_seqlens)
    tokens = segment_sum(mask, sequence, len(cu_seqlens) - 1)
    sequences = (tokens > 0).sum().clamp(min=1)
    if aggregation == "token-mean":
        weights = mask / tokens.sum().clamp(min=1)
    elif aggregation == "seq-mean-token-mean":
        weights = mask / (sequences * tokens.clamp(min=1))[sequence]
    elif aggregation == "seq-mean-token-sum":
        weights = mask / sequences
    elif aggregation == "seq-mean-token-sum-norm":
        if norm_length is None or norm_length <= 0:
            raise ValueError("seq-mean-token-sum-norm needs a norm_length above 0")
        weights = mask / (sequences * norm_length)
    else:
        raise ValueError(f"unknown loss aggregation {aggregation!r}")
    return weights.float()
