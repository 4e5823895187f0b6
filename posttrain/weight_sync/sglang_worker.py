"""Changes to SGLang's schedulers: they load weights from buckets, by a loader that they import (``LOADER``), and keep
logits in float32."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.core.errors import WeightSyncError
from posttrain.core.stacks import write_stacks_at_signal
from posttrain.models.fp8_layers import SCALE
from posttrain.models.logprobs import float32_logits
from posttrain.weight_sync.broadcast import RankLost
from posttrain.weight_sync.buckets import Bucket, BucketReader
from posttrain.weight_sync.quantized import check_overwritten, poison

LOADER = "posttrain.weight_sync.sglang_worker.load"


def run_scheduler(*args: Any, **kwargs: Any) -> Any:
    """Run SGLang's scheduler process, with SGLang's own arguments."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    write_stacks_at_signal()
    _keep_float32_logits()
    _report_failures()
    return run_scheduler_process(*args, **kwargs)


def _keep_float32_logits() -> None:
    """Compute logits in float32. SGLang rounds them to the model's type, and then computes in float32 with the
    result."""
    from sglang.srt.layers import logits_processor

    rounded = logits_processor.LogitsProcessor._compute_lm_head

    def compute(self: Any, hidden: Tensor, head: Any, bias: Tensor | None = None) -> Any:
        method = getattr(head, "quant_method", None)
        plain = not hasattr(head, "set_lora") and not logits_processor.should_apply_lm_head_quant_method(head, method)
        weight = getattr(head, "weight", None)
        # SGLang's batch-invariant products keep the weights' type: in that mode its own float32 head is configured.
        if plain and not self.use_fp32_lm_head and isinstance(weight, Tensor) and hidden.dtype == weight.dtype:
            return float32_logits(hidden, weight)
        return rounded(self, hidden, head, bias)

    logits_processor.LogitsProcessor._compute_lm_head = compute


def _report_failures() -> None:
    """Report a lost rank, and weights that did not arrive, as the result of the update. SGLang's schedulers end with
    whatever a loader raises, and this one may get the same weights again."""
    from sglang.srt.managers.tp_worker import TpModelWorker

    update = TpModelWorker.update_weights_from_tensor

    def update_or_report(self: Any, request: Any) -> tuple[bool, str]:
        try:
            result: tuple[bool, str] = update(self, request)
        except (RankLost, WeightSyncError) as error:
            return False, f"{type(error).__name__}: {error.message}"
        return result

    TpModelWorker.update_weights_from_tensor = update_or_report


def pack(bucket: Bucket, rank: int) -> bytes:
    """Return a bucket as ``update_weights_from_tensor`` passes it to the scheduler of a rank: a list of a name and a
    tensor. SGLang unpickles tensors and plain types only, so the bucket is encoded in the name."""
    return pickle.dumps([(pickle.dumps((bucket, rank)).hex(), torch.empty(0))])


def load(model: Any, packed: Sequence[tuple[str, Tensor]]) -> None:
    """Overwrite the parameters of a bucket, each scheduler its own shard of them; of one without tensors see
    ``SGLangEngine._pass_on``."""
    for text, _ in packed:
        bucket, rank = pickle.loads(bytes.fromhex(text))
        if not bucket.entries:
            check_overwritten(model)
            continue
        if bucket.number == 0:
            poison(model)
        tensors = _reader(rank).tensors(bucket)
        if any(kind.__name__ == "LlamaForCausalLM" for kind in type(model).__mro__):
            tensors = ((_ScaleName(name) if name.endswith(SCALE) else name, values) for name, values in tensors)
        model.load_weights(tensors)
    _forget_features()
    torch.cuda.synchronize()  # the trainer overwrites the bucket as soon as this has returned


class _ScaleName(str):
    """Name of the scales of blocks, for SGLang's loader of Llama models: it drops the end of names that end as this one
    does, and then finds no such parameter."""

    def endswith(self, *_: Any) -> bool:
        return False


def _forget_features() -> None:
    """Drop what a vision tower with other weights made of images. SGLang keeps it when it drops prefixes."""
    from sglang.srt.managers import mm_utils

    if mm_utils.embedding_cache is not None:
        mm_utils.embedding_cache.clear()


@functools.cache
def _reader(rank: int) -> BucketReader:
    """Return this process's reader: SGLang calls ``load`` without an object of ours that could hold it."""
    return BucketReader(rank, torch.device("cuda", torch.cuda.current_device()))
