"""What vLLM's workers do for us: they take weights, and keep logits in float32.

vLLM mixes ``WeightReceiver`` into its worker class (``worker_extension_cls``), in processes of its own.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from posttrain.models.logprobs import float32_logits
from posttrain.weight_sync.broadcast import MemberLost
from posttrain.weight_sync.buckets import Bucket

if current_platform.is_cpu():
    # On a CPU vLLM packs every matrix anew for oneDNN when it has loaded it, and lets go of the weight: new values then
    # have nowhere to go. Without oneDNN it multiplies by the weights as they are.
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False


def _keep_logits() -> None:
    """vLLM rounds logits to the model's type, and then reckons in float32 with what is left of them."""
    rounded = UnquantizedEmbeddingMethod.apply

    def apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Any:
        if x.is_cuda and x.ndim == 2 and x.dtype == layer.weight.dtype and bias is None:
            return float32_logits(x, layer.weight)
        return rounded(self, layer, x, bias)

    UnquantizedEmbeddingMethod.apply = apply


_keep_logits()


class WeightReceiver:
    """Methods that ``collective_rpc`` reaches; ``self`` is vLLM's worker."""

    model_runner: Any
    device: torch.device
    rank: int
    shapes: dict[str, torch.Size]
    """Of the parameters, while they are dropped."""

    def load_bucket(self, pickled: bytes) -> None:
        """Overwrite the parameters of a ``Bucket``, each worker its own share of them."""
        bucket: Bucket = pickle.loads(pickled)
        model = self.model_runner.get_model()
        packed = [name for name, parameter in model.named_parameters() if parameter.numel() == 0]
        if packed:
            raise RuntimeError(f"vLLM has packed {packed[0]} into another layout, and cannot take new weights")
        try:
            model.load_weights(bucket.tensors(self.rank, self.device))
        except MemberLost as error:
            raise MemberLost(f"{MemberLost.__name__}: {error}") from error  # its class does not travel
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # the trainer fills the bucket anew as soon as this has returned

    def elements(self) -> int:
        """Of all parameters, as far as they are there."""
        return sum(parameter.numel() for parameter in self.model_runner.get_model().parameters())

    def drop_weights(self) -> None:
        """Give back the memory of the weights, on a CPU, where vLLM itself cannot."""
        self.shapes = {}
        for name, parameter in self.model_runner.get_model().named_parameters():
            self.shapes[name] = parameter.shape
            parameter.data = parameter.data.new_empty(0)

    def make_room(self) -> None:
        """Have room for the weights again."""
        for name, parameter in self.model_runner.get_model().named_parameters():
            parameter.data = parameter.data.new_empty(self.shapes[name])
