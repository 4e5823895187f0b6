"""What SGLang's schedulers do for us: they take weights out of buckets, by a loader that they import (``LOADER``)."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.models.buckets import Bucket

LOADER = "posttrain.rollout.sglang_worker.load"


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
