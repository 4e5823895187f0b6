"""Changes to vLLM's workers: they load weights from buckets, and keep logits in float32.

vLLM mixes ``BucketLoader`` into its worker class (``worker_extension_cls``), in processes of its own.
"""

from __future__ import annotations

import functools
import pickle
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from posttrain.models.logprobs import float32_logits
from posttrain.weight_sync.broadcast import RankLost
from posttrain.weight_sync.buckets import Bucket, BucketReader

if current_platform.is_cpu():
    # On a CPU vLLM repacks every matrix for oneDNN after loading, and frees the parameter, so that new values cannot be
    # loaded into it. Without oneDNN it multiplies by the parameters themselves.
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False


def _keep_float32_logits() -> None:
    """Compute logits in float32. vLLM rounds them to the model's type, and then computes in float32 with the result."""
    rounded = UnquantizedEmbeddingMethod.apply

    def apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Any:
        if x.is_cuda and x.ndim == 2 and x.dtype == layer.weight.dtype and bias is None:
            return float32_logits(x, layer.weight)
        return rounded(self, layer, x, bias)

    UnquantizedEmbeddingMethod.apply = apply


_keep_float32_logits()


class BucketLoader:
    """Methods that ``collective_rpc`` reaches; ``self`` is vLLM's worker."""

    model_runner: Any
    device: torch.device
    rank: int
    shapes: dict[str, torch.Size]
    """Shapes of the parameters, while they are dropped."""

    @functools.cached_property
    def bucket_reader(self) -> BucketReader:
        return BucketReader(self.rank, self.device)

    def load_bucket(self, pickled: bytes) -> None:
        """Overwrite the parameters of a ``Bucket``, each worker its own shard of them."""
        bucket: Bucket = pickle.loads(pickled)
        model = self.model_runner.get_model()
        packed = [name for name, parameter in model.named_parameters() if parameter.numel() == 0]
        if packed:
            raise RuntimeError(f"vLLM has packed {packed[0]} into another layout, and cannot take new weights")
        try:
            model.load_weights(self.bucket_reader.tensors(bucket))
        except RankLost as error:
            raise RankLost(f"{RankLost.__name__}: {error}") from error  # vLLM passes on only the message
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # the trainer overwrites the bucket as soon as this has returned

    def elements(self) -> int:
        """Return the number of elements of all parameters that are allocated."""
        return sum(parameter.numel() for parameter in self.model_runner.get_model().parameters())

    def drop_weights(self) -> None:
        """Free the memory of the weights, on a CPU, where vLLM itself cannot."""
        self.shapes = {}
        for name, parameter in self.model_runner.get_model().named_parameters():
            self.shapes[name] = parameter.shape
            parameter.data = parameter.data.new_empty(0)

    def allocate_weights(self) -> None:
        """Allocate memory for the weights again."""
        for name, parameter in self.model_runner.get_model().named_parameters():
            parameter.data = parameter.data.new_empty(self.shapes[name])
