"""Changes to vLLM's workers: they load weights from buckets, keep logits in float32, miss no call, and
show where they hang.

vLLM mixes ``BucketLoader`` into its worker class (``worker_extension_cls``), in processes of its own.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear.scaled_mm import BlockScaledMMLinearKernel, deep_gemm
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import fp8 as fp8_quantization
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.parameter import BasevLLMParameter
from vllm.platforms import current_platform
from vllm.platforms.interface import PlatformEnum

from posttrain.core.stacks import write_stacks_at_signal
from posttrain.models.fp8 import DTYPE, dequantize, rounded_activations
from posttrain.models.logprobs import float32_logits
from posttrain.weight_sync.broadcast import RankLost
from posttrain.weight_sync.buckets import Bucket, BucketReader
from posttrain.weight_sync.quantized import check_overwritten, poison

write_stacks_at_signal()

if current_platform.is_cpu():
    # On a CPU vLLM repacks every matrix for oneDNN after loading, or in bfloat16 for AMX, and frees the parameter, so
    # that new values cannot be loaded into it. Without these it multiplies by the parameters themselves.
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *sizes_and_type: False


def _keep_float32_logits() -> None:
    """Compute logits in float32. vLLM rounds them to the model's type, and then computes in float32 with the result."""
    rounded = UnquantizedEmbeddingMethod.apply

    def apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Any:
        if x.is_cuda and x.ndim == 2 and x.dtype == layer.weight.dtype and bias is None:
            return float32_logits(x, layer.weight)
        return rounded(self, layer, x, bias)

    UnquantizedEmbeddingMethod.apply = apply


_keep_float32_logits()

_LOOK_MS = 5000
"""Interval between two looks for a call, of a worker that has had none for a second."""


def _look_for_calls() -> None:
    """Have workers that wait for a call look for one now and then. A call lies in shared memory, and a message of
    ZeroMQ tells of it, which may get lost (vllm#45224). vLLM up to 0.26 waits for that message without end, so that the
    call hangs, and with it the run; later ones do as here."""
    endless = MessageQueue.ReadTimeoutWithWarnings.timeout_ms

    def timeout_ms(self: Any) -> int:
        found: int | None = endless(self)
        return _LOOK_MS if found is None else found

    MessageQueue.ReadTimeoutWithWarnings.timeout_ms = timeout_ms


_look_for_calls()


def _keep_parameters() -> None:
    """Keep parameters in FP8 whose kernels read them as they were loaded. vLLM puts plain ones in their place, which no
    longer know how to take new weights."""

    def patched(replace: Callable[..., None]) -> Callable[..., None]:
        def replace_if_other(layer: Any, name: str, new: Any, *args: Any, **kwargs: Any) -> None:
            old = getattr(layer, name, None)
            if isinstance(new, Tensor) and isinstance(old, Tensor) and _same_memory(old, new):
                return
            replace(layer, name, new, *args, **kwargs)

        return replace_if_other

    for module in (BlockScaledMMLinearKernel, deep_gemm, fp8_quantization):
        module.replace_parameter = patched(module.replace_parameter)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


_keep_parameters()


class TorchBlockKernel(BlockScaledMMLinearKernel.Fp8BlockScaledMMLinearKernel):  # type: ignore[misc]
    """Products of blocks in FP8 on a CPU, in plain torch, by the weights as they were loaded. vLLM's own need AMX, and
    pack them. This one is for tests, and rounds as the kernels of GPUs do."""

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        return True, None

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        """Return A [T, K] times the quantized B [N, K], whose scales are Bs. As is not used: A is not quantized."""
        x = rounded_activations(A, self.weight_group_shape.col)
        return torch.nn.functional.linear(x, dequantize(B, Bs, A.dtype))


if current_platform.is_cpu():
    kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].insert(0, TorchBlockKernel)


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
        if bucket.number == 0:
            _check_kernels(model)
            poison(model)
        try:
            model.load_weights(self.bucket_reader.tensors(bucket))
        except RankLost as error:
            raise RankLost(f"{RankLost.__name__}: {error}") from error  # vLLM passes on only the message
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # the trainer overwrites the bucket as soon as this has returned

    def check_quantized(self) -> None:
        """Check that an update has reached all parameters in FP8. Raises ``WeightSyncError``."""
        check_overwritten(self.model_runner.get_model())

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


def _check_kernels(model: nn.Module) -> None:
    """Raise ``RuntimeError`` where a kernel has FP8 weights in a layout of its own."""
    for name, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        quantized = isinstance(layer, LinearBase) and isinstance(weight, Tensor) and weight.dtype == DTYPE
        if quantized and not isinstance(weight, BasevLLMParameter):
            raise RuntimeError(
                f"vLLM's kernel for FP8 has laid out the weights of {name} anew, and cannot take new ones; "
                "rollout.engine_options: linear_backend = cutlass or triton do not, nor deep_gemm on Hopper"
            )
