"""What SGLang's schedulers do for us: they take weights out of buckets, by a loader that they import (``LOADER``), and
keep logits in float32."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.models.logprobs import float32_logits
from posttrain.weight_sync.broadcast import MemberLost
from posttrain.weight_sync.buckets import Bucket

LOADER = "posttrain.weight_sync.sglang_worker.load"


def run_scheduler(*args: Any, **kwargs: Any) -> Any:
    """SGLang's scheduler process. Its arguments are SGLang's own."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    _keep_logits()
    _survive_lost_members()
    return run_scheduler_process(*args, **kwargs)


def _keep_logits() -> None:
    """SGLang rounds logits to the model's type, and then reckons in float32 with what is left of them."""
    from sglang.srt.layers import logits_processor

    rounded = logits_processor.LogitsProcessor._compute_lm_head

    def compute(self: Any, hidden: Tensor, head: Any, bias: Tensor | None = None) -> Any:
        method = getattr(head, "quant_method", None)
        plain = not hasattr(head, "set_lora") and not logits_processor.should_apply_lm_head_quant_method(head, method)
        weight = getattr(head, "weight", None)
        # Its batch-invariant products have no result of another type: there SGLang's own float32 head is asked for.
        if plain and not self.use_fp32_lm_head and isinstance(weight, Tensor) and hidden.dtype == weight.dtype:
            return float32_logits(hidden, weight)
        return rounded(self, hidden, head, bias)

    logits_processor.LogitsProcessor._compute_lm_head = compute


def _survive_lost_members() -> None:
    """SGLang's schedulers end with whatever a loader raises. One that was told that somebody else is lost says so, and
    gets the same weights again."""
    from sglang.srt.managers.tp_worker import TpModelWorker

    update = TpModelWorker.update_weights_from_tensor

    def update_or_say(self: Any, request: Any) -> tuple[bool, str]:
        try:
            result: tuple[bool, str] = update(self, request)
        except MemberLost as error:
            return False, f"{MemberLost.__name__}: {error.message}"
        return result

    TpModelWorker.update_weights_from_tensor = update_or_say


def pack(bucket: Bucket, rank: int) -> bytes:
    """What ``update_weights_from_tensor`` passes on to the scheduler of a rank: pairs of a name and a tensor. SGLang
    unpickles tensors and plain types only, so the bucket travels as the name."""
    return pickle.dumps([(pickle.dumps((bucket, rank)).hex(), torch.empty(0))])


def load(model: Any, packed: Sequence[tuple[str, Tensor]]) -> None:
    """Overwrite the parameters of a bucket, each scheduler its own share of them."""
    for text, _ in packed:
        bucket, rank = pickle.loads(bytes.fromhex(text))
        model.load_weights(bucket.tensors(rank, torch.device("cuda", torch.cuda.current_device())))
    torch.cuda.synchronize()  # the trainer fills the bucket anew as soon as this has returned
